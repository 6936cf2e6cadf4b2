"""Text to shards: the same bytes for any number of workers, the documents of the input, clear refusals."""

import re
import subprocess
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megapipe.config import command_line
from megapipe.data.preprocess import tokenize_part
from megapipe.data.preprocess.documents import read_documents
from megapipe.data.preprocess.inputs import InputFile, cut_into_parts, find_inputs
from megapipe.data.preprocess.tokenize_part import SeenDocuments, digest_of, split_sentences
from megapipe.data.shards import IndexedDataset
from megapipe.data.tokenizers import open_tokenizer
from tests.checkpoint.disks import no_larger_files
from tests.data.commands import TOOL, main, manifest_of, preprocess, run_command, texts_of, write_json_lines

fresh_files = settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
lines = st.lists(st.text(st.characters(exclude_categories=["Cs", "Cc"]), max_size=12), max_size=12)


@fresh_files
@given(lines=lines, ending=st.sampled_from(["\n", "\r\n"]), last=st.booleans(), part_bytes=st.integers(1, 40))
def test_byte_ranges_give_every_line_once(
    tmp_path: Path, lines: list[str], ending: str, last: bool, part_bytes: int
) -> None:
    content = ending.join(lines) + (ending if last else "")
    path = tmp_path / "lines.jsonl"
    path.write_bytes(content.encode())
    parts = cut_into_parts([InputFile(path, path.stat().st_size)], part_bytes)
    documents = [document for part in parts for piece in part.pieces for document in read_documents(piece, ["text"])]
    expected = [(number, line) for number, line in enumerate(content.encode().split(b"\n"), 1) if line.strip()]
    assert [document.content.rstrip(b"\n") for document in documents] == [line for _, line in expected]
    assert [document.place() for document in documents] == [f"{path}, line {number}" for number, _ in expected]


def test_text_files_are_documents_in_sorted_order(tmp_path: Path) -> None:
    for name in ["b.py", "a/z.py", "a/empty.py", "a/skip.txt", ".hidden.py", "test_b.py", "tests/c.py"]:
        path = tmp_path / "source" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("" if "empty" in name else f"# {name}\r\n")
    arguments = ["--input", tmp_path / "source", "--include", "*.py", "--exclude", "test*"]
    preprocess(*arguments, "--append-eod", "--output-prefix", tmp_path / "new" / "out")
    prefix = tmp_path / "new" / "out_text_document"
    dataset, manifest = IndexedDataset(prefix), manifest_of(prefix)
    documents = [dataset.document(index).tolist() for index in range(3)]
    assert documents == [[], [*b"# a/z.py\r\n", 256], [*b"# b.py\r\n", 256]]
    assert (manifest.tokenizer, manifest.vocabulary_size, manifest.end_of_document) == ("bytes", 257, 256)
    assert (manifest.num_documents, manifest.num_tokens, manifest.dtype) == (3, dataset.num_tokens, "uint16")
    assert manifest.tokenizer_fingerprint == open_tokenizer("bytes").fingerprint


