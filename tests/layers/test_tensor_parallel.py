"""One tensor rank against two and four, tokens sharded or not: losses, logits, gradients, messages and their times."""

import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from megapipe.layers.linear import ColumnParallelLinear, RowParallelLinear, own_tokens, shard_sequence
from megapipe.layers.sequence_parallel import SequenceProducts
from megapipe.layers.split import SplitTape
from megapipe.parallel.collectives import by_rank
from megapipe.parallel.groups import Group
from megapipe.parallel.mesh import Mesh
from megapipe.parallel.unit_state import sum_partial_gradients
from tests.layers.bound import DROPOUT, GPT2, LLAMA, QWEN3, bind_model, make_context, run, small_model
from tests.support.counting_groups import CountingGroup, Traffic
from tests.support.gpt_runs import Shard, assembled, shards
from tests.support.meshes import run_mesh, run_threads
from tests.support.partial_groups import PartialGroup

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


def traffic_of_a_block(mesh: Mesh, shape: str, split: bool, chunks: int | None) -> dict[str, float]:
    """Elements that a rank sends for one block and one micro-batch, in units of b s h (t - 1) / t."""
    traffic = Traffic()
    group = CountingGroup(mesh.group("tensor"), traffic)
    model = small_model(**SHAPES[shape])
    block = bind_model(model, group=group)[1]
    context = make_context(model)
    if chunks is not None:
        shard_sequence(block.module, SequenceProducts(group, chunks))
    assert context.tokens is not None
    batch, length = context.tokens.shape
    num_local = length if chunks is None else length // group.size
    hidden = torch.randn(batch, num_local, model.hidden_size, requires_grad=True)
    context.tape = SplitTape() if split else None
    (output,) = block.module(hidden, context=context)
    if context.tape is None:
        output.sum().backward()
    else:
        context.tape.backward_input([output], [torch.ones_like(output)], [hidden])
        context.tape.backward_weight()
    # A ring's all-reduce is a reduce-scatter and an all-gather.
    whole, passes = batch * length * model.hidden_size, {"all_reduce": 2}
    sent = traffic.elements.items()
    return {operation: passes.get(operation, 1) * elements / whole for (_, operation), elements in sent}


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("shape", ["gpt2", "llama"])
@pytest.mark.parametrize("chunks", [1, 3])
def test_blocks_send_tensor_parallel_traffic_and_two_shards_again(shape: str, chunks: int, size: int) -> None:
    """Plainly four all-reduces, 8 b s h (t - 1) / t elements of a rank; sharded four gathers and four scatters, the
    same, and the inputs of the two column-parallel products gathered again. A split backward gathers the gradients
    of the two row-parallel outputs again, too."""
    for traffic in run_threads({"tensor": size}, traffic_of_a_block, shape, False, None):
        assert traffic == {"all_reduce": 8}
    for split, gathers in ((False, 6), (True, 8)):
        for traffic in run_threads({"tensor": size}, traffic_of_a_block, shape, split, chunks):
            assert traffic == pytest.approx({"all_gather": gathers, "reduce_scatter": 4})


def test_query_and_key_norms_send_nothing_per_micro_batch() -> None:
    """Their sums over heads are a part of the step's."""
    for traffic in run_threads({"tensor": 2}, traffic_of_a_block, "qwen3", False, 1):
        assert "all_reduce" not in traffic


class SlowGroup(PartialGroup):
    """Members that need not be there, with what this one has. A collective that was started ends only once it may."""

    def __init__(self, size: int) -> None:
        super().__init__("slow", tuple(range(size)), 0)
        self.log: list[str] = []
        self.started = 0
        self.may_end = [threading.Event() for _ in range(16)]

    def _start(self, name: str, result: Tensor) -> Callable[[], Tensor]:
        number, self.started = self.started, self.started + 1
        self.log.append(f"start {name} {number}")

        def finish() -> Tensor:
            self.log.append(f"await {name} {number}")
            assert self.may_end[number].wait(20), f"nothing was computed while {name} {number} was under way"
            return result

        return finish

    def start_all_gather(self, tensor: Tensor) -> Callable[[], Tensor]:
        return self._start("gather", torch.stack([tensor] * self.size))

    def start_reduce_scatter(self, tensor: Tensor) -> Callable[[], Tensor]:
        return self._start("scatter", tensor[0])


