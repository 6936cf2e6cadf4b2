"""Definition of "the same training run on another layout": bit for bit, or within the design's tolerances."""

from collections.abc import Mapping, Sequence

import pytest
import torch
from torch import Tensor

from tests.support.gpt_runs import RankRun, assembled


def check_bits(ranks: Sequence[RankRun], expected: RankRun) -> None:
    """Losses, norms, first gradients and final weights are those of one process, to the last bit (class A)."""
    for rank in ranks:
        assert [result.loss for result in rank.results] == [result.loss for result in expected.results]
        assert [result.gradient_norm for result in rank.results] == [r.gradient_norm for r in expected.results]
    for actual, wanted in (
        (assembled([rank.gradients for rank in ranks]), assembled([expected.gradients])),
        (assembled([rank.weights for rank in ranks]), assembled([expected.weights])),
    ):
        assert actual.keys() == wanted.keys()
        for name, tensor in wanted.items():
            assert torch.equal(actual[name], tensor), name


def check_close(ranks: Sequence[RankRun], expected: RankRun, first_loss: float) -> None:
    """All ranks report one loss, the first within `first_loss` (relative) of one process, the curve within 1e-4.

    Gradients as in `check_gradients`; copies of a weight on several ranks agree to the last bit.
    """
    losses = [result.loss for result in ranks[0].results]
    for rank in ranks:
        assert [result.loss for result in rank.results] == losses
    wanted = [result.loss for result in expected.results]
    assert losses[0] == pytest.approx(wanted[0], rel=first_loss)
    assert losses == pytest.approx(wanted, rel=1e-4)
    check_gradients(assembled([rank.gradients for rank in ranks]), assembled([expected.gradients]))
    assembled([rank.weights for rank in ranks])


def check_weights(ranks: Sequence[RankRun], expected: RankRun, share: float) -> None:
    """Each final weight is off by at most `share` of what all updates together may move it, root mean square.

    An update of AdamW moves a weight by its learning rate at most; the runs' peak is 5e-3.
    """
    actual, wanted = assembled([rank.weights for rank in ranks]), assembled([expected.weights])
    assert actual.keys() == wanted.keys()
    for name, tensor in wanted.items():
        off = float((actual[name].double() - tensor.double()).square().mean().sqrt())
        assert off <= share * 5e-3 * len(expected.results), f"{name}: off by {off:.3g}"


def check_gradients(
    actual: Mapping[str, Tensor], expected: Mapping[str, Tensor], own: float = 1e-5, layer: float = 1e-6
) -> None:
    """Each gradient within `own` of its own norm, or `layer` of its layer's, whichever is larger."""
    assert actual.keys() == expected.keys()
    layer_of = {
        name: ".".join(name.split(".")[:2]) if name.startswith("blocks") else name.split(".")[0] for name in actual
    }
    layer_norms: dict[str, float] = {}
    for name, gradient in expected.items():
        layer_norms[layer_of[name]] = layer_norms.get(layer_of[name], 0.0) + float(gradient.double().square().sum())
    for name, gradient in expected.items():
        allowed = max(own * float(gradient.double().norm()), layer * layer_norms[layer_of[name]] ** 0.5)
        difference = float((actual[name].double() - gradient.double()).norm())
        assert difference <= allowed, f"{name}: off by {difference:.3g}, allowed {allowed:.3g}"