def test_inputs_keep_their_order_and_are_read_once(tmp_path: Path) -> None:
    for name in ("z.txt", "a.txt", "m/b.txt", "m/a.md"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    inputs = find_inputs([str(tmp_path / "z.txt"), str(tmp_path / "**/*.txt"), str(tmp_path)], exclude=["*.md"])
    assert [file.path.relative_to(tmp_path).as_posix() for file in inputs] == ["z.txt", "a.txt", "m/b.txt"]
    # Parts depend only on sizes, and text files are not cut.
    files = [InputFile(Path(f"{index}.txt"), size) for index, size in enumerate([10, 5, 30, 0, 7])]
    parts = list(cut_into_parts(files, 12))
    assert [[piece.path.stem for piece in part.pieces] for part in parts] == [["0", "1"], ["2"], ["3", "4"]]
    assert [part.size for part in parts] == [15, 30, 7]


def test_the_tool_makes_a_shard_of_the_standard_library(tmp_path: Path) -> None:
    arguments = ["--input", "python-stdlib", "--output-prefix", "data/python", "--tokenizer", "bytes", "--append-eod"]
    finished = subprocess.run([*TOOL, *arguments], capture_output=True, text=True, timeout=120, cwd=tmp_path)
    assert finished.returncode == 0, finished.stderr
    files = find_inputs(["python-stdlib"])
    names = [file.path.as_posix() for file in files]
    assert len(names) > 300
    assert any(name.endswith("/argparse.py") for name in names)
    assert not [name for name in names if "site-packages" in name or "/test" in name or "/idlelib/" in name]
    num_tokens = sum(file.size + 1 for file in files if file.size)
    assert f"data/python_text_document: {len(files):,} documents, {num_tokens:,} tokens (uint16)" in finished.stdout
    dataset = IndexedDataset(tmp_path / "data" / "python_text_document")
    assert dataset.num_tokens == num_tokens
    for index in (0, len(files) // 2, len(files) - 1):
        assert bytes(dataset.document(index)[:-1].astype("u1")) == files[index].path.read_bytes()


BROKEN = {
    "not JSON": b'{"text": "cut off',
    "no field 'text'": b'{"body": "x"}',
    "field 'text' is an integer, but must be text": b'{"text": 3}',
    "the document is a list, but must be an object": b'["text"]',
    "not UTF-8": b'{"text": "\xff"}',
    "surrogate": b'{"text": "\\ud800"}',
}


@pytest.mark.parametrize("reason", BROKEN)
def test_a_broken_line_is_named_and_can_be_skipped(tmp_path: Path, reason: str) -> None:
    good = b'{"text": "fine", "more": "x"}\n'
    (tmp_path / "in.jsonl").write_bytes(good + b"\n" + good + BROKEN[reason] + b"\n" + good)
    arguments = ["--input", tmp_path / "in.jsonl", "--json-keys", "text", "more", "--output-prefix", tmp_path / "out"]
    message = preprocess(*arguments, status=2).err
    assert f"{tmp_path}/in.jsonl, line 4: " in message
    assert reason in message
    assert [path.name for path in tmp_path.iterdir()] == ["in.jsonl"]
    message = preprocess(*arguments, "--on-error", "skip").err
    assert "in.jsonl, line 4: " in message
    assert "1 documents skipped" in message
    assert texts_of(tmp_path / "out_text_document") == ["fine"] * 3
    assert texts_of(tmp_path / "out_more_document") == ["x"] * 3


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("nowhere", "'nowhere' gives no files: give a file, a folder"),
        ("empty", "'empty' gives no files: the folder is empty"),
        ("dataset:", "'dataset:' names no dataset: give dataset:NAME"),
        ("blank.jsonl", "no usable document"),
        ("nothing.txt", "no usable document for out/shard_text_document (documents without text: 1)"),
        ("untitled.jsonl --json-keys text title", "no usable document for out/shard_title_docu"),
        ("a.txt --output-prefix /proc/shard", "/proc/shard.parts: No such file or directory; cho"),
        ("a.txt --tokenizer gpt5", "no tokenizer 'gpt5'"),
        ("a.txt --tokenizer a.txt", "a.txt is not a tokenizer.json"),
        ("a.txt --json-keys body", "a.txt is read as plain text and has the one field 'text'"),
        ("latin.txt", "latin.txt: not UTF-8"),
        ("packed.jsonl.xz", ".xz files cannot be read"),
        (". --include *.rs", "'.' gives no files that pass --include"),
    ],
)
def test_unusable_input_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: str, message: str) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    (tmp_path / "a.txt").write_text("text")
    (tmp_path / "blank.jsonl").write_text("\n\n")
    (tmp_path / "nothing.txt").write_text("")
    (tmp_path / "untitled.jsonl").write_text('{"text": "x", "title": ""}\n' * 2)
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9")
    (tmp_path / "packed.jsonl.xz").write_bytes(b"\x1f\x8b")
    assert message in preprocess("--output-prefix", "out/shard", "--input", *words.split(), status=2).err
    assert not list(tmp_path.rglob("shard*"))


def test_a_full_disk_fails_and_keeps_the_old_shard(tmp_path: Path) -> None:
    arguments = ["--input", tmp_path / "a.txt", "--output-prefix", tmp_path / "out"]
    for text, limit, status in (("old", 10**9, 0), ("new" * 100_000, 100_000, 2), ("new" * 100_000, 10**9, 0)):
        (tmp_path / "a.txt").write_text(text)
        with no_larger_files(limit):
            messages = preprocess(*arguments, status=status).err
        assert ("File too large" in messages) == (status != 0)
        assert texts_of(tmp_path / "out_text_document") == [text if status == 0 else "old"]
        assert not list(tmp_path.glob("*.part*"))


