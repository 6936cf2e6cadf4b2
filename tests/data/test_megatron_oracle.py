"""megatron-core reads what is written here, writes what is read here, and cuts the same windows and splits."""

import sys
import warnings
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megapipe.data.indexed_dataset import IndexedDataset
from megapipe.data.manifest import read_manifest
from megapipe.data.samples import GptSamples
from megapipe.data.shard_format import DTYPE_OF_CODE
from megapipe.data.splits import SPLIT_NAMES, split_documents
from tests.data.preprocess_runs import preprocess, write_json_lines
from tests.data.shards import joined, numbered_documents, write_shard

if sys.version_info >= (3, 14):
    pytest.skip("megatron-core has no wheel from Python 3.14 on", allow_module_level=True)

import torch

with warnings.catch_warnings():  # about optional packages of no concern here
    warnings.simplefilter("ignore")
    from megatron.core.datasets import helpers_cpp, indexed_dataset
    from megatron.core.datasets.blended_megatron_dataset_config import convert_split_vector_to_split_matrix
    from megatron.core.datasets.blended_megatron_dataset_config import parse_and_normalize_split as normalised_shares

documents_strategy = st.lists(
    st.lists(st.lists(st.integers(0, 127), min_size=1, max_size=5), max_size=3), min_size=1, max_size=6
)
fresh_files = settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@fresh_files
@given(documents=documents_strategy, code=st.sampled_from(sorted(DTYPE_OF_CODE)))
def test_megatron_reads_our_shards(tmp_path: Path, documents: list, code: int) -> None:
    prefix = write_shard(tmp_path / "ours", [*documents, [[1]]], DTYPE_OF_CODE[code].str)
    theirs = indexed_dataset.IndexedDataset(str(prefix))
    sequences = [sequence for document in documents for sequence in document] + [[1]]
    assert [theirs[index].tolist() for index in range(len(theirs))] == sequences
    assert theirs.index.dtype == DTYPE_OF_CODE[code]
    assert np.array_equal(theirs.document_indices, IndexedDataset(prefix).document_indices)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of its own numpy use
@fresh_files
@given(documents=documents_strategy, code=st.sampled_from([1, 3, 4, 5, 8]))
def test_both_writers_give_the_same_bytes(tmp_path: Path, documents: list, code: int) -> None:
    dtype = DTYPE_OF_CODE[code]
    prefix = str(tmp_path / "theirs")
    builder = indexed_dataset.IndexedDatasetBuilder(prefix + ".bin", dtype=dtype.type)
    for document in documents:
        builder.add_document(torch.tensor(joined(document)), [len(sequence) for sequence in document])
    builder.finalize(prefix + ".idx")
    write_shard(tmp_path / "ours", documents, dtype.str)
    for kind in ("bin", "idx"):
        assert (tmp_path / f"ours.{kind}").read_bytes() == (tmp_path / f"theirs.{kind}").read_bytes()
    dataset = IndexedDataset(prefix)
    assert [dataset.document(index).tolist() for index in range(len(documents))] == list(map(joined, documents))


@fresh_files
@given(lengths=st.lists(st.integers(1, 30), min_size=1, max_size=20), sequence_length=st.integers(1, 12))
def test_windows_are_megatrons_sample_index_over_unshuffled_documents(
    tmp_path: Path, lengths: list[int], sequence_length: int
) -> None:
    tokens = sum(lengths)
    if tokens <= sequence_length:
        lengths, tokens = [*lengths, sequence_length + 1], tokens + sequence_length + 1
    prefix = write_shard(tmp_path / "shard", numbered_documents(lengths))
    sizes, order = np.array(lengths, dtype=np.int32), np.arange(len(lengths), dtype=np.int32)
    rows = helpers_cpp.build_sample_idx_int32(sizes, order, sequence_length, 1, tokens, True, 1)
    starts = np.concatenate([[0], np.cumsum(sizes)])
    expected = [starts[document] + offset for document, offset in rows.reshape(-1, 2)]
    samples = GptSamples(prefix, split="train", shares="1", sequence_length=sequence_length, seed=0)
    firsts = sorted(int(samples.tokens(ordinal)[0]) - 1 for ordinal in range(len(samples)))
    assert firsts == expected[:-1]
    assert len(samples) == len(expected) - 1


@settings(max_examples=200, deadline=None)
@given(num_documents=st.integers(0, 100_000), shares=st.lists(st.integers(0, 1000), min_size=3, max_size=3))
def test_splits_have_megatrons_bounds(num_documents: int, shares: list[int]) -> None:
    if sum(shares) == 0:
        shares[0] = 1
    text = ",".join(map(str, shares))
    ours = split_documents(num_documents, text)
    matrix = convert_split_vector_to_split_matrix(normalised_shares(text))
    for name, bounds in zip(SPLIT_NAMES, matrix, strict=True):
        if bounds is not None:
            begin, end = (round(bound * float(num_documents)) for bound in bounds)
            assert ours[name] == range(begin, end)
        else:
            assert len(ours[name]) == 0


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of its own numpy use
def test_sentences_have_the_layout_of_its_own_tool(tmp_path: Path) -> None:
    documents = ["One sentence. Another one! A third?", "", "Only this.", "\n\n"]
    write_json_lines(tmp_path / "in.jsonl", [{"text": text} for text in documents])
    arguments = ["--input", tmp_path / "in.jsonl", "--split-sentences", "--append-eod"]
    assert preprocess(*arguments, "--output-prefix", tmp_path / "out") == 0
    builder = indexed_dataset.IndexedDatasetBuilder(str(tmp_path / "theirs.bin"), dtype=np.uint16)
    for document in ([b"One sentence. ", b"Another one! ", b"A third?"], [], [b"Only this."], [b"\n\n"]):
        ids = [list(sentence) for sentence in document]
        if not ids:
            builder.end_document()
            continue
        ids[-1].append(256)
        builder.add_document(torch.tensor(joined(ids)), [len(sentence) for sentence in ids])
    builder.finalize(str(tmp_path / "theirs.idx"))
    for kind in ("bin", "idx"):
        assert (tmp_path / f"out_text_sentence.{kind}").read_bytes() == (tmp_path / f"theirs.{kind}").read_bytes()
    manifest = read_manifest(tmp_path / "out_text_sentence")
    assert manifest is not None
    assert (manifest.num_documents, manifest.num_sequences) == (4, 5)
    assert manifest.sentences is not None
    assert manifest.sentences.startswith("sentencex ")
