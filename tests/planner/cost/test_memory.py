"""Memory of a search, by walks that layouts share, compared with walks of every layer and micro-batch."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from megapipe.config import ConfigError
from megapipe.config.model import ModelConfig
from megapipe.config.parallel import ZeroConfig
from megapipe.config.run import PretrainConfig
from megapipe.layout.table import lowered_schedule
from megapipe.planner.cost.memory import rank_memories
from megapipe.planner.cost.model import exact_memories
from megapipe.planner.cost.run_layout import lay_run
from megapipe.schedules.registry import GENERATORS
from tests.planner.cost.runs import config_of, machine
from tests.schedules.support import TRAINED, fewest_microbatches

MODEL = ModelConfig(vocabulary_size=512, hidden_size=64, num_heads=4, max_positions=64)


MIXED = "dualpipe_v"
"""Splits only some backwards. A pair of its actions is one, in which a search takes each part's most bytes."""
EXACT = sorted({*TRAINED} - {MIXED, "seq1f1b"})
"""Slices are not planned."""


@st.composite
def configs(draw: st.DrawFn, names: Sequence[str] = EXACT) -> PretrainConfig:
    """Any schedule, with uneven stages, split backwards, ZeRO stages, recomputation and tensor ranks."""
    generator = GENERATORS[draw(st.sampled_from(names))]
    pipeline, data = draw(st.integers(1, 6)), draw(st.sampled_from([1, 2, 4]))
    chunks = draw(st.integers(2, 3)) if "chunks" in generator.order_options else generator.chunks
    layers, stages = pipeline * chunks + draw(st.integers(0, 8)), pipeline * chunks
    count = draw(st.integers(fewest_microbatches(generator.name, pipeline), 4 * pipeline + 5))
    schedule: dict[str, Any] = {"name": generator.name}
    if "chunks" in generator.order_options:
        schedule["chunks"] = chunks
    if generator.takes_two_bp:
        schedule["two_bp"] = draw(st.booleans())
    zero: dict[str, Any] = {"stage": draw(st.integers(0, 3)), "gradient_buffers": draw(st.integers(1, 3))}
    if zero["stage"] == 3:
        zero["weight_buffers"] = draw(st.integers(1, 3))
    if zero["stage"] and draw(st.booleans()):
        zero |= draw(st.sampled_from([{"reduce_dtype": "bf16"}, {"shard_size": 2}])) if data > 1 else {}
    parallel: dict[str, Any] = {"pipeline": pipeline, "data": data, "tensor": draw(st.sampled_from([1, 2]))}
    if draw(st.booleans()):
        cuts = sorted(draw(st.sets(st.integers(1, layers + 1), min_size=stages - 1, max_size=stages - 1)))
        bounds = zip([0, *cuts], [*cuts, layers + 2], strict=True)
        parallel["layers_per_stage"] = [end - start for start, end in bounds]
    method = draw(st.sampled_from(["none", "selective", "full"]))
    recompute = {"method": method} | ({"every": draw(st.integers(1, 3))} if method == "full" else {})
    return config_of(
        replace(MODEL, num_layers=layers, tie_embeddings=generator.name != "pipedream" and draw(st.booleans())),
        parallel=parallel,
        schedule=schedule,
        data={"sequence_length": 64},
        batch={"global_size": count * data},
        zero=zero,
        recompute=recompute,
        training={"precision": draw(st.sampled_from(["bf16", "fp32"]))},
        optimizer={"clip_norm": None},
    )


def check(config: PretrainConfig) -> None:
    """State, activations and buffers are exact. Where micro-batches, or the last one, pass stages layer by layer,
    receives may be posted earlier or later, for one message of a stage more or less. What a backward needs within it
    is at least the exact size, which knows which parts peak together."""
    try:
        run = lay_run(config, machine())
    except ConfigError:
        assume(False)
    by_layer = any(run.recomputed) or run.costs.replicas > 1
    for memory, exact in zip(
        rank_memories(run), exact_memories(run, lowered_schedule(run.config, run.stages)), strict=True
    ):
        for part in ("weights", "master", "gradients", "moments", "activations", "buffers"):
            assert getattr(memory, part) == getattr(exact, part), part
        assert memory.temporaries >= exact.temporaries
        difference = abs(memory.messages - exact.messages)
        assert difference <= (2 * run.chunks * run.costs.stream if by_layer else 0)


@settings(max_examples=60, deadline=None)
@given(config=configs())
def test_memory_of_a_search_equals_the_lowered_schedules(config: PretrainConfig) -> None:
    check(config)


@settings(max_examples=12, deadline=None)
@given(config=configs([MIXED]))
def test_whole_backwards_among_split_ones_count(config: PretrainConfig) -> None:
    run = lay_run(replace(config, zero=ZeroConfig()), machine())
    exact = exact_memories(run, lowered_schedule(run.config, run.stages))
    for memory, least in zip(rank_memories(run), exact, strict=True):
        assert memory.total >= least.total * (1 - 1e-3)


@pytest.mark.exhaustive
@settings(max_examples=1500, deadline=None)
@given(config=configs())
def test_memory_of_a_search_equals_many_lowered_schedules(config: PretrainConfig) -> None:
    check(config)