marks = [". ", "? ", "!", "\n", "\n\n", " \n \n", "Dr. ", "A", "b", '"', "\u2028", "\x85", "。", "\r\n"]
letters = st.text(st.characters(exclude_categories=["Cs"]), max_size=3)
any_text = st.lists(st.one_of(st.sampled_from(marks), letters), max_size=40).map("".join)


@settings(max_examples=400)
@given(text=any_text, language=st.sampled_from(["en", "de", "zh"]))
def test_sentences_together_are_the_text(text: str, language: str) -> None:
    sentences = split_sentences(text, language)
    assert "".join(sentences) == text
    assert all(sentence.strip() for sentence in sentences[1:])


def test_sentences_of_plain_english() -> None:
    text = 'Dr. Smith paid 3.50 dollars. "Why?" he\nasked.\n\nA heading\n\nThe end!  Really.'
    expected = ["Dr. Smith paid 3.50 dollars.", '"Why?" he\nasked.', "A heading", "The end!", "Really."]
    assert [sentence.strip() for sentence in split_sentences(text)] == expected
    repeated = split_sentences(f"{text}\n\n" * 3000)  # longer than what the library looks at in one go
    assert len(repeated) == 3000 * len(split_sentences(text))


@settings(max_examples=30)
@given(numbers=st.lists(st.integers(0, 30), min_size=1, max_size=60), parts=st.integers(1, 6))
def test_duplicates_are_found_across_parts_and_crashes(
    tmp_path_factory: pytest.TempPathFactory, numbers: list[int], parts: int
) -> None:
    path = tmp_path_factory.mktemp("seen") / "seen.sqlite"
    digests = [digest_of([str(number)]) for number in numbers]
    chunks = [digests[len(digests) * n // parts : len(digests) * (n + 1) // parts] for n in range(parts)]
    expected = [number not in numbers[:index] for index, number in enumerate(numbers)]
    seen = SeenDocuments(path)
    flags = [seen.are_new(b"".join(chunk), part).tolist() for part, chunk in enumerate(chunks)]
    assert [flag for part in flags for flag in part] == expected
    assert len({digest_of(texts) for texts in (["ab", "c"], ["a", "bc"], ["ab"], ["ab", ""])}) == 4
    seen.flush()
    seen.close()
    again = SeenDocuments(path)  # the journal contains all but the last part
    again.forget_from(parts - 1)
    assert again.are_new(b"".join(chunks[-1]), parts - 1).tolist() == flags[-1]
    again.close()


def test_duplicates_are_left_out_of_every_field(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenize_part, "PART_BYTES", 20_000)
    write_json_lines(tmp_path / "in.jsonl", [{"a": str(n % 350), "b": "ab"[n % 2] + "x" * 40} for n in range(1400)])
    for workers in (1, 2):
        arguments = ["--input", tmp_path / "in.jsonl", "--json-keys", "a", "b", "--drop-duplicates"]
        printed = preprocess(*arguments, "--workers", workers, "--output-prefix", tmp_path / f"o{workers}")
        assert "1,050 duplicates omitted" in printed.out
    assert texts_of(tmp_path / "o1_a_document") == [str(n) for n in range(350)]
    assert IndexedDataset(tmp_path / "o1_b_document").num_documents == 350
    for name in ("a_document.bin", "a_document.idx", "b_document.bin", "b_document.idx"):
        assert (tmp_path / f"o1_{name}").read_bytes() == (tmp_path / f"o2_{name}").read_bytes()
    assert manifest_of(tmp_path / "o1_a_document").num_duplicates == 1050


def test_progress_appears_before_the_first_phase_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command_line, "LOG_EVERY", 0.0)
    monkeypatch.setattr(tokenize_part, "PART_BYTES", 8000)
    texts = [{"text": f"This is sentence {n}. And another one."} for n in range(100)]
    options = ["--input", write_json_lines(tmp_path / "in.jsonl", texts)]
    messages = preprocess(*options, "--split-sentences", "--output-prefix", tmp_path / "out").err
    assert len(re.findall("^preprocessing: ", messages, re.MULTILINE)) > 4
    words = [*options, "--type", "byte-level-bpe", "--vocabulary-size", 270, "--output", tmp_path / "t.json"]
    messages = run_command(main, "train-tokenizer", *words).err
    assert re.match("reading texts: .*\nlearning from 100 texts of 0.0 MB\n", messages)
