"""Split backward against the fused one, bit for bit."""

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

from megapipe.kernels.ops import OPS
from megapipe.kernels.reference import activations as reference_activations
from megapipe.layers.context import MicrobatchContext
from megapipe.layers.split import SplitError, SplitTape, unsplit_parameters
from megapipe.parallel.unit_state import free
from tests.layers.bound import DROPOUT, GPT2, LLAMA, QWEN3, bind, bind_model, make_context, run, small_model

SHAPES = {"gpt2": GPT2, "llama": LLAMA, "qwen3": QWEN3, "dropout": DROPOUT}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("shape", SHAPES)
def test_every_gradient_has_the_bits_of_the_fused_backward(shape: str, dtype: torch.dtype) -> None:
    model = small_model(**SHAPES[shape])
    layers = bind_model(model, dtype=dtype)
    context = make_context(model)
    seed = torch.tensor(1 / 24, dtype=layers[0].state.accumulate_dtype)
    fused_loss = run(layers, context)
    fused_loss.backward(seed)
    fused = [layer.state.gradients[0].clone() for layer in layers]
    for layer in layers:
        layer.state.zero_gradients()
    context.tape = SplitTape()
    loss = run(layers, context)
    assert torch.equal(loss, fused_loss)
    assert context.tape.backward_input([loss], [seed], []) == ()
    assert all(not layer.state.gradients[0].any() for layer in layers), "the input half touched a parameter's gradient"
    context.tape.backward_weight()
    for layer, expected in zip(layers, fused, strict=True):
        assert expected.any()
        assert torch.equal(layer.state.gradients[0], expected), layer.spec.name


@pytest.mark.parametrize("shape", SHAPES)
def test_block_by_block_as_a_pipeline_runs_it(shape: str) -> None:
    """Weight halves run late, in another order than input halves, over two micro-batches."""
    model = small_model(**SHAPES[shape])
    block = bind_model(model)[1]
    generator = torch.Generator().manual_seed(1)
    inputs = [torch.randn(2, 12, 32, generator=generator) for _ in range(2)]
    upstream = [torch.randn(2, 12, 32, generator=generator) for _ in range(2)]
    contexts = [make_context(model, seed=seed) for seed in range(2)]

    expected_inputs = []
    for x, dy, context in zip(inputs, upstream, contexts, strict=True):
        x = x.clone().requires_grad_()
        block.module(x, context=context)[0].backward(dy)
        expected_inputs.append(x.grad)
    expected = block.state.gradients[0].clone()
    block.state.zero_gradients()

    leaves, tapes = [x.clone().requires_grad_() for x in inputs], [SplitTape(), SplitTape()]
    outputs = []
    for x, context, tape in zip(leaves, contexts, tapes, strict=True):
        context.tape = tape
        outputs.append(block.module(x, context=context))
    for i in (1, 0):
        (dx,) = tapes[i].backward_input(outputs[i], [upstream[i]], [leaves[i]])
        assert torch.equal(dx, expected_inputs[i])
    for tape in tapes:
        tape.backward_weight()
    assert torch.equal(block.state.gradients[0], expected)


@pytest.mark.parametrize("shape", SHAPES)
def test_what_the_weight_half_makes_again_needs_no_weights(shape: str) -> None:
    """Sharded ones are released by then. A fused kernel that adds the bias with GELU needs that too."""
    model = small_model(**SHAPES[shape])
    block, context = bind_model(model)[1], make_context(model)
    fused = SimpleNamespace(apply=reference_activations.bias_gelu)
    block.module.mlp.kernels = SimpleNamespace(
        pick=lambda op, x: fused if op == "bias_gelu" else OPS.pick(op, x), reference=OPS.reference
    )
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(2, 12, 32, generator=generator, requires_grad=True)
    dy = torch.randn(2, 12, 32, generator=generator)
    block.module(x, context=context)[0].backward(dy)
    expected = block.state.gradients[0].clone()
    block.state.zero_gradients()

    block.module.recompute(("attention", "mlp", "norms"))
    context.tape = SplitTape()
    (output,) = block.module(x, context=context)
    context.tape.backward_input([output], [dy], [x])
    del output
    free(block.state.weights[0])
    context.tape.backward_weight()
    assert torch.equal(block.state.gradients[0], expected)


