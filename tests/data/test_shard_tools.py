"""tools/data.py: shards are inspected, verified, merged and split without losing a token."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megapipe.cli.data import main
from megapipe.data.manifest import manifest_path, read_manifest
from megapipe.data.shards import HEADER, MAGIC, VERSION, IndexedDataset
from tests.data.preprocess_runs import preprocess, write_json_lines
from tests.data.shards import write_shard

documents_strategy = st.lists(
    st.lists(st.lists(st.integers(0, 127), min_size=1, max_size=5), max_size=3), min_size=2, max_size=8
)
fresh_files = settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def write_text(folder: Path, name: str, texts: list[str], *more: str) -> str:
    write_json_lines(folder / f"{name}.jsonl", [{"text": text} for text in texts])
    arguments = ["--input", folder / f"{name}.jsonl", "--append-eod", *more]
    assert preprocess(*arguments, "--output-prefix", folder / name) == 0
    return str(folder / f"{name}_text_document")


@fresh_files
@given(documents=documents_strategy, cut=st.integers(1, 7), shares=st.sampled_from(["1,1", "0.5,0.5", "30,30"]))
def test_merging_what_was_split_gives_the_same_bytes(tmp_path: Path, documents: list, cut: int, shares: str) -> None:
    whole = write_shard(tmp_path / "whole", documents)
    cut = min(cut, len(documents) - 1)
    parts = [write_shard(tmp_path / "a", documents[:cut]), write_shard(tmp_path / "b", documents[cut:])]
    assert main(["merge", *map(str, parts), "--output-prefix", str(tmp_path / "merged")]) == 0
    assert main(["split", str(whole), "--shares", shares, "--output-prefix", str(tmp_path / "half")]) == 0
    halves = [str(tmp_path / "half_0"), str(tmp_path / "half_1")]
    assert IndexedDataset(halves[0]).num_documents == round(len(documents) / 2)
    assert main(["merge", *halves, "--output-prefix", str(tmp_path / "again")]) == 0
    for kind in ("bin", "idx"):
        expected = (tmp_path / f"whole.{kind}").read_bytes()
        assert (tmp_path / f"merged.{kind}").read_bytes() == expected
        assert (tmp_path / f"again.{kind}").read_bytes() == expected


def test_manifests_are_carried_over(tmp_path: Path) -> None:
    one, two = write_text(tmp_path, "one", ["a", "bc"]), write_text(tmp_path, "two", ["", "def"])
    merged, parts = str(tmp_path / "merged"), str(tmp_path / "part")
    assert main(["merge", one, two, "--output-prefix", merged]) == 0
    assert main(["split", merged, "--shares", "3,1", "--output-prefix", parts]) == 0
    assert main(["verify", one, two, merged, f"{parts}_0", f"{parts}_1"]) == 0
    manifest = read_manifest(f"{parts}_1")
    assert manifest is not None
    assert (manifest.tokenizer, manifest.num_documents, manifest.num_tokens) == ("bytes", 1, 4)
    manifest_path(one).write_text(replace(manifest, num_tokens=9).to_json())
    for command in (["split", one, "--shares", "1,1"], ["merge", one, two], ["inspect", one]):
        output = [] if command[0] == "inspect" else ["--output-prefix", str(tmp_path / "no")]
        assert main([*command, *output]) == 2
    assert not list(tmp_path.glob("no*"))


def test_inspect_shows_counts_lengths_and_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prefix = write_text(tmp_path, "in", ["x" * length for length in range(1, 100)])
    capsys.readouterr()
    assert main(["inspect", prefix, "--samples", "2", "--histogram", str(tmp_path / "lengths.png")]) == 0
    shown = capsys.readouterr().out
    assert "99 documents, 99 sequences, 5,049 tokens (uint16, 10,098 bytes)" in shown
    assert "mean 51.0; percentiles 0% 2, 1% 3, 10% 12, 50% 51, 90% 90, 99% 99, 100% 100" in shown
    assert f"document 0 (2 tokens): {'x'!r}" in shown
    assert f"document 49 (51 tokens): {'x' * 50!r}" in shown
    assert (tmp_path / "lengths.png").read_bytes().startswith(b"\x89PNG")
    write_shard(tmp_path / "plain", [[[65, 66]]])
    assert main(["inspect", str(tmp_path / "plain")]) == 0
    assert "document 0 (2 tokens): [65, 66]" in capsys.readouterr().out
    assert main(["inspect", str(tmp_path / "plain"), "--tokenizer", "bytes"]) == 0
    assert "document 0 (2 tokens): 'AB'" in capsys.readouterr().out
    assert main(["inspect", prefix, "--histogram", str(tmp_path / "lengths.none")]) == 2
    assert capsys.readouterr().out == "", "a wrong file name is refused before the report"


@pytest.mark.parametrize(
    ("kind", "position", "value", "message"),
    [
        ("bin", 0, 0x42, "bin is damaged: its checksum"),
        ("bin", 1, 0x7F, "holds token 32609 at position 0, but the vocabulary has 257 ids"),
        ("bin", 7, 0, "document 0 does not end with token 256"),
        ("idx", 34, 3, "sequence 1 does not follow the previous one"),
        ("idx", 37, 0x80, "sequence 0 has a negative length"),
        ("idx", 34 + 2 * 12 + 8, 9, "document 1 ends before it starts"),
    ],
)
def test_verify_finds_every_damage(
    tmp_path: Path, kind: str, position: int, value: int, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    prefix = write_text(tmp_path, "in", ["abc", "de"])
    assert main(["verify", prefix]) == 0
    assert "checksums match" in capsys.readouterr().out
    path = Path(f"{prefix}.{kind}")
    content = bytearray(path.read_bytes())
    content[position] = value
    path.write_bytes(content)
    whole = str(write_shard(tmp_path / "whole", [[[1]]]))
    assert main(["verify", prefix, whole]) == 1
    captured = capsys.readouterr()
    assert message in captured.err
    assert f"{whole}: " in captured.out, "later shards are verified too"
    assert [line.startswith("error: ") for line in captured.err.splitlines()] == [True]


def test_a_missing_shard_is_wrong_input(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    whole = str(write_shard(tmp_path / "whole", [[[1]]]))
    assert main(["verify", whole, str(tmp_path / "absent")]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    (line,) = captured.err.splitlines()
    assert "absent.idx does not exist: give the prefix of a shard" in line


def test_inspect_shows_documents_once_for_any_sample_count(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    whole = str(write_shard(tmp_path / "whole", [[[1]], [[2]], [[3]]]))
    for samples, shown in (("0", []), ("2", [0, 1]), ("99999999999999", [0, 1, 2])):
        assert main(["inspect", whole, "--samples", samples]) == 0
        lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("document ")]
        assert [int(line.split()[1]) for line in lines] == shown


@pytest.mark.parametrize("shares", ["-1,2", "1,-2", "0,1", "1,,2", "nan", "\uff19,1", ""])
def test_wrong_shares_are_refused_in_one_line(tmp_path: Path, shares: str, capsys: pytest.CaptureFixture[str]) -> None:
    whole = str(write_shard(tmp_path / "whole", [[[1]], [[2]]]))
    assert main(["split", whole, "--shares", shares, "--output-prefix", str(tmp_path / "part")]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert f"--shares {shares!r}" in line
    assert not list(tmp_path.glob("part*"))


def test_what_does_not_fit_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one = write_text(tmp_path, "one", ["a"])
    write_json_lines(tmp_path / "two.jsonl", [{"text": "b"}])
    assert preprocess("--input", tmp_path / "two.jsonl", "--output-prefix", tmp_path / "two") == 0
    two, wide = str(tmp_path / "two_text_document"), str(write_shard(tmp_path / "wide", [[[1]]], "<i4"))
    for arguments, message in (
        ([one, two], "differ in end_of_document_appended"),
        ([one, wide], "of type int32"),
        ([one, str(tmp_path / "no")], "no.idx does not exist"),
    ):
        assert main(["merge", *arguments, "--output-prefix", str(tmp_path / "out")]) == 2
        assert message in capsys.readouterr().err
        assert not (tmp_path / "out.idx").exists()
    assert main(["merge", one, one, "--output-prefix", one]) == 2
    assert "is one of the shards to merge" in capsys.readouterr().err
    for shares, message in (("1,x", "not a list of numbers"), ("1,-1", "above 0"), ("1,1", "too few for --shares")):
        assert main(["split", one, "--shares", shares, "--output-prefix", str(tmp_path / "out")]) == 2
        assert message in capsys.readouterr().err
    assert IndexedDataset(one).tokens.tolist() == [97, 256]


def write_floats(prefix: Path, documents: list[list[list[int]]], code: int, float_tokens: str) -> None:
    """Write a shard as a fork of Megatron-LM would."""
    sequences = [sequence for document in documents for sequence in document]
    tokens = np.array([token for sequence in sequences for token in sequence], dtype=float_tokens)
    lengths = np.array([len(sequence) for sequence in sequences], dtype="<i4")
    offsets = (np.cumsum(lengths) - lengths).astype("<i8") * tokens.itemsize
    boundaries = np.cumsum([0, *map(len, documents)]).astype("<i8")
    header = HEADER.pack(MAGIC, VERSION, code, len(lengths), len(boundaries))
    Path(f"{prefix}.idx").write_bytes(header + lengths.tobytes() + offsets.tobytes() + boundaries.tobytes())
    Path(f"{prefix}.bin").write_bytes(tokens.tobytes())


@pytest.mark.parametrize(("code", "float_tokens"), [(6, "float64"), (7, "float32"), (6, "float32")])
def test_float_tokens_become_integers(
    tmp_path: Path, code: int, float_tokens: str, capsys: pytest.CaptureFixture[str]
) -> None:
    documents = [[[1, 2, 50_256]], [], [[3], [4, 5]]]
    write_floats(tmp_path / "floats", documents, code, float_tokens)
    merge = ["merge", str(tmp_path / "floats"), "--output-prefix", str(tmp_path / "whole")]
    assert main(merge) == 2
    assert "--float-tokens float32 (or float64)" in capsys.readouterr().err
    other = {"float32": "float64", "float64": "float32"}[float_tokens]
    assert main([*merge, "--float-tokens", other]) == 2
    assert "floats" in capsys.readouterr().err
    assert not list(tmp_path.glob("whole*"))
    assert main([*merge, "--float-tokens", float_tokens]) == 0
    dataset = IndexedDataset(tmp_path / "whole")
    assert dataset.dtype == np.int32
    assert [dataset.document(index).tolist() for index in range(3)] == [[1, 2, 50_256], [], [3, 4, 5]]
    assert dataset.sequence_lengths.tolist() == [3, 1, 2]
    content = bytearray((tmp_path / "floats.bin").read_bytes())
    width = np.dtype(float_tokens).itemsize
    content[3 * width : 4 * width] = np.dtype(float_tokens).type(2.5).tobytes()
    (tmp_path / "floats.bin").write_bytes(content)
    assert main(["merge", *merge[1:2], "--output-prefix", str(tmp_path / "no"), "--float-tokens", float_tokens]) == 2
    assert "token 0 of document 2 is 2.5" in capsys.readouterr().err
    assert not list(tmp_path.glob("no*"))
