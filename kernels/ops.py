"""Every op with its backends, in order of preference."""

from megapipe.kernels import triton_backend
from megapipe.kernels.reference import (
    attention_probabilities,
    bias_gelu,
    cross_entropy,
    dropout,
    gelu,
    layer_norm,
    rms_norm,
    rotary,
    softmax,
    swiglu,
)
from megapipe.kernels.registry import REFERENCE, Backend, Op, Registry


def _triton(name: str) -> Backend:
    return Backend("triton", f"{triton_backend.__name__}.{name}", triton_backend.unavailable)


NORM = ("forward", "add_forward", "input_gradient", "weight_gradient", "backward")

OPS = Registry(
    [
        Op("layer_norm", NORM, (_triton("layer_norm"), Backend(REFERENCE, layer_norm))),
        Op("rms_norm", NORM, (_triton("rms_norm"), Backend(REFERENCE, rms_norm))),
        Op("gelu", ("apply",), (_triton("gelu"), Backend(REFERENCE, gelu))),
        Op("bias_gelu", ("apply",), (_triton("bias_gelu"), Backend(REFERENCE, bias_gelu))),
        Op("swiglu", ("apply",), (_triton("swiglu"), Backend(REFERENCE, swiglu))),
        Op("rotary", ("apply",), (Backend(REFERENCE, rotary),)),
        Op("dropout", ("apply",), (Backend(REFERENCE, dropout),)),
        Op("attention_probabilities", ("apply",), (Backend(REFERENCE, attention_probabilities),)),
        Op("softmax", ("forward", "input_gradient"), (Backend(REFERENCE, softmax),)),
        Op("cross_entropy", ("row_statistics", "logit_gradient"), (Backend(REFERENCE, cross_entropy),)),
    ]
)
