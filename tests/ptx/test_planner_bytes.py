"""The planner's kernels move the bytes that are counted when the compiled ones run."""

from dataclasses import replace

import pytest

from megapipe.kernels import triton_backend
from megapipe.planner.cost.layer_times import RooflineTimes
from megapipe.spec.layers import model_layers
from tests.kernels.cases import needs_triton
from tests.planner.cost.runs import SMALL, config_of, machine

pytestmark = [needs_triton, pytest.mark.slow]

if triton_backend.installed():
    from tests.ptx.cases import CASES
    from tests.ptx.execution import compile_cases, run

DEVICE = machine().groups[0].device
TOKENS = 1024
SWIGLU = replace(SMALL, activation="swiglu")
STREAM = 2 * TOKENS * SMALL.hidden_size
WEIGHTS = 2 * SMALL.num_heads * TOKENS**2
LOGITS = 2 * TOKENS * 1024

PLANNED = {
    "norm": ("mlp_norm", STREAM, {}),
    "residual": ("mlp residual", STREAM, {"hidden_dropout": 0.1}),
    "gelu": ("activation", 2 * TOKENS * SMALL.ffn_size, {}),
    "swiglu": ("activation", 2 * TOKENS * SWIGLU.ffn_size, {"activation": "swiglu"}),
    "rotary": ("rotation and norms of heads", 2 * STREAM, {"positions": "rotary"}),
    "softmax": ("softmax", WEIGHTS, {"attention": "unfused"}),
    "dropout": ("attention dropout", WEIGHTS, {"attention": "unfused", "attention_dropout": 0.1}),
    "loss": ("loss", LOGITS, {}),
}
"""Name of the planner's kernel, elements of one of its tensors, and the model that has it."""

COUNTED = {
    ("norm", "forward"): {"layer norm, forward, bf16 4096": 16 * 4096},
    ("norm", "backward_input"): {"rms norm, backward, bf16 4096": 32 * 4096},
    ("residual", "forward"): {"bias dropout residual bf16 8192": 16 * 8192},
    ("residual", "backward_input"): {"dropout backward bf16 8192": 16 * 8192},
    ("gelu", "forward"): {"bias gelu erf bf16 16384": 16 * 16384},
    ("gelu", "backward_input"): {"bias gelu tanh backward": 16 * 16384},
    ("swiglu", "forward"): {"swiglu bf16 14336": 16 * 14336},
    ("swiglu", "backward_input"): {"swiglu backward bf16 14336": 16 * 14336},
    ("rotary", "forward"): {"rotary torch.bfloat16 128": 2 * 16 * 32 * 128},
    ("rotary", "backward_input"): {"rotary torch.bfloat16 128": 2 * 16 * 32 * 128},
    ("softmax", "forward"): {"softmax, masked forward, bf16 512": 16 * 512},
    ("softmax", "backward_input"): {"softmax, backward, bf16 512": 16 * 512},
    ("dropout", "forward"): {"dropout of attention weights bf16": 24 * 4096},
    # Of a rank among others: the statistics, then the gradient in the logits' place.
    ("loss", "forward"): {"statistics bf16 12573": 3 * 12573, "gradient bf16 12573": 3 * 12573},
}
"""Phase of the planner's kernel -> the kernels that do its work, and elements of one of their tensors."""


def test_planned_bytes_are_counted_ones() -> None:
    names = [name for parts in COUNTED.values() for name in parts]
    compiled = compile_cases(names)
    for (kind, phase), parts in COUNTED.items():
        counted = sum(run(CASES[name], compiled[name]).distinct / (2 * elements) for name, elements in parts.items())
        name, elements, changes = PLANNED[kind]
        model = replace(SMALL, **changes)
        config = config_of(model, batch={"micro_size": 2})
        layer = model_layers(model)[-1 if kind == "loss" else 1]
        (time,) = (
            time
            for each, time in RooflineTimes(DEVICE).timed_kernels(config, layer)
            if (each.name, each.phase) == (name, phase)
        )
        planned = time.memory * DEVICE.reached_bandwidth / (2 * elements)
        assert planned == pytest.approx(counted, rel=1e-12), (kind, phase)
