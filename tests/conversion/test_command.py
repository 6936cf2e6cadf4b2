"""inspect, verify, diff, average, and conversions to and from other frameworks, as a user runs them."""

import json
import os
import re
import shlex
import shutil
import sys
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import safetensors.torch
import torch
from torch import Tensor

from megapipe.checkpoint import RunState
from megapipe.checkpoint.hugging_face import PICKLED, SINGLE
from megapipe.config import command_line
from megapipe.config.model import ModelConfig
from megapipe.conversion import operations
from megapipe.conversion.command import main
from megapipe.conversion.formats import Contents, StoredTensor
from megapipe.conversion.megapipe_format import MegapipeSource, parameters_of
from megapipe.conversion.operations import difference
from tests.conversion.foreign.weights import write as write_folder
from tests.data.commands import Printed, run_command
from tests.models.hugging_face import case_of

MODEL = ModelConfig(vocabulary_size=61, num_layers=1, hidden_size=32, num_heads=4, max_positions=16)
QKV = "blocks.0.attention.qkv.weight"


def tensors(seed: int, model: ModelConfig = MODEL) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(spec.shape, generator=generator) for name, spec in parameters_of(model).items()}


def write(folder: Path, weights: dict[str, Tensor], model: ModelConfig = MODEL, step: int = 5) -> Path:
    """Write a checkpoint of weights and one moment, which is their square."""
    kinds = {"weights": lambda values: values, "moment": torch.square}
    described = tuple(
        StoredTensor(name, kind, tuple(values.shape), {torch.float32: "F32", torch.float64: "F64"}[values.dtype])
        for kind in kinds
        for name, values in weights.items()
    )
    run = RunState(step, 8 * step, {"seed": 7}, "fp32", ((step, 2.5),), {"model": asdict(model)})
    contents = Contents(model, described, run, dict.fromkeys(weights, step))
    write_folder("megapipe", folder, contents, {each: kinds[each.kind](weights[each.name]) for each in described})
    return folder


def run(*words: object, status: int = 0) -> Printed:
    return run_command(main, *words, status=status)


def convert(source: Path, kind: str, target: Path, *options: object, status: int = 0) -> Printed:
    return run("convert", source, "--to", kind, target, *options, status=status)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return write(tmp_path / "run/checkpoints/step-00000005", tensors(0))


def test_inspect_prints_tables_and_json(checkpoint: Path) -> None:
    lines = run("inspect", checkpoint.parents[1]).out.splitlines()
    assert "a megapipe checkpoint" in lines
    rows = [line.split() for line in lines]
    elements = sum(tensor.numel() for tensor in tensors(0).values())
    assert ["model.hidden_size", "32"] in rows
    assert ["step", "5"] in rows
    assert ["weights", str(len(tensors(0))), f"{elements:,}", f"{4 * elements:,}", "F32"] in rows
    assert [QKV, "weights", *["4", "x", "3", "x", "8", "x", "32"], "F32", "12,288"] in rows
    report = json.loads(run("inspect", checkpoint, "--json").out)
    assert report["run"]["step"] == 5
    assert report["model"]["hidden_size"] == 32
    assert report["parameters"] == elements
    assert {"name": QKV, "kind": "moment", "shape": [4, 3, 8, 32], "dtype": "F32", "bytes": 12288} in report["tensors"]


def test_verify_names_every_bad_file_and_tensor(checkpoint: Path, tmp_path: Path) -> None:
    run("verify", checkpoint)
    source = MegapipeSource(checkpoint)
    hurt = [chunk for chunk in source.manifest.chunks if chunk.name == QKV]
    assert [chunk.kind for chunk in hurt] == ["weights", "moment"]
    for chunk in hurt:
        file = checkpoint / chunk.file
        tensor = next(each for each in source.contents.tensors if (each.name, each.kind) == (QKV, chunk.kind))
        content = bytearray(file.read_bytes())
        content[content.index(source.read(tensor).numpy().tobytes()) + 5000] ^= 1
        file.write_bytes(content)
    for line, chunk in zip(run("verify", checkpoint.parents[1], status=1).err.splitlines(), hurt, strict=True):
        assert str(checkpoint / chunk.file) in line
        assert "checksum" in line
        assert line.endswith(f"lost: {QKV}" if chunk.kind == "weights" else f"lost: moment of {QKV}")
    convert(checkpoint, "megapipe", tmp_path / "out", status=2)
    assert not (tmp_path / "out").exists()
    manifest = checkpoint / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"step": 5', '"step": 6'))
    assert "checksum differs" in run("verify", checkpoint, status=1).err


