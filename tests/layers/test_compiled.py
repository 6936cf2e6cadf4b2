"""Layers under torch.compile: one frame for layers and twins, split halves with the bits of the fused backward.

Generated C++ takes the compiler 15 seconds a case: the fast tests stop before, at torch's own operators.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend

from megapipe.engine.stage import CompiledForward
from megapipe.layers.context import MicrobatchContext
from megapipe.layers.split import SplitTape
from megapipe.parallel.groups import Group
from megapipe.parallel.mesh import Mesh
from megapipe.spec.layers import model_layers
from tests.layers.bound import DROPOUT, GPT2, LLAMA, QWEN3, BoundLayer, bind, make_context, small_model
from tests.support.meshes import run_mesh

CASES = {
    "gpt2": (GPT2, torch.float32, (1, 1)),
    "gpt2_bf16": (GPT2, torch.bfloat16, (1, 2)),
    "llama_bf16": (LLAMA, torch.bfloat16, (1, 1)),
    "llama": (LLAMA, torch.float32, (1, 2)),
    "qwen3": (QWEN3, torch.float32, (1, 2)),
    "dropout": ({**GPT2, **DROPOUT}, torch.float32, (1, 2)),
    "embedding": (GPT2, torch.float32, (0, 0)),
    "head": (LLAMA, torch.float32, (3, 3)),
}


def leaves(layer: BoundLayer, seed: int) -> tuple[Tensor, ...]:
    """Random inputs of a layer."""
    if layer.spec.kind == "embedding":
        return ()
    dtype = layer.state.weights[0].dtype
    x = torch.randn(2, 12, 32, generator=torch.Generator().manual_seed(seed))
    return (x.to(dtype).requires_grad_(),)


def upstream(output: Tensor) -> Tensor:
    """A gradient for an output."""
    return torch.randn(output.shape, generator=torch.Generator().manual_seed(9)).to(output.dtype)


def uncompiled(module: nn.Module, inputs: Sequence[Tensor], context: MicrobatchContext) -> tuple[Tensor, ...]:
    """CompiledForward without the compiler."""
    return module(*inputs, context=context)


def interleaved(
    forward: Callable[..., tuple[Tensor, ...]], layers: list[BoundLayer], contexts: list[MicrobatchContext]
) -> list[tuple[Tensor, ...]]:
    """Forward through every layer, then backward: (output, gradients of inputs, flat gradient) of each."""
    runs = []
    for seed, (layer, context) in enumerate(zip(layers, contexts, strict=True)):
        layer.state.zero_gradients()
        inputs = leaves(layer, seed)
        runs.append((layer, context.tape, inputs, forward(layer.module, inputs, context)))
    results = []
    for layer, tape, inputs, outputs in runs:
        if tape is None:
            outputs[0].backward(upstream(outputs[0]))
            input_gradients = tuple(x.grad for x in inputs)
        else:
            input_gradients = tape.backward_input(outputs, [upstream(outputs[0])], inputs)
            assert not layer.state.gradients[0].any()
            tape.backward_weight()
        results.append((outputs[0].detach(), *input_gradients, layer.state.gradients[0].clone()))
    return results


def check(case: str, backend: str, group: Group | None = None) -> None:
    """Two layers or twins with different weights: fused against eager, split against fused."""
    fields, dtype, which = CASES[case]
    torch._dynamo.reset()
    model = small_model(**fields)
    specs = model_layers(model)
    layers = [bind(specs[index], model, group, dtype, seed=seed) for seed, index in enumerate(which)]
    counter = CompileCounterWithBackend(backend)
    forward = CompiledForward(backend=counter, fullgraph=True)

    def contexts(tapes: bool) -> list[MicrobatchContext]:
        return [replace(make_context(model), tape=SplitTape() if tapes else None) for _ in layers]

    fused = interleaved(forward, layers, contexts(tapes=False))
    assert counter.frame_count == 1, "one frame serves both"
    split = interleaved(forward, layers, contexts(tapes=True))
    assert counter.frame_count == 2
    eager = interleaved(uncompiled, layers, contexts(tapes=False))
    tolerance = 1e-5 if dtype == torch.float32 else 0.02
    for ours, theirs, reference in zip(split, fused, eager, strict=True):
        for mine, whole, plain in zip(ours, theirs, reference, strict=True):
            assert torch.equal(mine, whole)
            assert (whole - plain).norm() <= tolerance * plain.norm()
    assert not torch.equal(fused[0][0], fused[1][0]), "the weights differ"


@pytest.mark.parametrize(
    "case", ["gpt2", "head", *(pytest.param(case, marks=pytest.mark.exhaustive) for case in ("llama", "embedding"))]
)
def test_traced(case: str) -> None:
    """Traced and differentiated by the compiler, run by torch's own operators."""
    check(case, "aot_eager")


@pytest.mark.slow
@pytest.mark.one_in(3)
@pytest.mark.parametrize("case", CASES)
def test_compiled(case: str) -> None:
    check(case, "inductor")


def on_rank(mesh: Mesh, case: str, backend: str) -> None:
    check(case, backend, mesh.group("tensor"))


@pytest.mark.slow
@pytest.mark.parametrize("case", ["qwen3", "head"])
def test_traced_over_two_tensor_ranks(case: str) -> None:
    run_mesh({"tensor": 2}, on_rank, case, "aot_eager", timeout=120)


@pytest.mark.slow
def test_compiled_over_two_tensor_ranks() -> None:
    run_mesh({"tensor": 2}, on_rank, "gpt2", "inductor", timeout=300)
