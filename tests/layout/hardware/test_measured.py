"""Measurements in hardware files: written and read back, and the errors of wrong sections."""

from typing import Any, get_args

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from megapipe.config import ConfigError
from megapipe.layout.hardware.description import (
    LAYER_KINDS,
    PRESETS,
    Contention,
    MeasuredCollective,
    MeasuredLayer,
    MeasuredWait,
    Transport,
    load_hardware,
    read_hardware,
    written,
)
from megapipe.spec.ops import Operation
from tests.planner.measured.machines import machine

SECONDS = st.floats(0.0, 1e3).map(lambda value: float(f"{value:.6g}"))
RATES = st.floats(1.0, 1e12).map(lambda value: float(f"{value:.6g}"))
COUNTS = st.integers(1, 64)
LAYERS = st.builds(MeasuredLayer, st.sampled_from(LAYER_KINDS), *[COUNTS] * 3, *[SECONDS] * 5)
WAITS = st.builds(MeasuredWait, st.sampled_from(LAYER_KINDS), *[COUNTS] * 3, *[SECONDS] * 4)
CONTENTION = st.lists(st.integers(2, 64), unique=True, max_size=3).map(
    lambda ranks: tuple(Contention(each, 1.0 + each / 8) for each in sorted({1, *ranks}))
)


@given(
    layers=st.lists(LAYERS, min_size=1, max_size=4).map(tuple),
    contention=CONTENTION,
    seconds=SECONDS,
    waits=st.lists(WAITS, max_size=3).map(tuple),
)
@settings(deadline=None, max_examples=40)
def test_a_machine_is_read_back_as_it_was_written(layers, contention, seconds, waits) -> None:  # type: ignore[no-untyped-def]
    hardware = machine(layers=layers, contention=contention, update_seconds=seconds, waits=waits)
    assert read_hardware(written(hardware, "two lines\nof remarks")) == hardware


@given(
    row=st.builds(
        MeasuredCollective, st.sampled_from(get_args(Operation)), COUNTS, st.sampled_from(get_args(Transport)),
        SECONDS, RATES, SECONDS,
    )
)  # fmt: skip
@settings(deadline=None, max_examples=40)
def test_a_row_of_a_link_is_read_back(row: MeasuredCollective) -> None:
    text = yaml.safe_load(written(machine()))
    text["groups"][0]["inside"]["collectives"] = [vars(row)]
    assert read_hardware(yaml.safe_dump(text)).groups[0].inside.collectives == (row,)


@pytest.mark.parametrize("name", PRESETS)
def test_presets_are_written_as_they_were_read(name: str) -> None:
    hardware = load_hardware(name)
    assert read_hardware(written(hardware)) == hardware


LAYER: tuple[Any, ...] = ("measured", "layers", 0)
RANKS: tuple[Any, ...] = ("measured", "contention")
CALL: tuple[Any, ...] = ("groups", 0, "inside", "collectives", 0)


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (("measured", "date"), "noon", "measured.date is 'noon', which is not a date: write it as 2026-01-31"),
        (("measured", "layers"), [], "measured.layers is not a list: write one or more `- ` items"),
        ((*LAYER, "kind"), "blok", "is blok, but must be one of embedding, block, head; did you mean 'block'?"),
        ((*LAYER, "forward"), -1, "measured.layers[0].forward is -1, but must be at least 0"),
        ((*LAYER, "speed"), 1, "measured.layers[0].speed is an unknown key"),
        ((*RANKS, 0, "ranks"), 3, "is for 3, 2, 4 ranks: write each number once, in ascending order"),
        ((*RANKS, 1, "factor"), 0, "measured.contention[1].factor is 0, but must be above 0"),
        (("measured", "action_seconds"), "quick", "action_seconds is quick, but must be a number of at least 0"),
        ((*CALL, "over"), "tcp", "is tcp, but must be one of gloo, shared_memory, nccl"),
        ((*CALL, "bandwidth"), 0, "bandwidth is 0, but must be above 0"),
    ],
)
def test_a_wrong_measurement_is_refused(path: tuple[Any, ...], value: object, message: str) -> None:
    root = place = yaml.safe_load(written(machine()))
    for step in path[:-1]:
        place = place[step]
    place[path[-1]] = value
    with pytest.raises(ConfigError) as caught:
        read_hardware(yaml.safe_dump(root), "machine.yaml")
    assert message in str(caught.value)
