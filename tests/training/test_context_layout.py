"""Which tokens reach a context rank, and what cannot be sharded."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megapipe.config.memory import RecomputeConfig
from megapipe.config.parallel import ParallelConfig
from megapipe.config.run import PretrainConfig
from megapipe.engine.step import StepInput
from megapipe.inference.trained_model import on_layout
from megapipe.layout.validation import context_problems
from megapipe.parallel.in_process import InProcessMesh
from megapipe.training.loop.loader import HeldTokens
from megapipe.training.validation import attention_kept, document_attention, layer_uses
from tests.support.gpt_runs import LLAMA_SHAPE, make_config, opened, write_shard
from tests.support.meshes import run_threads
from tests.training.test_validate import make


def test_chunk_pairs_are_only_needed_with_causal_attention() -> None:
    for kind, refused in (("ring", True), ("all_to_all", False)):
        config = make(parallel={"context": 2, "context_attention": kind}, data={"sequence_length": 126})
        assert bool(context_problems(config)) == refused


def loaded(mesh: InProcessMesh, config: PretrainConfig) -> StepInput:
    return opened(mesh, config)[1](0)


@pytest.mark.parametrize("kind", ["ring", "all_to_all"])
def test_ranks_hold_their_own_tokens_alone(tmp_path: Path, kind: str) -> None:
    parallel = {"context": 2, "context_attention": kind, "data": 1}
    plain = make_config(write_shard(tmp_path), LLAMA_SHAPE, data={"isolate_documents": True})
    plain.data = replace(plain.data, prefix=str(tmp_path / "corpus"), sequence_length=16, split="90,5,5")
    shared = replace(plain, parallel=replace(plain.parallel, **parallel))
    (whole,) = run_threads({}, loaded, plain)
    parts = run_threads({"context": 2}, loaded, shared)
    tokens = [[0, 1, 2, 3, 12, 13, 14, 15], [*range(4, 12)]] if kind == "ring" else [[*range(8)], [*range(8, 16)]]
    for part, numbers in zip(parts, tokens, strict=True):
        for local, everything in zip(part.contexts, whole.contexts, strict=True):
            assert local.token_numbers.tolist() == numbers
            for name in ("tokens", "labels", "loss_mask", "document_starts"):
                assert torch.equal(getattr(local, name), getattr(everything, name)[:, numbers]), name
            assert torch.equal(local.ordinals, everything.ordinals)
            assert (local.whole_document_starts is None) == (kind == "ring")
    assert [sum(counts) for counts in zip(*(part.token_counts for part in parts), strict=True)] == list(
        whole.token_counts
    )


@given(st.integers(1, 4), st.integers(0, 6), st.integers(1, 4), st.integers(0, 2**32))
def test_each_prediction_goes_to_one_rank(batch: int, most: int, size: int, seed: int) -> None:
    length = 6 * size
    generator = np.random.default_rng(seed)
    positions = np.zeros((batch, max(most, 1)), dtype=np.int64)
    mask = np.zeros(positions.shape, dtype=np.float32)
    for row in range(batch):
        count = int(generator.integers(0, most + 1))
        positions[row, :count] = np.sort(generator.choice(length, size=count, replace=False))
        mask[row, :count] = 1
    labels = positions + 100
    seen = []
    for rank in range(size):
        numbers = np.arange(rank * 6, (rank + 1) * 6)
        own, own_labels, own_mask = HeldTokens(numbers).predictions(positions, labels, mask, length)
        assert own.shape == own_labels.shape == own_mask.shape
        assert own.shape[1] >= 1
        assert own.min() >= 0
        assert own.max() < 6
        for row, column in zip(*own_mask.nonzero(), strict=True):
            assert own_labels[row, column] == numbers[own[row, column]] + 100
            seen.append((row, int(own_labels[row, column])))
    assert sorted(seen) == sorted(zip(mask.nonzero()[0], labels[mask > 0], strict=True))


def test_a_ring_says_what_it_does() -> None:
    config = make(parallel={"context": 2}, data={"isolate_documents": True}, model={"attention": "unfused"})
    config.recompute = RecomputeConfig(method="selective", parts=["attention"])
    cpu = torch.device("cpu")
    assert document_attention(config, cpu) == "attention within documents: a mask for every piece of the ring"
    assert "in a ring here and saves no weights" in str(attention_kept(config, cpu))
    whole = replace(config, parallel=replace(config.parallel, context_attention="all_to_all"))
    assert attention_kept(whole, cpu) is None
    without = replace(whole, data=replace(whole.data, isolate_documents=False))
    for each, expected in ((config, False), (whole, False), (without, True)):
        ops = [op for op, _ in layer_uses(each, "cpu")]
        assert ("attention_probabilities" in ops) == expected


def test_texts_are_generated_on_whole_samples() -> None:
    config = make(parallel={"context": 2})
    assert on_layout(config, ParallelConfig(tensor=2, data=1, device="cpu")).parallel.context == 1
