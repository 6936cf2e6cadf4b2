"""A job that goes on with more or fewer replicas takes the same samples, in the same order and batches."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from megapipe.config.run import PretrainConfig
from megapipe.training.loop.batches import BatchLoader
from megapipe.training.loop.loader import StepBatch
from tests.checkpoint.runs import config_in, run
from tests.support.gpt_runs import GPT2_SHAPE

STEPS_A_LIFE = 2


def samples(config: PretrainConfig, replicas: Sequence[int]) -> list[dict[int, list[int]]]:
    """Number of each sample -> its tokens, step by step, over runs with the given numbers of replicas."""
    load, loaded = BatchLoader.load, list[tuple[int, StepBatch]]()

    def recorded(loader: BatchLoader, consumed: int) -> StepBatch:
        batch = load(loader, consumed)
        loaded.append((consumed, batch))
        return batch

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(BatchLoader, "load", recorded)
        for life, data in enumerate(replicas, 1):
            run({"data": data}, config, life * STEPS_A_LIFE)
    tokens_by_step: dict[int, dict[int, list[int]]] = {}
    for consumed, batch in loaded:
        taken = tokens_by_step.setdefault(consumed, {})
        for context in batch.contexts:
            assert context.ordinals is not None
            assert context.tokens is not None
            ordinals = context.ordinals.tolist()
            assert not taken.keys() & set(ordinals), "two replicas took one sample"
            taken.update(zip(ordinals, context.tokens.tolist(), strict=True))
    return [tokens_by_step[consumed] for consumed in sorted(tokens_by_step)]


def test_replicas_come_and_go(tmp_path: Path, corpus: str) -> None:
    resized, alone = (config_in(tmp_path / name, corpus, GPT2_SHAPE) for name in ("resized", "alone"))
    expected = samples(alone, [1, 1, 1])
    assert [sorted(step) for step in expected] == [list(range(8 * step, 8 * step + 8)) for step in range(6)]
    assert samples(resized, [2, 1, 4]) == expected
