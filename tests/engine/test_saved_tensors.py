"""Saved tensors of a forward, moved away and back: counted once, freed in between, the same bits after."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from megapipe.config.model import ModelConfig
from megapipe.engine.host_memory import HostPool, SavedTensors, address_of
from megapipe.engine.stage import SavedGraph, backward, backward_input
from megapipe.layers.context import MicrobatchContext
from megapipe.layers.split import SplitTape
from megapipe.spec.layers import model_layers
from megapipe.training.resilience.failures import saved_bytes
from tests.layers.bound import GPT2, LLAMA, bind, small_model
from tests.spec.sizes import predicted_bytes
from tests.support.live_bytes import LiveBytes

SIZE = 64


def forward(
    run: Callable[[Tensor], Tensor], data: Tensor, tape: SplitTape | None = None, *resident: Tensor
) -> tuple[SavedTensors, SavedGraph]:
    saved = SavedTensors(address_of(tensor) for tensor in resident)
    leaves, inputs = saved.entered((data.requires_grad_(),))
    with saved.collecting():
        outputs = (run(*inputs),)
    saved.finish(outputs, tape)
    return saved, SavedGraph.between(leaves, outputs, tape)


def move_away(saved: SavedTensors, pool: HostPool) -> int:
    """Bytes that left."""
    moves = saved.leaving(pool)
    for target, source in moves:
        target.copy_(source)
    saved.left()
    return sum(target.numel() for target, _ in moves)


def bring_back(saved: SavedTensors, pool: HostPool) -> None:
    for target, source in saved.arriving(torch.device("cpu")):
        target.copy_(source)
    saved.arrived(pool)


def curved(x: Tensor) -> Tensor:
    """Keeps x for both factors, its sine's argument and views of it, and the sine."""
    return (x.view(-1).sin().view_as(x) * x).t().contiguous().t() * x[:1]


def test_storages_count_once_are_freed_and_gradients_equal() -> None:
    data = torch.randn(SIZE, SIZE)
    expected = data.clone().requires_grad_()
    gradient = torch.randn(SIZE, SIZE)
    curved(expected).backward(gradient)
    pool = HostPool(pinned=False)
    with LiveBytes() as live:
        saved, piece = forward(curved, data.clone())
        before = live.current
        moved = move_away(saved, pool)
        # x itself, its sine, and the product in the layout that the last factor meets: no view on its own.
        assert moved == pool.num_bytes == 3 * 4 * SIZE * SIZE
        assert before - (live.current - pool.num_bytes) == moved
        bring_back(saved, pool)
        (actual,) = backward(piece, (gradient,))
    assert expected.grad is not None
    assert torch.equal(actual, expected.grad)
    assert pool.take(4 * SIZE * SIZE).numel() == 4 * SIZE * SIZE
    assert pool.num_bytes == moved  # that was one of the three, used again


def test_weights_the_batch_and_what_is_handed_on_stay() -> None:
    weight = nn.Parameter(torch.randn(SIZE, SIZE))
    index = torch.arange(SIZE)

    def run(x: Tensor) -> Tensor:
        order = x.detach()[:, 0].argsort()
        return (x @ weight.t())[index][order].exp()  # keeps x, the weight, the index, the order and its own output

    saved, piece = forward(run, torch.randn(SIZE, SIZE), None, weight, index)
    pool = HostPool(pinned=False)
    assert move_away(saved, pool) == 4 * SIZE * SIZE + 8 * SIZE
    bring_back(saved, pool)
    backward(piece, (torch.ones(SIZE, SIZE),))
    assert weight.grad is not None


@pytest.mark.parametrize("model", [GPT2, LLAMA], ids=["gpt2", "llama"])
def test_a_split_backward_finds_its_tape(model: dict[str, object]) -> None:
    """A block's two halves, with everything that its forward kept away in between."""
    config = small_model(**model)
    spec = model_layers(config)[1]
    data = torch.randn(2, 16, 32)
    gradient = torch.randn(2, 16, 32)
    tapes = []
    for moves in (False, True):
        layer = bind(spec, config)
        tape, pool = SplitTape(), HostPool(pinned=False)
        context = MicrobatchContext(tape=tape, ordinals=torch.arange(2))
        saved, piece = forward(lambda x, m=layer.module, c=context: m(x, context=c)[0], data.clone(), tape,
                               *layer.module.parameters())  # fmt: skip
        if moves:
            assert move_away(saved, pool) == predicted_bytes(config, spec, 2, 16, "fp32", "sdpa") + shared(config)
            assert not [tensor for tensor in tape.kept if tensor.numel()]
            bring_back(saved, pool)
        (passed,) = backward_input(piece, (gradient,))
        tape.backward_weight()
        tapes.append({"input": passed, **layer.gradients()})
    for name, value in tapes[0].items():
        assert torch.equal(tapes[1][name], value), name


def shared(config: ModelConfig) -> int:
    """Bytes of rotary tables, which the formula leaves out because blocks share them."""
    return 2 * 16 * (config.head_dim // 2) * 4 if config.positions == "rotary" else 0


def test_a_report_counts_what_is_on_the_device() -> None:
    saved, piece = forward(curved, torch.randn(SIZE, SIZE))
    before = sum(saved_bytes([piece]).values())
    moved = move_away(saved, pool := HostPool(pinned=False))
    assert sum(saved_bytes([piece]).values()) == before - moved == 0
    bring_back(saved, pool)
    assert sum(saved_bytes([piece]).values()) == moved


def test_what_is_away_cannot_be_used() -> None:
    saved, piece = forward(curved, torch.randn(SIZE, SIZE))
    move_away(saved, HostPool(pinned=False))
    with pytest.raises(RuntimeError, match="used before it is reloaded"):
        backward(piece, (torch.ones(SIZE, SIZE),))
