"""tools/data.py: shards are inspected, verified, merged and split without losing a token."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megapipe.cli.data import main
from megapipe.data.manifest import ShardManifest, manifest_path
from megapipe.data.shards import HEADER, MAGIC, VERSION, IndexedDataset
from tests.data.commands import Printed, manifest_of, preprocess, run_command, write_json_lines
from tests.data.shards import write_shard

documents_strategy = st.lists(
    st.lists(st.lists(st.integers(0, 127), min_size=1, max_size=5), max_size=3), min_size=2, max_size=8
)
fresh_files = settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def write_text(folder: Path, name: str, texts: list[str], ends: tuple[str, ...] = ("--append-eod",)) -> str:
    write_json_lines(folder / f"{name}.jsonl", [{"text": text} for text in texts])
    preprocess("--input", folder / f"{name}.jsonl", *ends, "--output-prefix", folder / name)
    return str(folder / f"{name}_text_document")


def run(*words: object, status: int = 0) -> Printed:
    return run_command(main, *words, status=status)


def merge(*prefixes: object, output: Path, more: tuple[str, ...] = (), status: int = 0) -> Printed:
    return run("merge", *prefixes, "--output-prefix", output, *more, status=status)


def split(prefix: object, shares: str, output: Path, status: int = 0) -> Printed:
    return run("split", prefix, "--shares", shares, "--output-prefix", output, status=status)


@fresh_files
@given(documents=documents_strategy, cut=st.integers(1, 7), shares=st.sampled_from(["1,1", "0.5,0.5", "1e308,1e308"]))
def test_merging_what_was_split_gives_the_same_bytes(tmp_path: Path, documents: list, cut: int, shares: str) -> None:
    whole = write_shard(tmp_path / "whole", documents)
    cut = min(cut, len(documents) - 1)
    parts = [write_shard(tmp_path / "a", documents[:cut]), write_shard(tmp_path / "b", documents[cut:])]
    merge(*parts, output=tmp_path / "merged")
    split(whole, shares, tmp_path / "half")
    assert IndexedDataset(tmp_path / "half_0").num_documents == round(len(documents) / 2)
    merge(tmp_path / "half_0", tmp_path / "half_1", output=tmp_path / "again")
    for kind in ("bin", "idx"):
        expected = (tmp_path / f"whole.{kind}").read_bytes()
        assert (tmp_path / f"merged.{kind}").read_bytes() == expected
        assert (tmp_path / f"again.{kind}").read_bytes() == expected


def test_manifests_are_carried_over(tmp_path: Path) -> None:
    one, two = (write_text(tmp_path, name, texts) for name, texts in ((("one"), ["a", "bc"]), ("two", ["", "def"])))
    merge(one, two, output=tmp_path / "merged")
    lines = split(tmp_path / "merged", "3,1", tmp_path / "part").out.splitlines()
    assert [" ".join(line.split()[1:6]) for line in lines] == ["documents 0 to 2, 3", "documents 3 to 3, 1"]
    run("verify", one, two, tmp_path / "merged", tmp_path / "part_0", tmp_path / "part_1")
    manifest = manifest_of(tmp_path / "part_1")
    assert (manifest.tokenizer, manifest.num_documents, manifest.num_tokens) == ("bytes", 1, 4)
    manifest_path(one).write_text(replace(manifest, num_tokens=9).to_json())
    split(one, "1,1", tmp_path / "no", status=2)
    merge(one, two, output=tmp_path / "no", status=2)
    run("inspect", one, status=2)
    assert not list(tmp_path.glob("no*"))


def test_an_interrupted_split_leaves_whole_shards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole, copied = write_text(tmp_path, "whole", ["a", "bc"]), []

    def copy_once(manifest: ShardManifest, *prefixes: object) -> ShardManifest:
        if copied:
            raise KeyboardInterrupt
        copied.append(manifest)
        return manifest

    monkeypatch.setattr("megapipe.data.shard_tools.copy_tokenizer", copy_once)
    printed = split(whole, "1,1", tmp_path / "part", status=130)
    assert printed.err == "interrupted; every shard is complete or absent\n"
    assert printed.out.startswith(f"{tmp_path / 'part_0'}: ")
    assert [each.name for each in sorted(tmp_path.glob("part*.idx"))] == ["part_0.idx"]


def test_inspect_shows_counts_lengths_and_text(tmp_path: Path) -> None:
    prefix = write_text(tmp_path, "in", ["x" * length for length in range(1, 100)])
    shown = run("inspect", prefix, "--samples", 2, "--histogram", tmp_path / "lengths.png").out
    assert "99 documents, 99 sequences, 5,049 tokens (uint16, 10,098 bytes)" in shown
    assert "mean 51.0; percentiles 0% 2, 1% 3, 10% 12, 50% 51, 90% 90, 99% 99, 100% 100" in shown
    assert f"document 0 (2 tokens): {'x'!r}" in shown
    assert f"document 49 (51 tokens): {'x' * 50!r}" in shown
    assert (tmp_path / "lengths.png").read_bytes().startswith(b"\x89PNG")
    plain = write_shard(tmp_path / "plain", [[[65, 66]]])
    assert "document 0 (2 tokens): [65, 66]" in run("inspect", plain).out
    assert "document 0 (2 tokens): 'AB'" in run("inspect", plain, "--tokenizer", "bytes").out
    refused = run("inspect", prefix, "--histogram", tmp_path / "lengths.none", status=2)
    assert refused.out == "", "a wrong file name is refused before the report"


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
def test_verify_finds_every_damage(tmp_path: Path, kind: str, position: int, value: int, message: str) -> None:
    prefix = write_text(tmp_path, "in", ["abc", "de"])
    assert "checksums match" in run("verify", prefix).out
    path = Path(f"{prefix}.{kind}")
    content = bytearray(path.read_bytes())
    content[position] = value
    path.write_bytes(content)
    whole = write_shard(tmp_path / "whole", [[[1]]])
    printed = run("verify", prefix, whole, status=1)
    assert f"{whole}: " in printed.out, "later shards are verified too"
    (line,) = printed.err.splitlines()
    assert line.startswith("error: ")
    assert message in line


@pytest.mark.parametrize(("samples", "shown"), [("0", []), ("2", [0, 1]), ("99999999999999", [0, 1, 2])])
def test_inspect_shows_documents_once_for_any_sample_count(tmp_path: Path, samples: str, shown: list[int]) -> None:
    whole = write_shard(tmp_path / "whole", [[[1]], [[2]], [[3]]])
    lines = run("inspect", whole, "--samples", samples).out.splitlines()
    assert [int(line.split()[1]) for line in lines if line.startswith("document ")] == shown


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("merge one two --output-prefix out", "differ in end_of_document_appended"),
        ("merge one wide --output-prefix out", "of type int32"),
        ("merge one absent --output-prefix out", "absent.idx does not exist"),
        ("merge one one --output-prefix one", "is one of the shards to merge"),
        ("merge one_link --output-prefix one", "is one of the shards to merge"),
        ("verify wide absent", "absent.idx does not exist: give the prefix of a shard"),
        ("verify .", ". is a folder; give the prefix of a shard in it, such as one"),
        ("verify texts", "texts is a folder without shards; megapipe preprocess --input texts writes one"),
        ("split one --output-prefix out --shares 1,1", "for --shares 1,1, each of which must give at least one: use"),
        ("split wide_0 --output-prefix wide --shares 1,1", "wide_0 is the shard to split"),
        ("split wide_1 --output-prefix wide --shares 1,1", "wide_1 is the shard to split"),
        ("split one --output-prefix out --shares 1,x", "--shares '1,x' is not a list of numbers"),
        *(
            (f"split wide --output-prefix out --shares={shares}", f"--shares {shares!r}")
            for shares in ("1,-1", "-1,2", "0,1", "1,,2", "nan", "\uff19,1", "")
        ),
    ],
)
def test_what_does_not_fit_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: str, message: str
) -> None:
    one, two = write_text(tmp_path, "one", ["a"]), write_text(tmp_path, "two", ["b"], ends=())
    wide, *parts = (str(write_shard(tmp_path / name, [[[1]], [[2]]], "<i4")) for name in ("wide", "wide_0", "wide_1"))
    paths = {"one": one, "two": two, "wide": wide}
    monkeypatch.chdir(tmp_path)
    Path("texts").mkdir()
    for kind in ("bin", "idx", "manifest.json"):
        Path(f"one_link.{kind}").symlink_to(f"{one}.{kind}")
    printed = run(*(paths.get(word, word) for word in words.split()), status=2)
    (line,) = printed.err.splitlines()
    assert message in line
    assert printed.out == ""
    assert not list(tmp_path.glob("out*"))
    assert IndexedDataset(one).tokens.tolist() == [97, 256]
    assert all(IndexedDataset(part).num_documents == 2 for part in parts)


def write_floats(prefix: Path, documents: list[list[list[float]]], code: int, float_tokens: str) -> None:
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
def test_float_tokens_become_integers(tmp_path: Path, code: int, float_tokens: str) -> None:
    documents = [[[1, 2, 50_256]], [], [[3], [4, 5]]]
    floats, output = tmp_path / "floats", tmp_path / "out"
    write_floats(floats, documents, code, float_tokens)
    assert "--float-tokens float32 (or float64)" in merge(floats, output=output, status=2).err
    other = {"float32": "float64", "float64": "float32"}[float_tokens]
    assert "floats" in merge(floats, output=output, more=("--float-tokens", other), status=2).err
    assert not list(tmp_path.glob("out*"))
    merge(floats, output=tmp_path / "whole", more=("--float-tokens", float_tokens))
    dataset = IndexedDataset(tmp_path / "whole")
    assert dataset.dtype == np.int32
    assert [dataset.document(index).tolist() for index in range(3)] == [[1, 2, 50_256], [], [3, 4, 5]]
    assert dataset.sequence_lengths.tolist() == [3, 1, 2]
    write_floats(floats, [[[1, 2, 50_256]], [], [[2.5], [4, 5]]], code, float_tokens)
    refused = merge(floats, output=output, more=("--float-tokens", float_tokens), status=2)
    assert "token 0 of document 2 is 2.5" in refused.err
    assert not list(tmp_path.glob("out*"))
