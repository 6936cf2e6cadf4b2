"""inspect, verify, diff and average, as a user runs them."""

import json
import re
import shlex
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from megapipe.checkpoint import RunState
from megapipe.config import command_line
from megapipe.config.model import ModelConfig
from megapipe.conversion import operations
from megapipe.conversion.command import main
from megapipe.conversion.formats import Contents, StoredTensor
from megapipe.conversion.megapipe_format import MegapipeSource, MegapipeTarget, parameters_of
from megapipe.conversion.operations import difference

MODEL = ModelConfig(vocabulary_size=61, num_layers=1, hidden_size=32, num_heads=4, max_positions=16)
QKV = "blocks.0.attention.qkv.weight"


def tensors(seed: int, model: ModelConfig = MODEL) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(spec.shape, generator=generator) for name, spec in parameters_of(model).items()}


def write(folder: Path, weights: dict[str, Tensor], model: ModelConfig = MODEL, step: int = 5) -> Path:
    """Write a checkpoint of weights and one moment, which is their square."""
    kinds = {"weights": lambda values: values, "moment": torch.square}
    described = tuple(
        StoredTensor(name, kind, tuple(values.shape), "F32") for kind in kinds for name, values in weights.items()
    )
    run = RunState(step, 8 * step, {"seed": 7}, "fp32", ((step, 2.5),), {"model": asdict(model)})
    target = MegapipeTarget(folder, Contents(model, described, run, dict.fromkeys(weights, step)))
    for tensor in described:
        target.add(tensor, kinds[tensor.kind](weights[tensor.name]))
    target.finish()
    return folder


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return write(tmp_path / "run/checkpoints/step-00000005", tensors(0))


