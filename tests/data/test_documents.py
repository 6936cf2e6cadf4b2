"""Where documents begin, against a walk over the tokens; the same on stages that read none."""

from pathlib import Path

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from megapipe.data.batches import MicrobatchSource
from megapipe.data.documents import document_starts
from megapipe.data.samples import GptSamples
from tests.data.shards import write_shard

END = 0


@settings(max_examples=100, deadline=None)
@given(st.lists(st.lists(st.integers(1, 12), max_size=6), min_size=1, max_size=4))
def test_starts_are_the_last_boundary_passed(rows: list[list[int]]) -> None:
    starts = document_starts([np.array(sorted(set(row)), dtype=np.int64) for row in rows], 9)
    for row, found in zip(rows, starts.tolist(), strict=True):
        assert found == [max([0, *[place for place in row if place <= token]]) for token in range(9)]


def test_documents_end_where_the_mark_stands(tmp_path: Path) -> None:
    """Megatron-LM finds documents by their end mark; here the index alone says where they are."""
    lengths = np.random.default_rng(1).integers(0, 12, size=60)
    prefix = write_shard(tmp_path / "shard", [[[7] * int(length) + [END]] for length in lengths])
    samples = GptSamples(prefix, split="train", shares="1", sequence_length=16, seed=2)
    source = MicrobatchSource(samples, data_rank=0, data_size=1, micro_size=len(samples), isolate_documents=True)
    batch = source.microbatch(0, 0, 1)
    assert batch.document_starts is not None
    for tokens, starts in zip(batch.tokens, batch.document_starts, strict=True):
        begin = 0
        for place, token in enumerate(tokens):
            assert starts[place] == begin
            if token == END:
                begin = place + 1
    assert np.array_equal(source.document_starts(batch.ordinals), batch.document_starts)
    plain = MicrobatchSource(samples, data_rank=0, data_size=1, micro_size=2)
    assert plain.microbatch(0, 0, 1).document_starts is None
