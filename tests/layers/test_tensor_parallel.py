"""One tensor rank against two and four: losses, logits and every gradient, fused and split, tokens sharded or not."""

from dataclasses import replace
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from megapipe.layers.linear import shard_sequence
from megapipe.layers.sequence_parallel import SequenceProducts
from megapipe.layers.split import SplitTape
from megapipe.parallel.mesh import Mesh
from megapipe.parallel.unit_state import sum_partial_gradients
from tests.layers.bound import DROPOUT, GPT2, LLAMA, QWEN3, bind_model, make_context, run, small_model
from tests.support.gpt_runs import Shard, assembled, shards
from tests.support.meshes import run_mesh, run_threads

SHAPES = {
    "gpt2": {**GPT2, **DROPOUT},
    "llama": {**LLAMA, "num_kv_heads": 4},
    "qwen3": {**QWEN3, "num_kv_heads": 4, "num_heads": 8},
}


class Result(NamedTuple):
    """Results of a rank. gradients: of each use of a weight, named by layer. padding: gradients of padding."""

    loss: Tensor
    logits: Tensor
    gradients: list[Shard]
    padding: Tensor


def one_rank(mesh: Mesh, shape: str, split: bool, alignment: int, chunks: int | None = None) -> Result:
    """Run forward and backward on this rank.

    chunks: those of sequence parallelism; None for every rank to hold whole samples.
    """
    model = small_model(**SHAPES[shape])
    layers = bind_model(model, group=mesh.group("tensor"), dtype=torch.float64, alignment=alignment)
    if chunks is not None:
        products = SequenceProducts(mesh.group("tensor"), chunks)
        for layer in layers:
            partial = shard_sequence(layer.module, products)
            layer.state.partial = frozenset(layer.spec.parameters[path].name for path in partial)
    context = make_context(model)
    if split:
        context.tape = SplitTape()
        loss = run(layers, context)
        context.tape.backward_input([loss], [torch.ones_like(loss)], [])
        context.tape.backward_weight()
    else:
        loss = run(layers, context)
        loss.backward()
    for layer in layers:
        sum_partial_gradients(layer.state, layer.state.gradients[0], mesh.group("tensor"))
    with torch.no_grad():
        logits = run(layers, replace(context, labels=None, tape=None))
    padding = [
        layer.state.view(layer.state.gradients[0], segment).flatten()[segment.owned :]
        for layer in layers
        for segment in layer.state.table
    ]
    gradients = [
        replace(shard, name=f"{layer.spec.name}: {shard.name}")
        for layer in layers
        for shard in shards([layer.state], [layer.state.gradients[0]])
    ]
    return Result(loss.detach(), logits, gradients, torch.cat(padding))


def compare(shape: str, results: list[Result]) -> None:
    (alone,) = run_threads({"tensor": 1}, one_rank, shape, False, 1)
    for result in results:
        assert torch.allclose(result.loss, alone.loss, rtol=1e-12, atol=0.0)
        assert result.logits.shape == alone.logits.shape
        assert torch.allclose(result.logits, alone.logits, rtol=0.0, atol=1e-12)
        assert not result.padding.any(), "padding got a gradient"
        assert torch.equal(result.loss, results[0].loss)
    actual, expected = (assembled([each.gradients for each in ranks]) for ranks in (results, [alone]))
    assert actual.keys() == expected.keys()
    for name, gradient in expected.items():
        assert gradient.norm() > 0
        assert (actual[name] - gradient).norm() <= 1e-11 * gradient.norm(), name


@pytest.mark.parametrize(
    ("size", "split", "chunks"),
    [(2, False, None), (2, True, None), (4, True, None), (2, False, 1), (2, True, 3), (4, False, 2), (4, True, 1)],
)
@pytest.mark.parametrize("shape", SHAPES)
def test_ranks_that_share_the_weights(shape: str, size: int, split: bool, chunks: int | None) -> None:
    """61 rows of the vocabulary: 31 a rank for 2, 16 for 4, the last rank padded. 12 tokens are shared where there are
    chunks: 6 or 3 a rank, in chunks of one size and of two."""
    compare(shape, run_threads({"tensor": size}, one_rank, shape, split, 1, chunks))


def test_processes() -> None:
    compare("qwen3", run_mesh({"tensor": 2}, one_rank, "qwen3", True, 1))


@pytest.mark.parametrize("split", [False, True])
def test_a_rank_without_any_token_of_its_own(split: bool) -> None:
    """Rows in multiples of 32: two of four ranks hold nothing but padding."""
    compare("gpt2", run_threads({"tensor": 4}, one_rank, "gpt2", split, 32))