def test_inspect_prints_tables_and_json(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(checkpoint.parents[1])]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "a megapipe checkpoint" in lines
    rows = [line.split() for line in lines]
    elements = sum(tensor.numel() for tensor in tensors(0).values())
    assert ["model.hidden_size", "32"] in rows
    assert ["step", "5"] in rows
    assert ["weights", str(len(tensors(0))), f"{elements:,}", f"{4 * elements:,}", "F32"] in rows
    assert [QKV, "weights", *["4", "x", "3", "x", "8", "x", "32"], "F32", "12,288"] in rows
    assert main(["inspect", str(checkpoint), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["run"]["step"] == 5
    assert report["model"]["hidden_size"] == 32
    assert report["parameters"] == elements
    assert {"name": QKV, "kind": "moment", "shape": [4, 3, 8, 32], "dtype": "F32", "bytes": 12288} in report["tensors"]


def test_verify_names_every_bad_file_and_tensor(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["verify", str(checkpoint)]) == 0
    source = MegapipeSource(checkpoint)
    hurt = [chunk for chunk in source.manifest.chunks if chunk.name == QKV]
    assert [chunk.kind for chunk in hurt] == ["weights", "moment"]
    for chunk in hurt:
        tensor = next(each for each in source.contents.tensors if (each.name, each.kind) == (QKV, chunk.kind))
        (checkpoint / chunk.file).write_bytes(
            flipped((checkpoint / chunk.file).read_bytes(), source.read(tensor).numpy().tobytes())
        )
    capsys.readouterr()
    assert main(["verify", str(checkpoint.parents[1])]) == 1
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 2
    for line, chunk in zip(lines, hurt, strict=True):
        assert str(checkpoint / chunk.file) in line
        assert "checksum" in line
        assert line.endswith(f"lost: {QKV}" if chunk.kind == "weights" else f"lost: moment of {QKV}")
    assert main(["convert", str(checkpoint), "--to", "megapipe", str(tmp_path / "out")]) == 2
    assert not (tmp_path / "out").exists()
    manifest = checkpoint / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"step": 5', '"step": 6'))
    assert main(["verify", str(checkpoint)]) == 1
    assert "checksum differs" in capsys.readouterr().err


def flipped(content: bytes, part: bytes) -> bytes:
    """Return the content with a flipped bit in `part`, which occurs once."""
    place = content.index(part) + len(part) // 2
    return content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :]


@pytest.mark.parametrize("size", [None, 5000])
def test_verify_names_a_truncated_or_missing_file_once(
    checkpoint: Path, size: int | None, capsys: pytest.CaptureFixture[str]
) -> None:
    file = checkpoint / "part-00000.safetensors"  # weights
    if size is None:
        file.unlink()
    else:
        file.write_bytes(file.read_bytes()[:size])
    assert main(["verify", str(checkpoint)]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert str(file) in line
    assert all(name in line for name in tensors(0))
    assert size is None or "bytes instead of" in line


@pytest.mark.parametrize(("terminal", "seconds"), [(True, 0.0), (True, 3600.0), (False, 0.0)])
def test_a_bar_appears_on_a_terminal_after_two_seconds(
    terminal: bool,
    seconds: float,
    checkpoint: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(command_line, "SHOWN_AFTER", seconds)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: terminal)
    monkeypatch.setenv("TTY_COMPATIBLE", "1" if terminal else "0")
    monkeypatch.setenv("TERM", "xterm")
    out = str(tmp_path / "out")
    for word, command in (
        ("converting", ["convert", str(checkpoint), "--to", "hf", out]),
        ("verifying", ["verify", out]),
    ):
        assert main(command) == 0
        captured = capsys.readouterr()
        assert (word in captured.err) == (terminal and seconds == 0.0)
        assert word not in captured.out


def test_diff_prints_the_difference_of_each_tensor(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = tensors(0)
    other[QKV][1, 2, 3, 4] += 0.25
    write(tmp_path / "other", other)
    assert main(["diff", str(checkpoint), str(tmp_path / "other"), "--weights-only"]) == 1
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith(f"{QKV}: max difference 0.25, relative ")
    assert main(["diff", str(checkpoint), str(tmp_path / "other"), "--weights-only", "--tolerance", "0.26"]) == 0
    assert main(["diff", str(checkpoint), str(tmp_path / "other")]) == 1
    assert f"moment of {QKV}: max difference" in capsys.readouterr().out
    model = replace(MODEL, bias="qkv", max_positions=8)
    third = write(tmp_path / "third", tensors(0, model), model)
    assert main(["diff", str(checkpoint), str(third)]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert "blocks.0.mlp.up.bias: only in the first" in lines
    assert "embedding.position.weight: shape (16, 32) and (8, 32)" in lines
    assert main(["average", str(checkpoint), str(third), "--output", str(tmp_path / "mean")]) == 2
    assert "embedding.position.weight has shape (16, 32) in checkpoint 1 and (8, 32)" in capsys.readouterr().err
    assert not (tmp_path / "mean").exists()


def test_diff_after_round_trip_has_a_line_per_kind(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["convert", str(checkpoint), "--to", "megapipe", str(tmp_path / "bare"), "--weights-only"]) == 0
    capsys.readouterr()
    for first, second, where in ((checkpoint, "bare", "first"), ("bare", checkpoint, "second")):
        assert main(["diff", str(tmp_path / first), str(tmp_path / second)]) == 1
        lines = capsys.readouterr().out.splitlines()
        assert lines == [f"moment of all {len(tensors(0))} tensors: only in the {where}"]


@pytest.mark.parametrize(
    ("one", "other", "absolute", "relative"),
    [
        ([1.0, -2.0], [1.0, -2.0], 0.0, 0.0),
        ([1.0, -2.0], [1.0, 2.0], 4.0, 2.0),
        ([0.0, 8.0], [1e-3, 6.0], 2.0, 1.0),
        ([float("nan")], [float("nan")], 0.0, 0.0),
        ([float("nan")], [1.0], float("inf"), float("inf")),
        ([float("inf")], [float("inf")], 0.0, 0.0),
        ([float("inf")], [1.0], float("inf"), float("inf")),
        ([0.0], [-0.0], 0.0, 0.0),
    ],
)
def test_differences(one: list[float], other: list[float], absolute: float, relative: float) -> None:
    assert difference(torch.tensor(one), torch.tensor(other)) == (absolute, relative)


@pytest.mark.parametrize("elements", [1000, 1 << 24])
def test_average_is_the_mean_in_float64(tmp_path: Path, elements: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A sum in float32 would lose the small values; any number of rows may be summed at once."""
    monkeypatch.setattr(operations, "_ELEMENTS", elements)
    several = [tensors(seed) for seed in range(3)]
    several[0][QKV] += 3e7
    several[1][QKV] -= 3e7
    paths = [str(write(tmp_path / f"{number}", weights)) for number, weights in enumerate(several)]
    assert main(["average", *paths, "--output", str(tmp_path / "mean")]) == 0
    source = MegapipeSource(tmp_path / "mean")
    assert source.contents.kinds == ["weights"]
    for tensor in source.contents.tensors:
        expected = torch.stack([weights[tensor.name] for weights in several]).double().mean(0).float()
        assert torch.equal(source.read(tensor), expected), tensor.name


def test_a_missing_tokenizer_is_reported_before_writing(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    for command in (["convert", str(checkpoint), str(out)], ["average", str(checkpoint), "--output", str(out)]):
        assert main([*command, "--to", "hf", "--tokenizer", str(tmp_path / "absent.json")]) == 2
        captured = capsys.readouterr()
        assert captured.out == ""
        assert captured.err.startswith(f"error: no tokenizer '{tmp_path / 'absent.json'}'")
        assert not out.exists()


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["inspect", "nowhere"], "nowhere is not a folder"),
        (["inspect", "."], "identify no format; name it with --from"),
        (["inspect", "--from", "megapipe", "."], "no complete checkpoint in ."),
    ],
)
def test_folders_without_a_checkpoint_are_refused(
    argv: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(argv) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "option", "formats"),
    [
        ("hf", "--tensor=2", "megatron"),
        ("megapipe", "--max-shard-bytes=7", "hf"),
        ("megatron-dist", "--chunks=2", "megatron"),
        ("dcp", "--layer-names=transformer_engine", "megatron and megatron-dist"),
        ("megatron", "--tokenizer=bytes", "megapipe and hf"),
    ],
)
def test_options_of_other_formats_are_refused(
    name: str, option: str, formats: str, checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for command in (
        ["convert", str(checkpoint), str(tmp_path / "out")],
        ["average", str(checkpoint), "--output", "x"],
    ):
        assert main([*command, "--to", name, option]) == 2
        expected = f"error: {option.partition('=')[0]} is an option of --to {formats}, not of {name}; leave it out\n"
        assert capsys.readouterr().err == expected


def test_help_needs_no_torch() -> None:
    code = (
        "import sys\nfrom megapipe.conversion.command import main\n"
        "try:\n    main(['convert', '--help'])\nexcept SystemExit:\n    print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "--max-shard-bytes" in done.stdout
    assert done.stdout.splitlines()[-1] == "False"


@pytest.mark.slow
def test_the_guides_commands_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text = (Path(__file__).parents[2] / "docs/conversion.md").read_text("utf-8")
    commands = re.findall(r"^python tools/convert_checkpoint.py (.*)$", text, re.MULTILINE)
    assert {command.split()[0] for command in commands} == {"convert", "inspect", "verify", "diff", "average"}
    monkeypatch.chdir(tmp_path)
    for number, name in enumerate(("quickstart", "a", "b")):
        write(tmp_path / f"runs/{name}/checkpoints/step-00000005", tensors(number))
    for command in commands:
        assert main(shlex.split(command)) == 0, f"{command}: {capsys.readouterr()}"
