"""Every sample exactly once, whatever the layout; masks and labels; resume from one integer."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megapipe.data.batches import MicrobatchSource, microbatch_ordinals
from megapipe.data.errors import DataError
from megapipe.data.samples import GptSamples
from tests.data.shards import numbered_documents, write_shard

layouts = st.tuples(st.integers(1, 6), st.integers(1, 5), st.integers(1, 4))  # data size, micro size, micro-batches


def ordinals_of_step(consumed: int, layout: tuple[int, int, int]) -> list[int]:
    data_size, micro_size, num_microbatches = layout
    return [
        int(ordinal)
        for rank in range(data_size)
        for index in range(num_microbatches)
        for ordinal in microbatch_ordinals(
            consumed,
            data_rank=rank,
            data_size=data_size,
            microbatch=index,
            micro_size=micro_size,
            num_microbatches=num_microbatches,
        )
    ]


@settings(max_examples=100, deadline=None)
@given(steps=st.lists(layouts, min_size=1, max_size=6), consumed=st.integers(0, 10**12))
def test_each_sample_once_while_the_layout_changes(steps: list, consumed: int) -> None:
    start, seen = consumed, []
    for layout in steps:
        seen += ordinals_of_step(consumed, layout)
        consumed += layout[0] * layout[1] * layout[2]
    assert seen == list(range(start, consumed))


def make_source(folder: Path, lengths: list[int], **changes: object) -> MicrobatchSource:
    prefix = write_shard(folder / "shard", numbered_documents(lengths))
    samples = GptSamples(
        prefix, split="train", shares="1", sequence_length=4, seed=1, shuffle="sequential" not in changes
    )
    changes.pop("sequential", None)
    arguments: dict = {"data_rank": 0, "data_size": 1, "micro_size": 2, **changes}
    return MicrobatchSource(samples, **arguments)


def test_labels_follow_tokens_and_the_epoch_is_complete(tmp_path: Path) -> None:
    sources = [make_source(tmp_path, [33], data_rank=rank, data_size=2) for rank in range(2)]
    batches = [batch for source in sources for batch in source.step(0, 2)]
    for batch in batches:
        assert batch.tokens.dtype == batch.labels.dtype == batch.ordinals.dtype == np.int64
        assert batch.loss_mask.dtype == np.float32
        assert batch.tokens.shape == batch.labels.shape == batch.loss_mask.shape == (2, 4)
        assert np.array_equal(batch.labels, batch.tokens + 1)
        assert batch.loss_mask.all()
    assert np.concatenate([batch.ordinals for batch in batches]).tolist() == list(range(8))
    assert sorted(np.concatenate([batch.tokens.ravel() for batch in batches])) == list(range(1, 33))


@settings(max_examples=20, deadline=None)
@given(other=layouts.filter(lambda layout: 24 % (layout[0] * layout[1] * layout[2]) == 0))
def test_the_same_samples_on_every_layout(
    tmp_path_factory: pytest.TempPathFactory, other: tuple[int, int, int]
) -> None:
    folder = tmp_path_factory.mktemp("layouts")
    data_size, micro_size, num_microbatches = other

    def read(data_size: int, micro_size: int, num_microbatches: int) -> dict[int, list[int]]:
        rows = {}
        for consumed in range(0, 24, data_size * micro_size * num_microbatches):
            for rank in range(data_size):
                source = make_source(folder, [45], data_rank=rank, data_size=data_size, micro_size=micro_size)
                for batch in source.step(consumed, num_microbatches):
                    rows.update(zip(batch.ordinals.tolist(), batch.tokens.tolist(), strict=True))
        return rows

    assert read(data_size, micro_size, num_microbatches) == read(1, 24, 1)


def test_padding_and_document_ends_are_masked(tmp_path: Path) -> None:
    lengths = [3, 5, 2]  # tokens 1-3, 4-8, 9-10: windows 1-5, 5-9, 9-10
    plain = make_source(tmp_path, lengths, sequential=True, micro_size=4).microbatch(0, 0, 1)
    assert plain.loss_mask.tolist() == [[1, 1, 1, 1], [1, 1, 1, 1], [1, 0, 0, 0], [0, 0, 0, 0]]
    masked = make_source(tmp_path, lengths, sequential=True, micro_size=4, mask_end_of_document=True).microbatch(
        0, 0, 1
    )
    # The labels 4 and 9 begin documents.
    assert masked.loss_mask.tolist() == [[1, 1, 0, 1], [1, 1, 1, 0], [1, 0, 0, 0], [0, 0, 0, 0]]
    assert masked.labels[0, 2] == 4
    assert masked.labels[1, 3] == 9


@pytest.mark.parametrize(
    "wrong", [{"data_rank": 2}, {"data_rank": -1}, {"microbatch": 3}, {"micro_size": 0}, {"consumed": -1}]
)
def test_impossible_positions_are_refused(wrong: dict[str, int]) -> None:
    right = {"consumed": 0, "data_rank": 0, "data_size": 2, "microbatch": 0, "micro_size": 1, "num_microbatches": 3}
    with pytest.raises(DataError, match="micro-batch"):
        microbatch_ordinals(**{**right, **wrong})
