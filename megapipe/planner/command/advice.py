"""What two other planners would do: Galvatron's, layer by layer, and PipeDream-2BW's own."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any

from megapipe.config.run import PretrainConfig
from megapipe.config.words import bytes_told, seconds_told
from megapipe.layout.hardware.description import Hardware
from megapipe.planner.command.arguments import Request


def advised(request: Request, config: PretrainConfig, hardware: Hardware, devices: int) -> dict[str, Any]:
    """The plans that flags ask for, by name, ready for JSON. Raises ConfigError where one finds nothing."""
    found = {}
    # Other planners are imported where they are asked.
    if request.flags["per_layer"]:
        from megapipe.planner.search.per_layer import per_layer

        found["per_layer"] = per_layer(config, hardware, devices)
    if request.flags["two_buffered"]:
        from megapipe.planner.search.two_buffered import two_buffered_plan

        found["two_buffered"] = two_buffered_plan(config, hardware, devices)
    return found


def print_advice(advice: Mapping[str, Any]) -> None:
    """In words."""
    if "per_layer" in advice:
        plan = advice["per_layer"]
        print(f"\n{plan['source']}: {seconds_told(plan['step_time_s'])} a step by its own model; {plan['note']}")
        for number, stage in enumerate(plan["stages"]):
            print(f"  stage {number}, {bytes_told(stage['memory_bytes'])}: {'; '.join(_runs(stage['layers']))}")
    if "two_buffered" in advice:
        plan = advice["two_buffered"]
        settings = " ".join(f"--{name} {_flag(value)}" for name, value in plan["settings"].items())
        print(
            f"\n{plan['source']}: depth {plan['depth']}, width {plan['width']}, micro-batch {plan['micro_size']}, "
            f"{bytes_told(plan['memory_bytes'])}, {seconds_told(plan['step_time_s'])} a step by its own model\n"
            f"  {settings}"
        )


def _runs(layers: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Neighbouring layers of one strategy together."""
    for strategy, members in groupby(layers, key=_strategy_told):
        names = [each["name"] for each in members]
        yield f"{names[0] if len(names) == 1 else f'{names[0]} to {names[-1]}'}: {strategy}"


def _strategy_told(layer: Mapping[str, Any]) -> str:
    degrees = (("data", "data"), ("sharded data", "sharded_data"), ("tensor", "tensor"))
    told = [f"{words} {layer[name]}" for words, name in degrees if layer[name] > 1]
    return ", ".join([*(told or ["one rank"]), *(["recompute"] if layer["recompute"] else [])])


def _flag(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else "null" if value is None else str(value)
