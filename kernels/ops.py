"""Every op with its backends, in order of preference."""

from megapipe.kernels.reference import (
    attention_probabilities,
    cross_entropy,
    dropout,
    gelu,
    layer_norm,
    rms_norm,
    rotary,
    swiglu,
)
from megapipe.kernels.registry import REFERENCE, Backend, Op, Registry

OPS = Registry(
    [
        Op("layer_norm", ("forward", "input_gradient", "weight_gradient"), (Backend(REFERENCE, layer_norm),)),
        Op("rms_norm", ("forward", "input_gradient", "weight_gradient"), (Backend(REFERENCE, rms_norm),)),
        Op("gelu", ("apply",), (Backend(REFERENCE, gelu),)),
        Op("swiglu", ("apply",), (Backend(REFERENCE, swiglu),)),
        Op("rotary", ("apply",), (Backend(REFERENCE, rotary),)),
        Op("dropout", ("apply",), (Backend(REFERENCE, dropout),)),
        Op("attention_probabilities", ("apply",), (Backend(REFERENCE, attention_probabilities),)),
        Op("cross_entropy", ("row_statistics", "logit_gradient"), (Backend(REFERENCE, cross_entropy),)),
    ]
)
