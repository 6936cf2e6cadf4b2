"""The table of 4B models of Yeung et al. (2024, arXiv 2411.05288): output layers of large vocabularies."""

from collections.abc import Iterator
from functools import cache
from typing import Final, NamedTuple

from megapipe.config.model import ModelConfig
from megapipe.planner.cost.estimate import Assumptions
from megapipe.planner.cost.model import predict
from tests.planner.cost.runs import SELENE, config_of, even_stages

PEAK: Final = 312e12
COLUMNS: Final = ("four blocks a stage", "equal work", "shared, variant 1", "shared, variant 2")


class Published(NamedTuple):
    """A row: thousands of tokens of a sample and of the vocabulary; MFU in percent and peak GB, by column."""

    sequence: int
    vocabulary: int
    speeds: tuple[float, float, float, float]
    memories: tuple[float, float, float, float]


ROWS: Final = (
    Published(2, 32, (47.5, 47.5, 53.1, 52.6), (16.0, 16.0, 16.6, 15.9)),
    Published(2, 128, (33.7, 44.1, 52.2, 52.0), (21.0, 21.0, 18.4, 17.6)),
    Published(2, 256, (17.3, 38.2, 51.7, 51.2), (35.6, 27.6, 19.4, 18.9)),
    Published(4, 128, (37.1, 49.6, 57.9, 57.4), (27.2, 27.2, 26.1, 24.6)),
)


@cache
def predicted(sequence: int, vocabulary: int) -> tuple[tuple[float, float], ...]:
    """Return MFU in percent and peak GB of each column."""
    model = ModelConfig(
        num_layers=32,
        hidden_size=3072,
        num_heads=24,
        vocabulary_size=vocabulary * 1024,
        max_positions=sequence * 1024,
        tie_embeddings=False,
        activation="gelu_tanh",
    )
    found = []
    even = even_stages(8, 32)
    for stages, ranks in ((even, "tensor"), (None, "tensor"), (even, "pipeline"), (even, "pipeline_2")):
        config = config_of(
            model,
            data={"sequence_length": sequence * 1024},
            parallel={"pipeline": 8, "layers_per_stage": stages, "vocabulary": ranks},
            batch={"global_size": 128, "micro_size": 1},
        )
        answer = predict(config, SELENE, assumptions=Assumptions(megatron_kernels=True)).estimate
        mfu = answer.model_flops / answer.step_seconds / answer.world_size / PEAK
        found.append((100 * mfu, answer.peak_bytes / 1e9))
    return tuple(found)


def vocabulary_lines() -> Iterator[str]:
    """Yield the table, as docs/cost_model.md has it."""
    yield f"| sequence, vocabulary | | {' | '.join(COLUMNS)} |"
    yield "|---|---" + "|---" * len(COLUMNS) + "|"
    for row in ROWS:
        told = (f"{speed:.1f} ({memory:.1f})" for speed, memory in zip(row.speeds, row.memories, strict=True))
        yield f"| {row.sequence}k, {row.vocabulary}k | published | {' | '.join(told)} |"
        model = (f"{speed:.1f} ({memory:.1f})" for speed, memory in predicted(row.sequence, row.vocabulary))
        yield f"| | model | {' | '.join(model)} |"
