"""Training steps in one process, from the definition of the recursion, symbolically: every value is a hash."""

from collections import defaultdict

from megapipe.schedules import Header

Weights = dict[tuple[str, int, int], list[int]]  # (sort, stage or group, unit) -> physical copies


def mix(*parts: object) -> int:
    return hash(parts)


def initial(name: tuple[str, int, int]) -> int:
    return mix("initial", name)


def states_of(header: Header, stage: int, layer: int) -> list[int]:
    """The state units of a layer."""
    return [state for state, unit in enumerate(header.stage_states[stage]) if unit.layer == layer]


def first_holder(header: Header, stage: int) -> int:
    """The first stage with the same part of the model, whose number names its weights."""
    return next(other for other, place in enumerate(header.stages) if place.part == header.stages[stage].part)


def serial(header: Header, steps: int, *, ordered: bool = True) -> Weights:
    """The same steps in one process, one micro-batch after another, from the definition of the training recursion."""
    world = Serial(header, ordered)
    for update in range(steps * header.updates_per_step):
        world.step(update)
    return world.weights


class Serial:
    """One process that knows versions by their number alone: update k computes with version k."""

    def __init__(self, header: Header, ordered: bool) -> None:
        self.header, self.ordered = header, ordered
        self.weights: Weights = {}
        for stage in range(len(header.stages)):
            for unit in header.state_units(stage):
                tied = header.tied_group(stage, unit)
                name = ("tied", tied, 0) if tied >= 0 else ("unit", first_holder(header, stage), unit)
                self.weights[name] = [initial(name)] * header.versions_per_stage[stage]

    def weight(self, stage: int, unit: int, version: int) -> int:
        first = first_holder(self.header, stage)
        names = [("unit", first, state) for state in states_of(self.header, stage, unit)]
        if unit == 0:
            names += [("tied", group, 0) for group, uses in enumerate(self.header.tied_groups) if stage in uses]
        return mix(*(self.weights[name][version % len(self.weights[name])] for name in names))

    def step(self, update: int) -> None:
        header = self.header
        gradients: dict[tuple[object, ...], list[int]] = defaultdict(list)
        for microbatch in range(
            update * header.microbatches_per_update, (update + 1) * header.microbatches_per_update
        ):
            self.microbatch(microbatch, update, gradients)
        sums = {key: mix("sum", *(values if self.ordered else sorted(values))) for key, values in gradients.items()}
        reduced: dict[tuple[str, int, int], int] = {}
        for name in self.weights:
            sort, index, unit = name
            holders = [stage for stage in range(len(header.stages)) if first_holder(header, stage) == index]
            if sort == "unit" and len(holders) > 1:
                parts = sorted((str(stage), sums["unit", stage, unit]) for stage in holders)
                reduced[name] = mix(("shared", index, unit), *parts)
            elif sort == "unit":
                reduced[name] = (
                    mix("reduced", sums["unit", index, unit]) if header.data_parallel else sums["unit", index, unit]
                )
            else:
                uses = sorted((str(stage), sums["use", index, stage]) for stage in set(header.tied_groups[index]))
                reduced[name] = mix(("tied", index), *uses)
        scalars = self.scalars(reduced) if header.updates_per_step == 1 else 0
        for name, copies in self.weights.items():
            version = update + len(copies)
            copies[version % len(copies)] = mix("update", copies[(version - 1) % len(copies)], reduced[name], scalars)

    def scalars(self, reduced: dict[tuple[str, int, int], int]) -> int:
        parts = {}
        for stage in range(len(self.header.stages)):
            for unit in self.header.state_units(stage):
                tied = self.header.tied_group(stage, unit)
                parts[stage, unit] = (
                    reduced["tied", tied, 0] if tied >= 0 else reduced["unit", first_holder(self.header, stage), unit]
                )
        return mix(("scalars",), *sorted((str(key), value) for key, value in parts.items()))

    def microbatch(self, microbatch: int, version: int, gradients: dict[tuple[object, ...], list[int]]) -> None:
        header = self.header
        route = header.routes[microbatch % len(header.routes)]
        value, inputs = mix("data", microbatch), {}
        for stage in route:
            for unit in range(header.units_per_stage[stage]):
                inputs[stage, unit] = value
                value = mix("forward", self.weight(stage, unit, version), value)
        gradient = mix("loss", value)
        for stage in reversed(route):
            for unit in reversed(range(header.units_per_stage[stage])):
                weight, saved = self.weight(stage, unit, version), mix(inputs[stage, unit])
                contribution = mix("dw", weight, saved, gradient)
                for state in states_of(header, stage, unit):
                    gradients["unit", stage, state].append(mix(state, contribution))
                for group, uses in enumerate(header.tied_groups):
                    if unit == 0 and stage in uses:
                        gradients["use", group, stage].append(contribution)
                gradient = mix("backward", weight, saved, gradient)
