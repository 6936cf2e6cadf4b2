"""Duplicates and sentences: what becomes a document, and what a sequence."""

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megapipe.data.indexed_dataset import IndexedDataset
from megapipe.data.manifest import read_manifest
from megapipe.data.preprocess.seen_documents import SeenDocuments, digest_of
from megapipe.data.preprocess.sentences import split_sentences
from tests.data.preprocess_runs import preprocess, texts_of, write_json_lines

any_text = st.lists(
    st.one_of(
        st.sampled_from(
            [". ", "? ", "!", "\n", "\n\n", " \n \n", "Dr. ", "A", "b", '"', "\u2028", "\x85", "。", "\r\n"]
        ),
        st.text(st.characters(exclude_categories=["Cs"]), max_size=3),
    ),
    max_size=40,
).map("".join)


@settings(max_examples=400)
@given(text=any_text, language=st.sampled_from(["en", "de", "zh"]))
def test_sentences_together_are_the_text(text: str, language: str) -> None:
    sentences = split_sentences(text, language)
    assert "".join(sentences) == text
    assert all(sentence.strip() for sentence in sentences[1:])


def test_sentences_of_plain_english() -> None:
    text = 'Dr. Smith paid 3.50 dollars. "Why?" he\nasked.\n\nA heading\n\nThe end!  Really.'
    assert [sentence.strip() for sentence in split_sentences(text)] == [
        "Dr. Smith paid 3.50 dollars.",
        '"Why?" he\nasked.',
        "A heading",
        "The end!",
        "Really.",
    ]
    repeated = split_sentences(f"{text}\n\n" * 3000)  # longer than what the library looks at in one go
    assert len(repeated) == 3000 * len(split_sentences(text))


@settings(max_examples=30)
@given(numbers=st.lists(st.integers(0, 30), min_size=1, max_size=60), parts=st.integers(1, 6))
def test_first_times_are_found_across_parts_and_after_a_crash(
    tmp_path_factory: pytest.TempPathFactory, numbers: list[int], parts: int
) -> None:
    path = tmp_path_factory.mktemp("seen") / "seen.sqlite"
    digests = [digest_of([str(number)]) for number in numbers]
    chunks = [digests[len(digests) * n // parts : len(digests) * (n + 1) // parts] for n in range(parts)]
    expected = [number not in numbers[:index] for index, number in enumerate(numbers)]
    seen = SeenDocuments(path)
    flags = [seen.are_new(b"".join(chunk), part).tolist() for part, chunk in enumerate(chunks)]
    assert [flag for part in flags for flag in part] == expected
    seen.flush()
    seen.close()
    again = SeenDocuments(path)  # a journal that knows of all but the last part
    again.forget_from(parts - 1)
    assert again.are_new(b"".join(chunks[-1]), parts - 1).tolist() == flags[-1]
    again.close()


def test_duplicates_are_left_out_of_every_field(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    records = [{"a": str(n % 700), "b": "ab"[n % 2] + "x" * 9000} for n in range(2800)]
    write_json_lines(tmp_path / "in.jsonl", records)
    for workers in (1, 2):
        arguments = ["--json-keys", "a", "b", "--drop-duplicates", "--workers", workers]
        assert (
            preprocess("--input", tmp_path / "in.jsonl", *arguments, "--output-prefix", tmp_path / f"o{workers}") == 0
        )
    assert "2,100 duplicates left out" in capsys.readouterr().out
    assert texts_of(tmp_path / "o1_a_document") == [str(n) for n in range(700)]
    assert IndexedDataset(tmp_path / "o1_b_document").num_documents == 700
    for name in ("a_document.bin", "a_document.idx", "b_document.bin", "b_document.idx"):
        assert (tmp_path / f"o1_{name}").read_bytes() == (tmp_path / f"o2_{name}").read_bytes()
    manifest = read_manifest(tmp_path / "o1_a_document")
    assert manifest is not None
    assert manifest.num_duplicates == 2100


def test_fields_do_not_run_together() -> None:
    assert digest_of(["ab", "c"]) != digest_of(["a", "bc"])
    assert digest_of(["ab"]) != digest_of(["ab", ""])
