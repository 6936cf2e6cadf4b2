"""Attention within documents trains the same model on every layout: all stages find the same documents."""

from dataclasses import dataclass, replace
from functools import cache

import pytest
import torch
from torch import Tensor
from torch.nn.attention import flex_attention

from megapipe.config.run import PretrainConfig
from megapipe.layers import attention
from megapipe.layers.attention import visible_within_documents
from megapipe.layers.document_blocks import attend
from megapipe.parallel.in_process import in_process_meshes
from megapipe.training import batches
from megapipe.training.families import ModelFamily, family_of
from megapipe.training.sources import open_loader, open_samples
from tests.distributed.test_never_flushing import check_equal, recursion, trained
from tests.support.equality import check_bits, check_close
from tests.support.gpt_runs import GPT2_SHAPE, LLAMA_SHAPE, RankRun, make_config, run_gpt, write_shard
from tests.support.meshes import run_mesh, run_threads

MODELS = {"gpt2": GPT2_SHAPE, "llama": LLAMA_SHAPE}
STEPS = 4


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_shard(tmp_path_factory.mktemp("corpus"))


def config_of(corpus: str, model: str, sizes: dict[str, int], **data: object) -> PretrainConfig:
    layout = {name: sizes.get(name, 1) for name in ("pipeline", "tensor")}
    config = make_config(corpus, MODELS[model], parallel=layout)
    return replace(config, data=replace(config.data, isolate_documents=True, **data))


@cache
def one_process(corpus: str, model: str) -> RankRun:
    return run_mesh({}, run_gpt, config_of(corpus, model, {}), STEPS)[0]


@pytest.mark.parametrize(
    ("model", "pipeline"), [pytest.param("gpt2", 2, marks=pytest.mark.exhaustive), ("llama", 2), ("gpt2", 4)]
)
def test_pipelines_equal_one_process_bit_for_bit(corpus: str, model: str, pipeline: int) -> None:
    sizes = {"pipeline": pipeline}
    check_bits(run_mesh(sizes, run_gpt, config_of(corpus, model, sizes), STEPS), one_process(corpus, model))


@pytest.mark.parametrize(
    "sizes",
    [
        pytest.param({"tensor": 2}, marks=pytest.mark.exhaustive),
        pytest.param({"data": 2}, marks=pytest.mark.exhaustive),
        {"tensor": 2, "pipeline": 2},
    ],
    ids=str,
)
def test_reordered_sums_stay_within_tolerance(corpus: str, sizes: dict[str, int]) -> None:
    check_close(run_mesh(sizes, run_gpt, config_of(corpus, "llama", sizes), STEPS), one_process(corpus, "llama"), 1e-5)


def test_2bw_is_its_recursion(corpus: str) -> None:
    config = replace(config_of(corpus, "gpt2", {}), schedule=replace(PretrainConfig().schedule, name="2bw"))
    (expected,) = run_threads({}, recursion, config, False)
    check_equal(run_mesh({"pipeline": 2}, trained, config, (), False), expected)


def test_packed_and_rearranged_documents_on_two_stages(corpus: str) -> None:
    """The first and the last stage rearrange each for itself, and have to agree."""
    changes = {"pack": "best_fit", "fim_rate": 0.5, "fim_tokens": [58, 59, 60]}
    (expected,) = run_mesh({}, run_gpt, config_of(corpus, "gpt2", {}, **changes), STEPS)
    sizes = {"pipeline": 2}
    check_bits(run_mesh(sizes, run_gpt, config_of(corpus, "gpt2", sizes, **changes), STEPS), expected)
    plain = [result.loss for result in one_process(corpus, "gpt2").results]
    assert [result.loss for result in expected.results] != plain


@pytest.fixture
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of flex_attention through torch's reference of it, whose gradients torch refuses on a CPU."""
    monkeypatch.setattr(batches, "why_a_mask", lambda model, device: None)
    monkeypatch.setattr(flex_attention, "_validate_device", lambda *tensors: None)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_a_run_with_blocks_is_the_run_with_a_mask(
    corpus: str, as_on_a_gpu: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []
    monkeypatch.setattr(attention, "attend", lambda *given: calls.append(given) or attend(*given))
    (found,) = run_threads({}, run_gpt, config_of(corpus, "llama", {}), 2)
    assert len(calls) == 2 * 8 * 2  # layers x micro-batches x steps
    expected = [result.loss for result in one_process(corpus, "llama").results[:2]]
    assert [result.loss for result in found.results] == pytest.approx(expected, rel=1e-5)


@dataclass
class Part:
    """A stage, as its loader asks for it."""

    is_first: bool
    is_last: bool
    family: ModelFamily


def test_every_stage_finds_the_same_blocks(corpus: str, as_on_a_gpu: None) -> None:
    config = config_of(corpus, "llama", {})
    (mesh,) = in_process_meshes({})
    samples = open_samples(config, "train")
    first, middle, last = (
        open_loader(config, mesh, Part(*ends, family_of(config)), samples).load(0).contexts
        for ends in ((True, False), (False, False), (False, True))
    )
    for contexts in zip(first, middle, last, strict=True):
        assert contexts[1].tokens is None
        seen = [context.document_blocks for context in contexts]
        for blocks in seen[1:]:
            for found, expected in zip(blocks.as_tuple(), seen[0].as_tuple(), strict=True):
                assert not isinstance(found, Tensor) or torch.equal(found, expected)
        dense = visible_within_documents(contexts[1].document_starts, None)
        queries = torch.arange(16)
        by_rule = seen[1].mask_mod(torch.zeros((), dtype=torch.int64), None, queries[:, None], queries)
        assert torch.equal(by_rule, dense[0])


def test_documents_change_what_is_learnt(corpus: str) -> None:
    config = config_of(corpus, "gpt2", {})
    across = replace(config, data=replace(config.data, isolate_documents=False))
    (other,) = run_mesh({}, run_gpt, across, 2)
    losses = [result.loss for result in one_process(corpus, "gpt2").results]
    assert other.results[0].loss != pytest.approx(losses[0], rel=1e-6)
