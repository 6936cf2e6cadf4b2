"""The table of 4B models of Yeung et al. (2024, arXiv 2411.05288): output layers of large vocabularies."""

import math
from collections.abc import Iterator
from functools import cache
from typing import Final, NamedTuple

from megapipe.config.model import ModelConfig
from megapipe.planner.cost.estimate import Assumptions
from megapipe.planner.cost.model import predict
from tests.planner.cost.runs import SELENE, config_of, even_stages

PEAK: Final = 312e12
COLUMNS: Final = ("four blocks per stage", "equal work", "shared, variant 1", "shared, variant 2")


class Published(NamedTuple):
    """A row: thousands of tokens of a sample and of the vocabulary; MFU in percent and peak GB, by column."""

    sequence: int
    vocabulary: int
    speeds: tuple[float, float, float, float]
    memories: tuple[float, float, float, float]


ROWS: Final = (
    Published(2, 32, (47.5, 47.5, 53.1, 52.6), (16.0, 16.0, 16.6, 15.9)),
    Published(2, 64, (40.8, 49.2, 52.7, 52.4), (17.7, 17.7, 17.5, 16.6)),
    Published(2, 128, (33.7, 44.1, 52.2, 52.0), (21.0, 21.0, 18.4, 17.6)),
    Published(2, 256, (17.3, 38.2, 51.7, 51.2), (35.6, 27.6, 19.4, 18.9)),
    Published(4, 32, (52.8, 52.8, 58.5, 58.2), (22.2, 22.2, 25.0, 23.4)),
    Published(4, 64, (45.8, 53.8, 58.2, 57.9), (24.0, 24.0, 24.6, 23.1)),
    Published(4, 128, (37.1, 49.6, 57.9, 57.4), (27.2, 27.2, 26.1, 24.6)),
    Published(4, 256, (27.6, 42.5, 57.3, 56.6), (33.9, 33.7, 27.4, 26.3)),
)
LOGGED: Final = 100 * 80.72e12 / PEAK
"""MFU of 2k and 256k tokens with four blocks per stage by the authors' own log (artifact/test_one_host.csv of
sail-sg/VocabularyParallelism), whose stage times add up to it; the paper prints 17.3."""


def redistributed(sequence: int, vocabulary: int) -> tuple[int, ...]:
    """Return the blocks of the stages of equal work.

    The last stage has the output layer, and blocks up to an eighth of all FLOPs, rounded up; later stages get one more
    where the others' blocks do not divide evenly. The authors' log has these stages for 2k and 256k tokens. The
    paper does not print its rule; with another number of blocks on the last stage, rows would be off by 10% or more.
    """
    blocks, width = 32, 3072
    output = 1000 * vocabulary / (12 * width + 2 * 1024 * sequence)  # FLOPs, in those of a block
    last = max(0, math.ceil((blocks + output) / 8 - output))
    fewest, more = divmod(blocks - last, 7)
    return *(fewest + (stage >= 7 - more) for stage in range(7)), last


@cache
def predicted(sequence: int, vocabulary: int) -> tuple[tuple[float, float], ...]:
    """Return MFU in percent and peak GB of each column."""
    model = ModelConfig(
        num_layers=32,
        hidden_size=3072,
        num_heads=24,
        vocabulary_size=vocabulary * 1000,
        max_positions=sequence * 1024,
        tie_embeddings=False,
        activation="gelu_tanh",
    )
    rows = []
    even = even_stages(8, 32)
    first, *others, last = redistributed(sequence, vocabulary)
    balanced = [first + 1, *others, last + 1]  # the embedding and the head count as layers
    for stages, ranks in ((even, "tensor"), (balanced, "tensor"), (even, "pipeline"), (even, "pipeline_2")):
        config = config_of(
            model,
            data={"sequence_length": sequence * 1024},
            parallel={"pipeline": 8, "layers_per_stage": stages, "vocabulary": ranks},
            batch={"global_size": 128, "micro_size": 1},
        )
        answer = predict(config, SELENE, assumptions=Assumptions(megatron_kernels=True)).estimate
        mfu = answer.model_flops / answer.step_seconds / answer.world_size / PEAK
        rows.append((100 * mfu, answer.peak_bytes / 1e9))
    return tuple(rows)


def vocabulary_lines() -> Iterator[str]:
    """Yield the table, as docs/cost_model.md has it."""
    yield f"| sequence, vocabulary | | {' | '.join(COLUMNS)} |"
    yield "|---|---" + "|---" * len(COLUMNS) + "|"
    for row in ROWS:
        published = (f"{speed:.1f} ({memory:.1f})" for speed, memory in zip(row.speeds, row.memories, strict=True))
        yield f"| {row.sequence}k, {row.vocabulary}k | published | {' | '.join(published)} |"
        model = (f"{speed:.1f} ({memory:.1f})" for speed, memory in predicted(row.sequence, row.vocabulary))
        yield f"| | model | {' | '.join(model)} |"
