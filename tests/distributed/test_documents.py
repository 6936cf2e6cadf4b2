"""Attention within documents: every stage computes the same blocks, and blocks train what a mask trains."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import flex_attention

from megapipe.layers import attention
from megapipe.layers.attention import attend, visible_within_documents
from megapipe.parallel.in_process import in_process_meshes
from megapipe.training.loop import batches
from tests.distributed.conftest import Make, Oracle
from tests.distributed.layout_cases import DOCUMENTS, ONE, STEPS, Case
from tests.support.gpt_runs import load_batches, run_gpt
from tests.support.meshes import run_threads


@pytest.fixture
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use torch's reference of flex_attention, whose gradients torch refuses on a CPU."""
    monkeypatch.setattr(batches, "why_a_mask", lambda model, device: None)
    monkeypatch.setattr(flex_attention, "_validate_device", lambda *tensors: None)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_attention_over_blocks_equals_attention_with_a_mask(
    make: Make, one_process: Oracle, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    expected = [result.loss for result in one_process(Case("llama", ONE, run=DOCUMENTS), STEPS).results]
    request.getfixturevalue("as_on_a_gpu")
    calls = []
    monkeypatch.setattr(attention, "attend", lambda *given: calls.append(given) or attend(*given))
    (actual,) = run_threads(ONE, run_gpt, make("llama", ONE, DOCUMENTS), STEPS)
    assert len(calls) == 2 * 8 * STEPS  # layers x micro-batches x steps
    assert [result.loss for result in actual.results] == pytest.approx(expected, rel=1e-5)


def test_every_stage_computes_the_same_blocks(make: Make, as_on_a_gpu: None) -> None:
    config = make("llama", ONE, DOCUMENTS)
    (mesh,) = in_process_meshes({})
    ends: list[Any] = [
        SimpleNamespace(is_first=first, is_last=last) for first, last in ((True, False), (False, False), (False, True))
    ]
    first, middle, last = (load_batches(stage, config, mesh)[0].contexts for stage in ends)
    for contexts in zip(first, middle, last, strict=True):
        assert contexts[1].tokens is None
        seen = [context.document_blocks[None] for context in contexts]
        for blocks in seen[1:]:
            for actual, expected in zip(blocks.as_tuple(), seen[0].as_tuple(), strict=True):
                assert not isinstance(actual, Tensor) or torch.equal(actual, expected)
        dense = visible_within_documents(contexts[1].document_starts, None)
        queries = torch.arange(16)
        by_rule = seen[1].mask_mod(torch.zeros((), dtype=torch.int64), None, queries[:, None], queries)
        assert torch.equal(by_rule, dense[0])
