"""Adopted layers against torch's own, bit for bit, and what is left alone."""

import copy
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

from megapipe.layers import adopt
from megapipe.layers.adoption import Adopted, SplitLinear, adopted_modules, recording, report
from megapipe.layers.split import SplitTape, unsplit_parameters

DTYPES = [torch.float32, torch.float64, torch.bfloat16]


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def tokens(*shape: int) -> Tensor:
    return torch.randint(0, 11, shape, generator=torch.Generator().manual_seed(1))


CASES: dict[str, tuple[Callable[[], nn.Module], Tensor]] = {
    "linear": (lambda: nn.Linear(24, 40), randn(5, 24)),
    "linear of one sample": (lambda: nn.Linear(24, 40), randn(24)),
    "linear of three axes": (lambda: nn.Linear(24, 40), randn(3, 7, 24)),
    "linear of four axes": (lambda: nn.Linear(24, 40), randn(2, 3, 7, 24)),
    "linear without bias": (lambda: nn.Linear(24, 40, bias=False), randn(3, 7, 24)),
    "linear of strided input": (lambda: nn.Linear(24, 40), randn(24, 7, 3).transpose(0, 2)),
    "linear without bias of strided input": (lambda: nn.Linear(24, 40, bias=False), randn(24, 7, 3).transpose(0, 2)),
    "linear of a transposed matrix": (lambda: nn.Linear(24, 40), randn(24, 5).t()),
    "linear of a column": (lambda: nn.Linear(1, 1), randn(6, 1)),
    "embedding": (lambda: nn.Embedding(11, 24), tokens(3, 7)),
    "embedding with padding": (lambda: nn.Embedding(11, 24, padding_idx=-2), tokens(3, 7)),
    "embedding scaled by frequency": (lambda: nn.Embedding(11, 24, scale_grad_by_freq=True), tokens(50)),
    "layer norm": (lambda: nn.LayerNorm(24), randn(3, 7, 24)),
    "layer norm over two axes": (lambda: nn.LayerNorm((7, 24)), randn(3, 7, 24)),
    "layer norm without bias": (lambda: nn.LayerNorm(24, bias=False), randn(3, 7, 24)),
    "layer norm of strided input": (lambda: nn.LayerNorm(24), randn(24, 7, 3).transpose(0, 2)),
    "rms norm": (lambda: nn.RMSNorm(24), randn(3, 7, 24)),
    "rms norm over two axes": (lambda: nn.RMSNorm((7, 24), eps=1e-3), randn(3, 7, 24)),
}


def perturbed(module: nn.Module) -> nn.Module:
    """Norms start as the identity, which hides mistakes."""
    with torch.no_grad():
        for seed, parameter in enumerate(module.parameters()):
            parameter.add_(randn(*parameter.shape, seed=seed).to(parameter.dtype), alpha=0.3)
    return module


def whole_step(module: nn.Module, inputs: Tensor, head: Callable[[Tensor], Tensor]) -> list[Tensor]:
    """Outputs, input gradient (where there is one) and parameter gradients of torch's own backward."""
    leaf = inputs.detach().requires_grad_(inputs.is_floating_point())
    outputs = head(module(leaf))
    outputs.backward(randn(*outputs.shape, seed=9).to(outputs.dtype))
    return [outputs, *([] if leaf.grad is None else [leaf.grad]), *(p.grad for p in module.parameters())]


def recorded(module: nn.Module, forward: Callable[[Tensor], Any], inputs: Tensor) -> tuple[Any, SplitTape]:
    """Results of a forward, and the tape on which adopted parts of the module recorded."""
    tape = SplitTape(unsplit_parameters(module))
    with recording(list(adopted_modules(module)), tape):
        return forward(inputs), tape


def split_step(module: nn.Module, inputs: Tensor, head: Callable[[Tensor], Tensor]) -> list[Tensor]:
    """The same through both halves; the input half leaves the parameters alone."""
    leaf = inputs.detach().requires_grad_(inputs.is_floating_point())
    outputs, tape = recorded(module, lambda x: head(module(x)), leaf)
    gradients = tape.backward_input([outputs], [randn(*outputs.shape, seed=9).to(outputs.dtype)], [leaf])
    assert all(parameter.grad is None for parameter in module.parameters())
    tape.backward_weight()
    return [outputs, *(g for g in gradients if g is not None), *(p.grad for p in module.parameters())]


