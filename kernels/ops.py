"""Every op with its backends, in order of preference."""

from megapipe.kernels import apex_backend, cuda_backend, preferences, triton_backend
from megapipe.kernels.reference import (
    adamw,
    attention_probabilities,
    bias_dropout_residual,
    bias_gelu,
    cross_entropy,
    dropout,
    gelu,
    gradient_norm,
    layer_norm,
    linear_cross_entropy,
    rms_norm,
    rotary,
    softmax,
    stochastic_rounding,
    swiglu,
    weight_gradient,
)
from megapipe.kernels.registry import REFERENCE, Backend, KernelOp, Registry


def _triton(name: str) -> Backend:
    return Backend("triton", f"{triton_backend.__name__}.{name}", triton_backend.unavailable)


def _apex(name: str, only_requested: bool = False) -> Backend:
    module = f"{apex_backend.__name__}.{name}"
    return Backend("apex", module, apex_backend.unavailable(name), only_requested)


def _cuda(name: str) -> Backend:
    return Backend("cuda", f"{cuda_backend.__name__}.{name}", cuda_backend.unavailable)


NORM = ("forward", "add_forward", "input_gradient", "weight_gradient", "backward")
CROSS_ENTROPY = ("row_statistics", "logit_gradient", "statistics", "gradient", "statistics_and_gradient")

OPS = Registry(
    [
        KernelOp(
            "layer_norm",
            NORM,
            (_triton("layer_norm"), _cuda("layer_norm"), _apex("layer_norm"), Backend(REFERENCE, layer_norm)),
        ),
        KernelOp(
            "rms_norm", NORM, (_triton("rms_norm"), _cuda("rms_norm"), _apex("rms_norm"), Backend(REFERENCE, rms_norm))
        ),
        KernelOp("gelu", ("apply",), (_triton("gelu"), Backend(REFERENCE, gelu))),
        KernelOp("bias_gelu", ("apply",), (_triton("bias_gelu"), Backend(REFERENCE, bias_gelu))),
        KernelOp("swiglu", ("apply",), (_triton("swiglu"), Backend(REFERENCE, swiglu))),
        KernelOp("rotary", ("apply",), (_triton("rotary"), Backend(REFERENCE, rotary))),
        KernelOp("dropout", ("apply",), (_triton("dropout"), Backend(REFERENCE, dropout))),
        KernelOp(
            "bias_dropout_residual",
            ("apply",),
            (_triton("bias_dropout_residual"), Backend(REFERENCE, bias_dropout_residual)),
        ),
        KernelOp(
            "attention_probabilities",
            ("apply",),
            (
                _triton("attention_probabilities"),
                _cuda("attention_probabilities"),
                _apex("attention_probabilities", only_requested=True),
                Backend(REFERENCE, attention_probabilities),
            ),
        ),
        KernelOp(
            "softmax",
            ("forward", "input_gradient"),
            (_triton("softmax"), _cuda("softmax"), _apex("softmax", only_requested=True), Backend(REFERENCE, softmax)),
        ),
        KernelOp("cross_entropy", CROSS_ENTROPY, (_triton("cross_entropy"), Backend(REFERENCE, cross_entropy))),
        KernelOp(
            "linear_cross_entropy",
            ("statistics", "statistics_and_gradient", "complete_gradient", "backward"),
            (_triton("linear_cross_entropy"), Backend(REFERENCE, linear_cross_entropy)),
        ),
        KernelOp("adamw", ("step",), (_triton("adamw"), _cuda("adamw"), _apex("adamw"), Backend(REFERENCE, adamw))),
        KernelOp(
            "stochastic_rounding",
            ("round_to",),
            (_triton("stochastic_rounding"), Backend(REFERENCE, stochastic_rounding)),
        ),
        KernelOp(
            "gradient_norm",
            ("squared_norm",),
            (_triton("gradient_norm"), _apex("gradient_norm"), Backend(REFERENCE, gradient_norm)),
        ),
        KernelOp(
            "weight_gradient",
            ("accumulate",),
            (_apex("weight_gradient", only_requested=True), Backend(REFERENCE, weight_gradient)),
        ),
    ],
    preferences=lambda: preferences.current().preferences,
)