class Products(TorchDispatchMode):
    """Logs matrix products; after the n-th one the collectives `after[n]` may end."""

    def __init__(self, group: SlowGroup, after: dict[int, list[int]]) -> None:
        super().__init__()
        self.group = group
        self.after = after
        self.count = 0
        self._allow(-1)

    def _allow(self, product: int) -> None:
        for collective in self.after.get(product, []):
            self.group.may_end[collective].set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten.bmm):
            self.group.log.append(f"product {self.count}")
            self._allow(self.count)
            self.count += 1
        return result


def linear(kind: type, group: Group, chunks: int) -> ColumnParallelLinear | RowParallelLinear:
    layer = kind({"weight": (6, 4)}, group)
    layer.weight = torch.nn.Parameter(torch.randn(6, 4))
    shard_sequence(layer, SequenceProducts(group, chunks))
    return layer


def test_chunks_are_gathered_during_the_previous_product() -> None:
    """Each gather but the first ends only after the product of the chunk before it; an earlier wait fails."""
    group = SlowGroup(2)
    layer = linear(ColumnParallelLinear, group, chunks=3)
    with Products(group, {-1: [0], 0: [1], 1: [2]}):
        layer(torch.randn(2, 6, 4), None)
    assert group.log == [
        *("start gather 0", "await gather 0", "start gather 1", "product 0"),
        *("await gather 1", "start gather 2", "product 1", "await gather 2", "product 2"),
    ]


def test_chunks_are_scattered_during_the_next_product() -> None:
    group = SlowGroup(2)
    layer = linear(RowParallelLinear, group, chunks=3)
    with Products(group, {2: [0, 1, 2]}):
        layer(torch.randn(2, 12, 4), None)
    assert group.log[:6] == [
        "product 0",
        "start scatter 0",
        "product 1",
        "start scatter 1",
        "product 2",
        "start scatter 2",
    ]


@pytest.mark.parametrize("chunks", [1, 2])
def test_backward_overlaps_gathers_and_scatters_with_both_products(chunks: int) -> None:
    group = SlowGroup(2)
    layer = linear(ColumnParallelLinear, group, chunks)
    x = torch.randn(2, 6, 4, requires_grad=True)
    forward = {-1: list(range(chunks))}
    with Products(group, forward):
        y = layer(x, None)
    group.log.clear()
    # The gather ends after the product for the input's gradient, the scatters after the one for the weight's.
    first = group.started
    with Products(group, {chunks - 1: [first], chunks: [first + 1 + i for i in range(chunks)]}):
        y.sum().backward()
    steps = [f"start gather {first}"]
    for chunk in range(chunks):
        steps += [f"product {chunk}", f"start scatter {first + 1 + chunk}"]
    assert group.log[: len(steps) + 2] == [*steps, f"await gather {first}", f"product {chunks}"]
    assert group.log[len(steps) + 2 :] == [f"await scatter {first + 1 + chunk}" for chunk in range(chunks)]


def test_own_tokens_are_a_view_of_this_ranks_part() -> None:
    tokens = torch.arange(24).view(2, 12)

    def own(mesh: Mesh) -> Tensor:
        part = own_tokens(tokens, SequenceProducts(mesh.group("tensor")))
        assert part.untyped_storage().data_ptr() == tokens.untyped_storage().data_ptr()
        return part

    assert torch.equal(torch.cat(run_threads({"tensor": 3}, own), dim=1), tokens)
    assert own_tokens(tokens, None) is tokens


def test_tokens_that_do_not_divide_are_refused() -> None:
    with pytest.raises(ValueError, match=r"13 tokens of a tensor of shape \(2, 13, 4\) are not divisible by 2"):
        by_rank(torch.zeros(2, 13, 4), 2)
