"""A block of any kind saves the bytes that its ops declare, and has the gradient of finite differences.

tests/docs/test_contributing.py adds an activation, a norm and an attention variant, and calls `check_block`.
"""

from typing import Any

import pytest
import torch
from torch import nn

from megapipe.config.model import ACTIVATIONS, NORMS, ModelConfig
from megapipe.spec.layers import model_layers
from tests.spec.counting import SEQUENCE, Subject
from tests.spec.sizes import predicted_bytes

SIZES: dict[str, Any] = {"vocabulary_size": 101, "num_layers": 1, "hidden_size": 64, "num_heads": 4}


def check_block(model: ModelConfig) -> nn.Module:
    """Count the bytes of a block, check its gradient, and return it."""
    block = model_layers(model)[1]
    for parts in ([], ["mlp"], ["norms"], ["mlp", "norms"]):
        measured = Subject(model, block, recompute=parts).saved()  # type: ignore[arg-type]
        assert measured == predicted_bytes(model, block, 3, SEQUENCE, "fp32", recompute=parts), parts  # type: ignore[arg-type]
    subject = Subject(model, block, 1, torch.float64)
    for number, parameter in enumerate(subject.module.parameters()):
        torch.nn.init.normal_(parameter, std=0.3, generator=torch.Generator().manual_seed(number))
    x = torch.randn(1, 4, 64, dtype=torch.float64, generator=torch.Generator().manual_seed(7), requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: subject.module(x, context=subject.batch)[0], x, fast_mode=True)
    return subject.module


@pytest.mark.parametrize(
    ("activation", "norm"),
    [
        pytest.param(activation, norm, marks=[] if (number - other) % len(NORMS) == 0 else pytest.mark.exhaustive)
        for number, activation in enumerate(ACTIVATIONS)
        for other, norm in enumerate(NORMS)
    ],
)
def test_bytes_and_gradient_of_every_kind(activation: Any, norm: Any) -> None:
    check_block(ModelConfig(**SIZES, activation=activation, normalization=norm))
