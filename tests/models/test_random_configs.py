"""Random configurations of transformers' own classes: the same logits and gradients, or one line that refuses them.

tests/conversion/test_hugging_face_keys.py changes one key at a time.
"""

import re
from pathlib import Path

import pytest

from tests.models.random_configs import LEAST, bases, draws_of, keys_of, share_of

FAST = ("qwen2_moe",)
PAGE = Path(__file__).parents[2] / "docs/parity.md"


@pytest.mark.parametrize("model_type", bases())
def test_every_key_of_a_class_is_drawn_or_explained(model_type: str) -> None:
    known = keys_of(model_type)
    assert not known.unknown, "add a strategy to KEYS, or a reason to UNDRAWN"
    assert len(known.drawn) >= 9


@pytest.mark.parametrize("model_type", FAST)
def test_a_few_random_configurations_agree_or_are_refused(model_type: str) -> None:
    assert share_of(model_type, 3).agree > 0


@pytest.mark.exhaustive
@pytest.mark.parametrize("model_type", bases())
def test_random_configurations_train_alike_or_are_refused(model_type: str) -> None:
    share = share_of(model_type, draws_of(model_type))
    assert share.agree >= LEAST * share.drawn / 100, share.refused
    (shown,) = re.findall(rf"^\| `{model_type}` \| \d+ \| (\d+ \| \d+%) \|", PAGE.read_text(encoding="utf-8"), re.M)
    assert shown == f"{share.drawn} | {share.agree / share.drawn:.0%}"