def assert_same_bits(actual: list[Tensor], expected: list[Tensor]) -> None:
    assert len(actual) == len(expected)
    for ours, theirs in zip(actual, expected, strict=True):
        assert torch.equal(ours, theirs)
        assert ours.dtype == theirs.dtype


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("head", [lambda y: y, functional.silu, lambda y: y.relu_()], ids=["bare", "silu", "in place"])
def test_both_halves_have_the_bits_of_torch(case: str, dtype: torch.dtype, head: Callable[[Tensor], Tensor]) -> None:
    make, inputs = CASES[case]
    inputs = inputs.to(dtype) if inputs.is_floating_point() else inputs
    original = perturbed(make().to(dtype))
    expected = whole_step(copy.deepcopy(original), inputs, head)
    ours = adopt(original)
    assert isinstance(ours, Adopted)
    assert isinstance(ours, type(make()))
    assert_same_bits(whole_step(copy.deepcopy(ours), inputs, head), expected)
    assert_same_bits(split_step(ours, inputs, head), expected)


class Block(nn.Module):
    """A little of everything: a shared layer, a tied weight, a functional use of a weight, unknown layers."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(11, 24)
        self.shared = nn.Linear(24, 24)
        self.again = self.shared
        self.norm = nn.LayerNorm(24)
        self.attention = nn.MultiheadAttention(24, 2, batch_first=True)
        self.mix = nn.Conv1d(24, 24, 1)
        self.head = nn.Linear(24, 11, bias=False)
        self.head.weight = self.words.weight

    def forward(self, inputs: Tensor) -> Tensor:
        x = self.again(self.shared(self.words(inputs)).tanh())
        x = x + self.attention(self.norm(x), self.norm(x), x, need_weights=False)[0]
        x = x + self.mix(x.transpose(1, 2)).transpose(1, 2)
        return self.head(x) + functional.linear(x, self.words.weight) * 0.5


@pytest.mark.filterwarnings("ignore:some parameters")
def test_partly_adopted_modules_keep_every_use_of_weights() -> None:
    """Sums over several uses of one weight are taken in another order, so these may differ in the last bits."""
    original = perturbed(Block().double())
    names = [name for name, _ in original.named_parameters()]
    expected = whole_step(copy.deepcopy(original), tokens(3, 5), lambda y: y)
    module = adopt(original)
    outputs, tape = recorded(module, module, tokens(3, 5))
    tape.backward_input([outputs], [randn(*outputs.shape, seed=9).double()], [])
    tape.backward_weight()
    assert torch.equal(outputs, expected[0])
    for name, parameter, gradient in zip(names, module.parameters(), expected[1:], strict=True):
        torch.testing.assert_close(parameter.grad, gradient, rtol=1e-12, atol=1e-12, msg=name)


def test_what_is_shared_stays_shared_and_names_stay() -> None:
    module = Block()
    before = {name: id(parameter) for name, parameter in module.named_parameters(remove_duplicate=False)}
    state = module.state_dict().keys()
    called = []
    module.norm.register_forward_hook(lambda *_: called.append(True))
    assert adopt(module) is module
    assert module.again is module.shared
    assert module.head.weight is module.words.weight
    assert {name: id(p) for name, p in module.named_parameters(remove_duplicate=False)} == before
    assert module.state_dict().keys() == state
    module(tokens(1, 2))
    assert len(called) == 2, "hooks are lost"
    shape_of = [type(part) for part in module.modules()]
    assert [type(part) for part in adopt(module).modules()] == shape_of, "adopting twice changes something"


class Doubled(nn.Linear):
    """Says nothing of the forward: adopted."""


class Masked(nn.Linear):
    """Has a forward of its own: left alone."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input).tril()


