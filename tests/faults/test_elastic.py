"""A job that goes on with more or fewer replicas takes the same samples, in the same order and batches."""

from dataclasses import replace
from pathlib import Path

from megapipe.config.run import PretrainConfig
from megapipe.engine.step import StepInput
from megapipe.parallel.mesh import Mesh
from megapipe.training.loop.batches import open_loader, open_samples
from megapipe.training.loop.checkpoints import Checkpointer
from megapipe.training.loop.replica import Replica
from tests.support.gpt_runs import GPT2_SHAPE, make_config, write_shard
from tests.support.meshes import run_threads

STEPS_A_LIFE = 2


def life(mesh: Mesh, config: PretrainConfig) -> list[tuple[int, list[int], list[list[int]]]]:
    """Two steps from the last checkpoint on, and another checkpoint: step, this rank's samples, their tokens."""
    with Checkpointer(config, mesh, lambda line: None) as checkpointer:
        replica = Replica(config, mesh)
        run = checkpointer.restore(replica)
        step, consumed = (0, 0) if run is None else (run.step, run.consumed_samples)
        loader = open_loader(config, mesh, replica, open_samples(config, "train"))
        seen = []
        for _ in range(STEPS_A_LIFE):
            batch = loader.load(consumed)
            ordinals = [n for context in batch.contexts for n in context.ordinals.tolist()]  # type: ignore[union-attr]
            tokens = [row for context in batch.contexts for row in context.tokens.tolist()]  # type: ignore[union-attr]
            seen.append((step, ordinals, tokens))
            replica.engine.run(StepInput(step, batch.contexts, batch.token_counts, 1e-3))
            step, consumed = step + 1, consumed + batch.num_samples
        checkpointer.save(replica, step, consumed, [])
        return seen


def samples(config: PretrainConfig, replicas: list[int]) -> list[dict[int, list[int]]]:
    """Number of each sample -> its tokens, step by step, over runs with the given numbers of replicas."""
    tokens_by_step: dict[int, dict[int, list[int]]] = {}
    for data in replicas:
        sized = replace(config, parallel=replace(config.parallel, data=data))
        for rank in run_threads({"data": data}, life, sized):
            for step, ordinals, tokens in rank:
                taken = tokens_by_step.setdefault(step, {})
                assert not taken.keys() & set(ordinals), "two replicas took one sample"
                taken.update(zip(ordinals, tokens, strict=True))
    return [tokens_by_step[step] for step in sorted(tokens_by_step)]


def test_replicas_come_and_go(tmp_path: Path) -> None:
    config = make_config(write_shard(tmp_path), GPT2_SHAPE, checkpoint={"every": 1})
    resized, alone = (
        replace(config, training=replace(config.training, directory=str(tmp_path / name)))
        for name in ("resized", "alone")
    )
    expected = samples(alone, [1, 1, 1])
    assert [sorted(step) for step in expected] == [list(range(8 * step, 8 * step + 8)) for step in range(6)]
    assert samples(resized, [2, 1, 4]) == expected
