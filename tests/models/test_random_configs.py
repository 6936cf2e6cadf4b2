"""Random configurations of transformers' own classes: the same logits and gradients, or one line that refuses them.

tests/conversion/test_hugging_face_keys.py changes one key at a time.
"""

import pytest

from tests.models.random_configs import DRAWS, bases, keys_of, share_of

FAST = ("qwen2_moe",)


@pytest.mark.parametrize("model_type", bases())
def test_every_key_of_a_class_is_drawn_or_explained(model_type: str) -> None:
    known = keys_of(model_type)
    assert not known.unknown, "add a strategy to KEYS, or a reason to UNDRAWN"
    assert len(known.drawn) >= 9


@pytest.mark.parametrize("model_type", FAST)
def test_a_few_random_configurations_agree_or_are_refused(model_type: str) -> None:
    assert share_of(model_type, 6).agree > 0


@pytest.mark.exhaustive
@pytest.mark.parametrize("model_type", bases())
def test_four_in_five_random_configurations_train_alike(model_type: str) -> None:
    share = share_of(model_type, DRAWS)
    assert share.agree >= 0.8 * share.drawn >= 0.8 * DRAWS, share.refused
