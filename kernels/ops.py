"""Every op with its backends, in order of preference."""

from megapipe.kernels.reference import (
    attention_probabilities,
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

NORM = ("forward", "add_forward", "input_gradient", "weight_gradient", "backward")

OPS = Registry(
    [
        Op("layer_norm", NORM, (Backend(REFERENCE, layer_norm),)),
        Op("rms_norm", NORM, (Backend(REFERENCE, rms_norm),)),
        Op("gelu", ("apply",), (Backend(REFERENCE, gelu),)),
        Op("swiglu", ("apply",), (Backend(REFERENCE, swiglu),)),
        Op("rotary", ("apply",), (Backend(REFERENCE, rotary),)),
        Op("dropout", ("apply",), (Backend(REFERENCE, dropout),)),
        Op("attention_probabilities", ("apply",), (Backend(REFERENCE, attention_probabilities),)),
        Op("softmax", ("forward", "input_gradient"), (Backend(REFERENCE, softmax),)),
        Op("cross_entropy", ("row_statistics", "logit_gradient"), (Backend(REFERENCE, cross_entropy),)),
    ]
)
