"""Autograd's engine without its front.

`torch.autograd.backward` and `grad` look into every argument before they call the engine. Between two waits for
another rank, when caches are cold, that is a quarter of a small backward's processor time (measured). A pipeline knows
what it passes: a gradient for each place in the graph, of its shape; the engine itself refuses others.
"""

from collections.abc import Sequence

from torch import Tensor
from torch._C import _FunctionBase
from torch.autograd.graph import GradientEdge, _engine_run_backward, get_gradient_edge

Place = Tensor | GradientEdge
"""Where a gradient enters or leaves the graph."""


def gradient_edge(tensor: Tensor) -> GradientEdge:
    """As torch's `get_gradient_edge`: holds the graph behind a tensor that requires grad, not the tensor's memory."""
    node = tensor.grad_fn
    if node is None or isinstance(node, _FunctionBase):
        # A leaf, or a node in Python, which lives only as long as something in C++ refers to it.
        return get_gradient_edge(tensor)
    return GradientEdge(node, tensor.output_nr)


def accumulate(outputs: Sequence[Place], gradients: Sequence[Tensor]) -> None:
    """As `torch.autograd.backward`: add to the `.grad` of every leaf behind `outputs`. Frees the graph."""
    _engine_run_backward(
        tuple(outputs), tuple(gradients), False, False, (), allow_unreachable=True, accumulate_grad=True
    )


def gradients_of(
    inputs: Sequence[Place], outputs: Sequence[Place], gradients: Sequence[Tensor]
) -> tuple[Tensor | None, ...]:
    """As `torch.autograd.grad`: gradients of `inputs`, None for one that is not behind `outputs`. Frees the graph."""
    return _engine_run_backward(tuple(outputs), tuple(gradients), False, False, tuple(inputs), True, False)