class Zoo(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.plain = nn.Linear(4, 4)
        self.kin = Doubled(4, 4)
        self.own = Masked(4, 4)
        self.patched = nn.Linear(4, 4)
        self.patched.forward = self.plain.forward  # type: ignore[method-assign]
        self.normed = parametrizations.weight_norm(nn.Linear(4, 4))
        self.lazy = nn.LazyLinear(4)
        self.sparse = nn.Embedding(4, 4, sparse=True)
        self.renormed = nn.Embedding(4, 4, max_norm=1.0)
        self.bare = nn.LayerNorm(4, elementwise_affine=False)
        self.convolution = nn.Conv1d(4, 4, 1)


def test_the_report_says_what_is_not_split_and_why() -> None:
    zoo = Zoo()
    assert report(zoo).whole["plain"] == "Linear has not been adopted"
    reasons = report(adopt(zoo))
    assert reasons.split == {"plain": "Linear", "kin": "Linear"}
    assert isinstance(zoo.kin, Doubled)
    assert type(zoo.plain) is SplitLinear
    assert {path: why.partition(" ")[2] for path, why in reasons.whole.items()} == {
        "own": "has a forward of its own",
        "patched": "has a forward of its own",
        "normed": "computes its weight from other tensors",
        "normed.parametrizations.weight": "is not one of Linear, Embedding, LayerNorm, RMSNorm",
        "lazy": "does not know its shape before its first forward",
        "sparse": "has sparse gradients",
        "renormed": "renormalises its weight in the forward (max_norm)",
        "convolution": "is not one of Linear, Embedding, LayerNorm, RMSNorm",
    }
    assert str(reasons).startswith("split: 2 modules; not split: 8\n  own: Masked has a forward of its own")


def test_autocast_and_no_grad_leave_the_tape_alone() -> None:
    module, x = adopt(nn.Linear(4, 4)), randn(2, 4)
    tape = SplitTape(unsplit_parameters(module))
    with recording([module], tape):
        with torch.no_grad():
            module(x)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            outputs = module(x)
    assert outputs.dtype == torch.bfloat16
    assert tape.kept == []
    with pytest.warns(UserWarning, match="without a weight half"):
        tape.backward_input([outputs], [torch.ones_like(outputs)], [])
    tape.backward_weight()
    assert torch.equal(module.bias.grad, torch.full((4,), 2.0))


class Recomputed(nn.Module):
    """A block whose activations are made a second time in the backward."""

    def __init__(self) -> None:
        super().__init__()
        self.block = nn.Sequential(nn.LayerNorm(24), nn.Linear(24, 24), nn.Tanh(), nn.RMSNorm(24), nn.Linear(24, 24))

    def forward(self, inputs: Tensor) -> Tensor:
        return checkpoint(self.block, inputs, use_reentrant=False)


def test_recomputed_activations_split_as_well() -> None:
    original = perturbed(Recomputed())
    expected = whole_step(copy.deepcopy(original), randn(3, 24), lambda y: y)
    assert_same_bits(split_step(adopt(original), randn(3, 24), lambda y: y), expected)


@pytest.mark.filterwarnings("ignore:some parameters")
def test_what_is_compiled_gets_whole_gradients() -> None:
    """It is compiled once, not again for every micro-batch's tape."""
    graphs = []

    def backend(graph: torch.fx.GraphModule, _: list[Tensor]) -> Callable[..., object]:
        graphs.append(graph)
        return graph.forward

    original = perturbed(nn.Sequential(nn.LayerNorm(24), nn.Linear(24, 24), nn.Tanh(), nn.Linear(24, 24)))
    plain = copy.deepcopy(original)
    compiled = torch.compile(adopt(original), backend=backend)
    for seed in range(3):
        inputs, upstream = randn(4, 24, seed=seed), randn(4, 24, seed=9)
        plain(inputs).backward(upstream)
        outputs, tape = recorded(original, compiled, inputs)
        tape.backward_input([outputs], [upstream], [])
        tape.backward_weight()
    for ours, theirs in zip(original.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad)
    assert len(graphs) == 1


def test_copies_of_adopted_modules_are_adopted_and_apart() -> None:
    original = adopt(nn.Sequential(nn.Linear(4, 4), Doubled(4, 4)))
    twin = copy.deepcopy(original)
    assert [type(part) for part in twin] == [type(part) for part in original]
    _, tape = recorded(twin, original, randn(2, 4))
    assert tape.kept == []


def test_importing_adopt_is_lazy_and_repeatable() -> None:
    code = (
        "import sys, megapipe.layers; assert 'torch' not in sys.modules;"
        "from megapipe.layers import adopt; from megapipe.layers import adopt as again;"
        "assert callable(adopt) and adopt is again;"
        "assert 'megapipe.layers.attention' not in sys.modules and 'megapipe.kernels.ops' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