@pytest.mark.parametrize("size", [None, 5000])
def test_verify_names_a_truncated_or_missing_file_once(checkpoint: Path, size: int | None) -> None:
    file = checkpoint / "part-00000.safetensors"  # weights
    if size is None:
        file.unlink()
    else:
        os.truncate(file, size)
    (line,) = run("verify", checkpoint, status=1).err.splitlines()
    assert str(file) in line
    assert all(name in line for name in tensors(0))
    assert size is None or "bytes instead of" in line


def test_slow_commands_show_their_progress_on_a_terminal(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command_line, "SHOWN_AFTER", 0.0)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setenv("TTY_COMPATIBLE", "1")
    monkeypatch.setenv("TERM", "xterm")
    out = str(tmp_path / "out")
    for word, command in (
        ("converting", ["convert", str(checkpoint), "--to", "hf", out]),
        ("verifying", ["verify", out]),
    ):
        assert main(command) == 0
        captured = capsys.readouterr()
        assert word in captured.err
        assert word not in captured.out


def test_diff_prints_the_difference_of_each_tensor(checkpoint: Path, tmp_path: Path) -> None:
    changed = tensors(0)
    changed[QKV][1, 2, 3, 4] += 0.25
    other = write(tmp_path / "other", changed)
    (line,) = run("diff", checkpoint, other, "--weights-only", status=1).out.splitlines()
    assert line.startswith(f"{QKV}: max difference 0.25, relative ")
    run("diff", checkpoint, other, "--weights-only", "--tolerance", 0.26)
    assert f"moment of {QKV}: max difference" in run("diff", checkpoint, other, status=1).out
    model = replace(MODEL, bias="qkv", max_positions=8)
    third = write(tmp_path / "third", tensors(0, model), model)
    lines = run("diff", checkpoint, third, status=1).out.splitlines()
    assert "blocks.0.mlp.up.bias: only in the first" in lines
    assert "embedding.position.weight: shape (16, 32) and (8, 32)" in lines
    refused = run("average", checkpoint, third, "--output", tmp_path / "mean", status=2)
    assert "embedding.position.weight has shape (16, 32) in checkpoint 1 and (8, 32)" in refused.err
    assert not (tmp_path / "mean").exists()


def test_diff_after_round_trip_has_a_line_per_kind(checkpoint: Path, tmp_path: Path) -> None:
    bare = tmp_path / "bare"
    convert(checkpoint, "megapipe", bare, "--weights-only")
    for first, second, where in ((checkpoint, bare, "first"), (bare, checkpoint, "second")):
        lines = run("diff", first, second, status=1).out.splitlines()
        assert lines == [f"moment of all {len(tensors(0))} tensors: only in the {where}"]


NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("one", "other", "absolute", "relative"),
    [
        *(([1.0, -2.0], [1.0, -2.0], 0.0, 0.0), ([1.0, -2.0], [1.0, 2.0], 4.0, 2.0)),
        *(([0.0, 8.0], [1e-3, 6.0], 2.0, 1.0), ([0.0], [-0.0], 0.0, 0.0)),
        *(([NAN], [NAN], 0.0, 0.0), ([NAN], [1.0], INF, INF)),
        *(([INF], [INF], 0.0, 0.0), ([INF], [1.0], INF, INF)),
    ],
)
def test_differences(one: list[float], other: list[float], absolute: float, relative: float) -> None:
    assert difference(torch.tensor(one), torch.tensor(other)) == (absolute, relative)


