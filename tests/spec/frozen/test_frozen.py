"""Compare sums over ops with values of 5,000 configurations from separate formulas, computed before ops existed.

They are equal but in eight places, where the ops agree with counted bytes (tests/spec/test_counted.py, and for what
exists only within an action tests/fake_cuda/test_peaks.py). In five of them the formulas were wrong: what a post-norm
BERT keeps when it recomputes its norms; and, between the halves of a split backward, the gradient of learned
positions, the scale of a GPT's loss (one number), copies of weights of norms that are recomputed, and what norms of
heads need. Embeddings gather under sequence parallelism in the other half of their backward. And an embedding no
longer keeps which tokens have their row on another rank, and weight halves (of GPTs, those of blocks and of further
tokens) free the tensors of each op before they continue.
"""

from collections.abc import Sequence
from itertools import islice
from pathlib import Path

import numpy as np
import pytest

from megapipe.config.bert import BertModelConfig
from megapipe.spec.attention import kv_copies
from tests.spec.frozen.sample import COUNT, SEQUENCE, Case, arrays, cases

OLD = np.load(Path(__file__).parent / "values.npz")
KEPT, PENDING, WEIGHT_HALF, HALVES = 0, 1, 4, slice(3, 5)
BLOCKS, ENDS = slice(1, 3), [0, -1]


def was_wrong(case: Case) -> bool:
    model = case.config.model
    post_norm = isinstance(model, BertModelConfig) and model.norm_position == "post"
    return post_norm and "norms" in recomputed(case)


def recomputed(case: Case) -> Sequence[str]:
    recompute = case.config.recompute
    return recompute.parts if recompute.method == "selective" else ()


@pytest.mark.parametrize(
    "count", [COUNT // 25, pytest.param(COUNT, marks=pytest.mark.exhaustive)], ids=["some", "all"]
)
def test_ops_add_up_to_the_frozen_values(count: int) -> None:
    new, old = arrays(count), {name: OLD[name] for name in OLD.files}
    expected = old["numbers"][:count].copy()
    chosen = list(islice(cases(), count))
    wrong = np.array([was_wrong(case) for case in chosen])
    assert wrong.any()
    assert not wrong.all()
    for column in (KEPT, PENDING):
        expected[wrong, BLOCKS, column] = new["numbers"][wrong, BLOCKS, column]
    for row, case in enumerate(chosen):
        config, model = case.config, case.config.model
        width = 4 if config.training.precision == "fp32" else 2
        tokens, micro_size = SEQUENCE // config.parallel.context, config.batch.micro_size
        own = tokens * model.hidden_size * width // config.parallel.sequence_shards
        bert = isinstance(model, BertModelConfig)
        alone = model.positions == "learned" and not config.data.isolate_documents
        summed = config.parallel.sequence and alone and not bert
        expected[row, 0, KEPT] -= micro_size * tokens if config.parallel.tensor > 1 else 0
        expected[row, 0, PENDING] += alone * own - summed * micro_size * own
        if "norms" in recomputed(case) and not was_wrong(case):
            expected[row, BLOCKS, PENDING] += 2 * width * model.hidden_size * (1 + model.norm_kind.centred)
        heads, keys = (count // config.parallel.tensor for count in (model.num_heads, model.kv_heads))
        context, exchanged = config.parallel.context, config.parallel.context_attention == "all_to_all"
        joint = context > 1 and not (exchanged and kv_copies(keys, heads // keys, context) > 1)
        gradients = keys if joint and model.positions != "rotary" else 0  # of the values
        normalised = (2 * heads + 3 * keys + gradients) * model.head_dim * width + (heads + keys) * 4
        expected[row, BLOCKS, PENDING] += (
            micro_size * tokens * normalised if model.qk_norm and not was_wrong(case) else 0
        )
        expected[row, -1, PENDING] += 0 if bert else 4
        sequence = config.parallel.sequence_shards > 1
        if not sequence and not recomputed(case):  # they gather and recompute
            assert (new["numbers"][row, BLOCKS, WEIGHT_HALF] <= expected[row, BLOCKS, WEIGHT_HALF]).all()
        if sequence:
            expected[row, 0, HALVES] = new["numbers"][row, 0, HALVES]
        if bert:
            assert (new["numbers"][row, ENDS, WEIGHT_HALF] <= expected[row, ENDS, WEIGHT_HALF]).all()
            expected[row, ENDS, WEIGHT_HALF] = new["numbers"][row, ENDS, WEIGHT_HALF]
    expected[:, BLOCKS, WEIGHT_HALF] = new["numbers"][:, BLOCKS, WEIGHT_HALF]
    assert np.array_equal(new["numbers"], expected)
    assert np.array_equal(new["checksums"], old["checksums"][:count])
    np.testing.assert_allclose(new["seconds"], old["seconds"][: len(new["seconds"])], rtol=1e-6)
