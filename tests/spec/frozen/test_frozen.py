"""Sums over ops beside values of 5,000 configurations that were computed by separate formulas, before ops existed.

They are equal but in three places, where the formulas were wrong and the ops agree with counted bytes
(tests/spec/test_counted_bytes.py): what a post-norm BERT keeps when it recomputes its norms, the gradient of learned
positions between the halves of a split backward, and the scale of a GPT's loss there, one number.
"""

from itertools import islice
from pathlib import Path

import numpy as np
import pytest

from megapipe.config.bert import BertModelConfig
from tests.spec.frozen.sample import COUNT, SEQUENCE, Case, arrays, cases

OLD = np.load(Path(__file__).parent / "values.npz")
KEPT, PENDING = 0, 1
BLOCKS = slice(1, 3)


def was_wrong(case: Case) -> bool:
    model, recompute = case.config.model, case.config.recompute
    post_norm = isinstance(model, BertModelConfig) and model.norm_position == "post"
    return post_norm and recompute.method == "selective" and "norms" in recompute.parts


@pytest.mark.parametrize(
    "chosen", [slice(0, COUNT, 25), pytest.param(slice(0, COUNT), marks=pytest.mark.slow)], ids=["some", "all"]
)
def test_ops_add_up_to_the_frozen_values(chosen: slice) -> None:
    numbers = range(COUNT)[chosen]
    new, old = arrays(chosen), {name: OLD[name] for name in OLD.files}
    expected = old["numbers"][chosen].copy()
    wrong = np.array([was_wrong(case) for case in islice(cases(), COUNT)])[chosen]
    assert wrong.any()
    assert not wrong.all()
    for column in (KEPT, PENDING):
        expected[wrong, BLOCKS, column] = new["numbers"][wrong, BLOCKS, column]
    for row, case in enumerate(list(islice(cases(), COUNT))[chosen]):
        config, model = case.config, case.config.model
        width = 4 if config.training.precision == "fp32" else 2
        own = SEQUENCE // config.parallel.context * model.hidden_size * width // config.parallel.sequence_shards
        learned, bert = model.positions == "learned", isinstance(model, BertModelConfig)
        summed = config.parallel.sequence and learned and not bert
        expected[row, 0, PENDING] += learned * own - summed * config.batch.micro_size * own
        expected[row, -1, PENDING] += 0 if bert else 4
    assert np.array_equal(new["numbers"], expected)
    assert np.array_equal(new["checksums"], old["checksums"][chosen])
    timed = [number // 10 for number in numbers if number % 10 == 0]
    np.testing.assert_allclose(new["seconds"], old["seconds"][timed], rtol=1e-6)
