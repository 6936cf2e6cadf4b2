"""Every op with its backends, in order of preference."""

from collections.abc import Iterator, Sequence
from types import FunctionType, ModuleType

from megapipe.kernels import apex_backend, cuda_backend, preferences, triton_backend
from megapipe.kernels.reference import activations, attention, cross_entropy, dropout, norms, optimizer
from megapipe.kernels.registry import REFERENCE, Backend, Implementation, KernelOp, Registry


def _in(package: ModuleType, module: str) -> str:
    """Return the full name of a module, which is imported when it is first needed."""
    return f"{package.__name__}.{module}"


def _triton(module: str) -> Backend:
    return Backend("triton", _in(triton_backend, module), triton_backend.unavailable)


def _apex(op: str, only_requested: bool = False) -> Backend:
    return Backend("apex", _in(apex_backend, "kernels"), apex_backend.unavailable(op), only_requested)


_CUDA = Backend("cuda", _in(cuda_backend, "kernels"), cuda_backend.unavailable)

NORM = ("forward", "add_forward", "input_gradient", "weight_gradient", "backward")
CROSS_ENTROPY = ("statistics", "gradient", "statistics_and_gradient")
LINEAR_CROSS_ENTROPY = ("statistics", "statistics_and_gradient", "complete_gradient", "backward")

_NORMS = Backend(REFERENCE, norms)
_ACTIVATIONS = (_triton("activations"), Backend(REFERENCE, activations))
_ATTENTION = Backend(REFERENCE, attention)
_DROPOUT = (_triton("dropout"), Backend(REFERENCE, dropout))
_CROSS_ENTROPY = (_triton("cross_entropy"), Backend(REFERENCE, cross_entropy))
_OPTIMIZER = Backend(REFERENCE, optimizer)

TABLE = (
    KernelOp("layer_norm", NORM, (_triton("norms"), _CUDA, _apex("layer_norm"), _NORMS)),
    KernelOp("layer_norm_without_bias", NORM, (_triton("norms"), _NORMS)),
    KernelOp("rms_norm", NORM, (_triton("norms"), _CUDA, _apex("rms_norm"), _NORMS)),
    KernelOp("rms_norm_unit_offset", NORM, (_triton("norms"), _NORMS)),
    KernelOp("gelu", ("apply",), _ACTIVATIONS),
    KernelOp("bias_gelu", ("apply",), _ACTIVATIONS),
    KernelOp("swiglu", ("apply",), _ACTIVATIONS),
    KernelOp("rotary", ("apply",), (_triton("attention"), _ATTENTION)),
    KernelOp("dropout", ("apply",), _DROPOUT),
    KernelOp("bias_dropout_residual", ("apply",), _DROPOUT),
    KernelOp(
        "attention_probabilities",
        ("apply",),
        (_triton("attention"), _CUDA, _apex("attention_probabilities", only_requested=True), _ATTENTION),
    ),
    KernelOp(
        "softmax",
        ("forward", "input_gradient"),
        (_triton("attention"), _CUDA, _apex("softmax", only_requested=True), _ATTENTION),
    ),
    KernelOp("cross_entropy", CROSS_ENTROPY, _CROSS_ENTROPY),
    KernelOp("linear_cross_entropy", LINEAR_CROSS_ENTROPY, _CROSS_ENTROPY),
    KernelOp("softcapped_linear_cross_entropy", LINEAR_CROSS_ENTROPY, _CROSS_ENTROPY[-1:]),
    KernelOp("adamw", ("step",), (_triton("optimizer"), _CUDA, _apex("adamw"), _OPTIMIZER)),
    KernelOp("stochastic_rounding", ("apply",), (_triton("optimizer"), _OPTIMIZER)),
    KernelOp("gradient_norm", ("apply",), (_triton("optimizer"), _apex("gradient_norm"), _OPTIMIZER)),
    KernelOp("weight_gradient", ("apply",), (_apex("weight_gradient", only_requested=True), _OPTIMIZER)),
)
"""Ops by name, each with its backends."""


def _reference_only(listed: Sequence[KernelOp]) -> Iterator[KernelOp]:
    """Yield activations and norms that only the reference has; they need no row in the table."""
    listed_names = {op.name for op in listed}
    for name, value in vars(activations).items():
        is_activation = isinstance(value, FunctionType) and value.__module__ == activations.__name__
        if is_activation and name[0] != "_" and name not in listed_names:
            yield KernelOp(name, ("apply",), (Backend(REFERENCE, activations),))
    for name, value in vars(norms).items():
        if isinstance(value, Implementation) and name not in listed_names:
            yield KernelOp(name, NORM, (_NORMS,))


OPS = Registry([*TABLE, *_reference_only(TABLE)], preferences=lambda: preferences.current().preferences)
