"""Slots for messages by formula, beside those that lowering allocates."""

import pytest

from megapipe.planner.cost.in_flight import most_held
from megapipe.planner.cost.message_slots import message_slots
from megapipe.schedules import build
from megapipe.schedules.generators.registry import find_generator

SCHEDULES = [
    ("gpipe", {}),
    ("1f1b", {}),
    ("interleaved_1f1b", {"chunks": 2}),
    ("interleaved_1f1b", {"chunks": 4}),
    ("modular", {"chunks": 2}),
    ("modular", {"chunks": 4}),
    ("zb_h1", {}),
    ("zb_h2", {}),
    ("zb_v", {}),
    ("zb_auto", {}),
    ("2bw", {}),
    ("pipedream", {}),
]


@pytest.mark.parametrize(("name", "options"), SCHEDULES, ids=str)
@pytest.mark.parametrize(("ranks", "microbatches"), [(2, 4), (2, 16), (4, 4), (4, 16), (8, 8), (8, 32)])
def test_the_formula_has_room_for_what_lowering_allocates(
    name: str, options: dict[str, int], ranks: int, microbatches: int
) -> None:
    generator = find_generator(name)
    chunks = generator.number_of_chunks(options)  # type: ignore[arg-type]
    header = build(
        name, ranks, microbatches, units_per_stage=[1] * ranks * chunks, data_parallel=False, **options
    ).header
    held = most_held(name, ranks, microbatches, chunks, options)  # type: ignore[arg-type]
    flushes = name not in ("2bw", "pipedream")
    last = len(header.stages) - 1
    for rank in range(ranks):
        exact = formula = 0
        for chunk, stage in enumerate(header.stages_on(rank)):
            slots = message_slots(
                name, held[rank], chunk, ranks, rank, microbatches, splits=generator.splits, flushes=flushes
            )
            if stage > 0 and header.stage_ranks[stage - 1] != rank:
                assert slots.activations >= header.activation_slots[stage] - 1
                exact, formula = exact + header.activation_slots[stage], formula + slots.activations
            if stage < last and header.stage_ranks[stage + 1] != rank:
                assert slots.gradients >= header.gradient_slots[stage] - 1
                exact, formula = exact + header.gradient_slots[stage], formula + slots.gradients
        assert formula >= 0.95 * exact - 1
        assert formula <= 1.35 * exact + chunks