def test_halves_in_the_wrong_order_are_refused() -> None:
    model = small_model()
    block = bind_model(model)[1]
    context = make_context(model)
    context.tape = SplitTape()
    x = torch.randn(2, 12, 32, requires_grad=True)
    outputs = block.module(x, context=context)
    with pytest.raises(SplitError, match="backward_input"):
        context.tape.backward_weight()
    context.tape.backward_input(outputs, [torch.ones(2, 12, 32)], [x])
    with pytest.raises(SplitError, match="once"):
        context.tape.backward_input(outputs, [torch.ones(2, 12, 32)], [x])
    context.tape.backward_weight()
    with pytest.raises(SplitError):
        context.tape.backward_weight()


class Foreign(nn.Module):
    """A block inside a module that knows nothing of tapes."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block
        self.plain = nn.Linear(32, 32)

    def forward(self, hidden: Tensor, context: MicrobatchContext) -> Tensor:
        return self.plain(self.block(hidden, context=context)[0])


def test_unsplittable_modules_get_gradients_in_the_input_half() -> None:
    model = small_model()
    block = bind_model(model)[1]
    whole = Foreign(block.module)
    x = torch.randn(2, 12, 32, requires_grad=True)
    whole(x, make_context(model)).sum().backward()
    expected = [x.grad, whole.plain.weight.grad, whole.plain.bias.grad, block.state.gradients[0].clone()]
    whole.plain.zero_grad()
    block.state.zero_gradients()
    context = make_context(model)
    unsplit = unsplit_parameters(whole)
    assert [id(parameter) for parameter in unsplit] == [id(whole.plain.weight), id(whole.plain.bias)]
    context.tape = SplitTape(unsplit)
    output = whole(x, context)
    with pytest.warns(UserWarning, match="modules without a weight half"):
        (dx,) = context.tape.backward_input([output], [torch.ones_like(output)], [x])
    context.tape.backward_weight()
    gradients = [dx, whole.plain.weight.grad, whole.plain.bias.grad, block.state.gradients[0]]
    for ours, fused in zip(gradients, expected, strict=True):
        assert torch.equal(ours, fused)


def test_probes_take_no_memory() -> None:
    model = small_model()
    block = bind_model(model)[1]
    context = make_context(model)
    context.tape = SplitTape()
    block.module(torch.randn(2, 12, 32), context=context)
    probes = context.tape.fresh_probes()
    assert len(probes) == 6, "two norms and four linear layers"
    assert {probe.untyped_storage().nbytes() for probe in probes} == {4}


def test_twins_keep_their_own_weights_apart() -> None:
    """Forward of both versions, then backward of both: each uses the weights of its own forward."""
    model = small_model()
    spec = bind_model(model)[1].spec
    twins = [bind(spec, model, seed=seed) for seed in (1, 2)]
    x = torch.randn(2, 12, 32)
    alone = []
    for twin in twins:
        leaf = x.clone().requires_grad_()
        twin.module(leaf, context=make_context(model))[0].sum().backward()
        alone.append((leaf.grad, twin.state.gradients[0].clone()))
        twin.state.zero_gradients()
    leaves = [x.clone().requires_grad_() for _ in twins]
    outputs = [twin.module(leaf, context=make_context(model))[0] for twin, leaf in zip(twins, leaves, strict=True)]
    for output in outputs:
        output.sum().backward()
    for twin, leaf, (dx, gradients) in zip(twins, leaves, alone, strict=True):
        assert torch.equal(leaf.grad, dx)
        assert torch.equal(twin.state.gradients[0], gradients)
    assert not torch.equal(alone[0][0], alone[1][0])
