"""The search by objective: speed on all devices, or what needs several searches."""

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from megapipe.config.errors import ConfigError
from megapipe.config.model import ModelConfig
from megapipe.config.progress import Report
from megapipe.config.run import PretrainConfig
from megapipe.layout.hardware.description import Hardware
from megapipe.planner.cost.assumptions import ENGINE, Assumptions
from megapipe.planner.cost.layer_times import LayerTimes
from megapipe.planner.search.family import family, members
from megapipe.planner.search.findings import Findings, NothingFits, Objective, Trial
from megapipe.planner.search.plan import QUICK, Effort, search_speed
from megapipe.planner.search.space import SearchSpace

MISSES = 3
"""Models in a row that do not fit, behind which no larger one is tried."""


def search(
    base: PretrainConfig,
    hardware: Hardware,
    devices: int,
    pinned: frozenset[str] = frozenset(),
    *,
    objective: Objective = "speed",
    space: SearchSpace | None = None,
    tokens: float | None = None,
    models: Sequence[tuple[str, ModelConfig]] = (),
    times: LayerTimes | None = None,
    effort: Effort | None = None,
    assumptions: Assumptions = ENGINE,
    report: Report = lambda share: None,
) -> Findings:
    """The best layouts of a run by an objective.

    base: all that layouts leave as it is. pinned: paths of fields that no layout may change, such as
    `parallel.tensor`. tokens: to train on, for the objective time. models: to choose from under the objective size,
    by default `family`. times: of layers, by default the slowest device's roofline. assumptions: as of `estimate`, for
    all that is compared. effort: of the search whose findings these are; those it is compared with take none beside
    finding the best.

    The objectives cost and time compare numbers of devices up to `devices` (`device_counts`), size compares models;
    the findings are those of the best one, with all of them in `trials`.

    Raises:
        ConfigError: fields that cannot be, no price or tokens where the objective needs them, no layout that can run.
        NothingFits: layouts can run and none fits.
    """
    if objective not in ("speed", "cost", "time", "size"):
        raise ConfigError(f"unknown objective {objective!r}; it must be one of speed, cost, time, size")
    if objective == "time" and (tokens is None or tokens <= 0):
        raise ConfigError("objective time needs the number of tokens to train on; set it, as in --tokens 300e9")
    if objective == "cost" and hardware.price_per_hour(devices) is None:
        raise ConfigError(
            f"objective cost needs prices, but hardware {hardware.name!r} has groups without price_per_hour; add it "
            "to the hardware file, or pass --price_per_hour"
        )
    started = time.perf_counter()
    speed = partial(search_speed, space=space, times=times, assumptions=assumptions)
    if objective == "speed":
        return speed(base, hardware, devices, pinned, effort=effort, report=report)
    trials: list[Trial] = []
    if objective == "size":
        chosen, count, trials = _largest(base, hardware, devices, pinned, models, speed)
    else:
        count, trials = _best_count(base, hardware, devices, pinned, objective, tokens or 0.0, speed)
        chosen = base
    found = speed(chosen, hardware, count, pinned, effort=effort, report=report)
    return replace(found, objective=objective, trials=tuple(trials), seconds=time.perf_counter() - started)


def device_counts(devices: int, hardware: Hardware) -> tuple[int, ...]:
    """Numbers of devices that are tried: powers of 2 and three times these, whole nodes above one node, and all."""
    node = hardware.nodes(1)[0].devices_per_node
    tried = {factor * 2**power for factor in (1, 3) for power in range(devices.bit_length())}
    return tuple(sorted({each for each in tried if each <= devices and (each <= node or not each % node)} | {devices}))


def _best_count(
    base: PretrainConfig,
    hardware: Hardware,
    devices: int,
    pinned: frozenset[str],
    objective: Objective,
    tokens: float,
    speed: Callable[..., Findings],
) -> tuple[int, list[Trial]]:
    """The number of devices of the least money or time, of equal ones the fewest."""
    trials, values = [], dict[int, float]()
    reason: ConfigError | None = None
    for count in device_counts(devices, hardware):
        name = f"{count} devices"
        try:
            found = speed(base, hardware, count, pinned, effort=QUICK).best
        except ConfigError as error:
            # What fits or divides fewer devices says nothing of more: the last one's reason is told if none works.
            reason = error
            trials.append(Trial(name, None, None))
            continue
        days = tokens / found.estimate.tokens_per_second / 86400.0
        values[count] = days if objective == "time" else found.price or 0.0
        trials.append(Trial(name, found, values[count]))
    if not values:
        assert reason is not None
        raise reason
    return min(values, key=lambda count: (values[count], count)), trials


def _largest(
    base: PretrainConfig,
    hardware: Hardware,
    devices: int,
    pinned: frozenset[str],
    models: Sequence[tuple[str, ModelConfig]],
    speed: Callable[..., Findings],
) -> tuple[PretrainConfig, int, list[Trial]]:
    """The run with the largest model that fits. A size that happens not to divide may miss where a larger one fits:
    the search ends behind `MISSES` misses in a row."""
    trials: list[Trial] = []
    chosen: PretrainConfig | None = None
    reason: ConfigError | None = None
    missed = 0
    for each in members(base, models) if models else family(base):
        config = replace(base, model=each.model)
        try:
            found = speed(config, hardware, devices, pinned, effort=QUICK).best
        except ConfigError as error:
            reason = reason or error
            trials.append(Trial(each.name, None, float(each.parameters)))
            missed += isinstance(error, NothingFits)
            if missed == MISSES:
                break
            continue
        missed, chosen = 0, config
        trials.append(Trial(each.name, found, float(each.parameters)))
    if chosen is None:
        assert reason is not None
        raise reason
    return chosen, devices, trials
