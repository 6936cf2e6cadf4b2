"""Runs on fake devices take every choice that the configuration offers, except those that no device sees."""

import dataclasses
import typing
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

from megapipe.config.bert import BertDataConfig, BertPretrainConfig
from tests.distributed.test_covering import CASES
from tests.fake_cuda import table, test_peaks
from tests.fake_cuda.options import OPTIONS, config_with
from tests.schedules.support import TRAINED
from tests.support.layouts import config_of

ON_THE_HOST = {
    "data": "samples are made on the host",
    "checkpoint": "when to save is decided on the host",
    "loss_scale": "the next scale is computed on the host; fp16 reads the same flag with either kind",
    "optimizer.decay": "the learning rate is a number of the host",
    "parallel.links": "fake ranks have NCCL's links alone",
    "parallel.device": "the device is always the fake one",
    "training.memory_check": "a check before the run",
}
"""Groups and fields whose choices change nothing on a device, and why."""
RESOLVED = {
    "training.precision": "auto",
    "recompute.method": "auto",
    "offload.activations": "auto",
    "schedule.update": "lazy",
}
"""Choices that a measurement or a default replaces before the model is built."""


def choices(kind: type, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Every value of every enumerated field."""
    hints = typing.get_type_hints(kind)
    for field in dataclasses.fields(kind):
        hint, name = hints[field.name], prefix + field.name
        if dataclasses.is_dataclass(hint):
            yield from choices(typing.cast(type, hint), f"{name}.")
            continue
        inner = [hint, *typing.get_args(hint)]
        for each in [*inner, *(part for part in inner for part in typing.get_args(part))]:
            if typing.get_origin(each) is typing.Literal:
                yield from ((name, value) for value in typing.get_args(each))


def flat(config: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Every field's value, those of lists one by one."""
    for field in dataclasses.fields(config):
        value, name = getattr(config, field.name), prefix + field.name
        if dataclasses.is_dataclass(value):
            yield from flat(value, f"{name}.")
        else:
            yield from ((name, each) for each in (value if isinstance(value, list) else [value]))


def test_every_choice_runs_on_a_fake_device() -> None:
    corpora = "shard", BertDataConfig(prefix="shard")
    configs = [config_of(case, *corpora) for case in CASES]
    configs += [config_with(name, *corpora) for name in OPTIONS]
    for name, (model, changes) in test_peaks.CASES.items():
        table.MODELS[name] = model
        configs.append(table.config_of("shard", name, changes))
        del table.MODELS[name]
    taken = defaultdict(set)
    for config in configs:
        for name, value in flat(config):
            taken[name].add(str(value))
    missing = {
        (name, value)
        for name, value in (*choices(BertPretrainConfig), *(("schedule.name", each) for each in TRAINED))
        if str(value) not in taken[name]
        and RESOLVED.get(name) != value
        and not any(name == part or name.startswith(f"{part}.") for part in ON_THE_HOST)
    }
    assert sorted(missing) == []