@pytest.mark.parametrize(("elements", "dtype"), [(1000, torch.float32), (1 << 24, torch.float64)])
def test_average_is_the_mean_in_float64(
    tmp_path: Path, elements: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sum in float32 would lose the small values; any number of rows may be summed at once."""
    monkeypatch.setattr(operations, "_SUMMED_ELEMENTS", elements)
    several = [{name: values.to(dtype) for name, values in tensors(seed).items()} for seed in range(3)]
    several[0][QKV] += 3e7
    several[1][QKV] -= 3e7
    paths = [write(tmp_path / f"{number}", weights) for number, weights in enumerate(several)]
    run("average", *paths, "--output", tmp_path / "mean")
    source = MegapipeSource(tmp_path / "mean")
    assert source.contents.kinds == ["weights"]
    for tensor in source.contents.tensors:
        first, second, third = (weights[tensor.name].double() for weights in several)
        expected = ((first + second + third) / 3).to(dtype)
        assert torch.equal(source.read(tensor), expected), tensor.name


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("hf --tokenizer absent.json", "no tokenizer 'absent.json'"),
        ("hf --tensor=2", "--tensor is an option of --to megatron, not of hf"),
        ("megapipe --max-shard-bytes=7", "--max-shard-bytes is an option of --to hf, not of megapipe"),
        ("megatron-dist --chunks=2", "--chunks is an option of --to megatron, not of megatron-dist"),
        (
            "dcp --layer-names=transformer_engine",
            "--layer-names is an option of --to megatron and megatron-dist, not of dcp",
        ),
        ("megatron --tokenizer=bytes", "--tokenizer is an option of --to megapipe and hf, not of megatron"),
    ],
)
def test_options_that_do_not_fit_are_refused(
    options: str, message: str, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for command in (["convert", checkpoint, "out"], ["average", checkpoint, "--output", "out"]):
        output, messages = run(*command, "--to", *options.split(), status=2)
        assert output == ""
        (line,) = messages.splitlines()
        assert line.startswith(f"error: {message}")
        assert line.endswith("; leave it out") or "no tokenizer" in message
        assert not Path("out").exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["nowhere"], "nowhere is not a folder"),
        (["."], "identify no format; name it with --from"),
        (["--from", "megapipe", "."], "no complete checkpoint in ."),
    ],
)
def test_folders_without_a_checkpoint_are_refused(
    words: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert message in run("inspect", *words, status=2).err


@pytest.mark.parametrize("kind", ["megatron", "megatron-dist", "dcp"])
def test_there_and_back_without_a_difference(kind: str, checkpoint: Path, tmp_path: Path) -> None:
    there, back = tmp_path / "there", tmp_path / "back"
    options = ["--tensor", 2, "--layer_names", "transformer_engine"] if kind == "megatron" else []
    convert(checkpoint, kind, there, *options)
    assert "--allow-pickle" in convert(there, "megapipe", back, status=2).err
    assert not back.exists()
    convert(there, "megapipe", back, "--allow-pickle")
    run("diff", checkpoint, back, *([] if kind == "dcp" else ["--weights-only"]))
    run("verify", there, "--allow-pickle")
    run("inspect", there, "--allow-pickle")


def test_the_step_is_megatrons_iteration(checkpoint: Path, tmp_path: Path) -> None:
    convert(checkpoint, "megatron", tmp_path / "made", "--precision", "bf16")
    assert (tmp_path / "made/latest_checkpointed_iteration.txt").read_text() == "5"
    saved = torch.load(tmp_path / "made/iter_0000005/mp_rank_00/model_optim_rng.pt", weights_only=False)
    assert (saved["iteration"], saved["args"].consumed_train_samples) == (5, 40)
    word = saved["model"]["embedding.word_embeddings.weight"]
    assert torch.equal(word[:61], tensors(0)["embedding.word.weight"].bfloat16())


def test_bin_folders_convert_bit_for_bit(tmp_path: Path) -> None:
    """One GPT-2 as safetensors, in one `.bin` file, and in two with an index."""
    whole, single, sharded = (tmp_path / name for name in ("safetensors", "single", "sharded"))
    case_of("gpt2").theirs.save_pretrained(whole)
    weights = safetensors.torch.load_file(whole / SINGLE)
    weights["transformer.h.0.attn.bias"] = torch.ones(1, 1, 4, 4, dtype=torch.uint8)
    for folder in (single, sharded):
        folder.mkdir()
        shutil.copy(whole / "config.json", folder)
    single_bin, index_bin = PICKLED
    torch.save(weights, single / single_bin)
    places = {name: "ab"[number % 2] + ".bin" for number, name in enumerate(sorted(weights))}
    for file in ("a.bin", "b.bin"):
        torch.save({name: weights[name] for name, place in places.items() if place == file}, sharded / file)
    (sharded / index_bin).write_text(json.dumps({"weight_map": places}))
    convert(whole, "megapipe", tmp_path / "expected")
    for folder in (single, sharded):
        convert(folder, "megapipe", tmp_path / f"{folder.name}-made", "--allow-pickle")
        run("diff", tmp_path / f"{folder.name}-made", tmp_path / "expected")
        run("verify", folder, "--allow-pickle")


@pytest.mark.slow
def test_the_guides_commands_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = (Path(__file__).parents[2] / "docs/conversion.md").read_text("utf-8")
    commands = re.findall(r"^python tools/convert_checkpoint.py (.*)$", text, re.MULTILINE)
    assert {command.split()[0] for command in commands} == {"convert", "inspect", "verify", "diff", "average"}
    monkeypatch.chdir(tmp_path)
    for number, name in enumerate(("quickstart", "a", "b")):
        write(tmp_path / f"runs/{name}/checkpoints/step-00000005", tensors(number))
    for command in commands:
        run(*shlex.split(command))
