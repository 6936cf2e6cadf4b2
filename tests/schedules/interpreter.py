"""An oracle for schedules: runs the actions symbolically, with blocking sends and physical buffers, knowing no rules.

Every value is a hash of what it was made from. A schedule is right when it ends in the weights that
``tests.schedules.serial`` computes in one process.
"""

from collections import defaultdict, deque

from megapipe.schedules import Action, Kind, Schedule
from tests.schedules.serial import Weights, first_holder, initial, mix, states_of


class Broken(Exception):
    """The schedule does something that no machine can do, or hangs."""


class Rank:
    """One pipeline rank: its program, weights and buffers with their current contents, and what actions do to them."""

    def __init__(self, world: "World", rank: int, program: list[Action]) -> None:
        self.world, self.rank, self.program, self.position = world, rank, program, 0
        header = world.schedule.header
        self.names: dict[tuple[int, int], tuple[str, int, int]] = {}
        for stage in header.stages_on(rank):
            for unit in header.state_units(stage):
                tied = header.tied_group(stage, unit)
                self.names[stage, unit] = (
                    ("tied", tied, 0) if tied >= 0 else ("unit", first_holder(header, stage), unit)
                )
        self.weights: Weights = {
            name: [initial(name)] * header.versions_per_stage[stage] for (stage, _), name in self.names.items()
        }
        self.slots: dict[tuple[str, int, int], int | None] = {}
        self.values: dict[tuple[str, int, int], int] = {}
        self.inputs: dict[tuple[int, int, int], int] = {}
        self.input_slot: dict[tuple[int, int], int] = {}
        self.halves: dict[tuple[int, int, int], int] = {}
        self.gradients: dict[tuple[object, ...], list[int]] = defaultdict(list)
        self.reduced: dict[tuple[object, ...], int] = {}
        self.started: dict[tuple[object, ...], int] = defaultdict(int)
        self.again: dict[tuple[int, int, int], int] = {}
        self.runs_again = {
            (action.stage, unit, action.microbatch)
            for action in program
            if action.kind == Kind.RECOMPUTE
            for unit in self.units(action)
        }
        self.whole_gradients: set[tuple[int, int, int]] = set()
        self.gathered: dict[tuple[int, int, int], int] = {}
        self.away: set[tuple[int, int, int]] = set()
        self.state_moves = any(a.kind in (Kind.OFFLOAD, Kind.RELOAD) and a.version >= 0 for a in program)
        self.states_here: set[tuple[int, int]] = set()
        self.meant_for: dict[tuple[tuple[object, ...], int], int] = {}

    def shared(self, stage: int) -> bool:
        """Whether another stage holds the same part of the model."""
        stages = self.world.schedule.header.stages
        return sum(place.part == stages[stage].part for place in stages) > 1

    def take(self, sort: str, action: Action) -> int | None:
        """The input or gradient that a chunk starts from; None where it has not arrived."""
        if action.slot >= 0:
            if (sort, action.stage, action.slot) not in self.slots:
                raise Broken(f"reads a slot that was never posted: {action}")
            return self.slots[sort, action.stage, action.slot]
        key = (sort, action.stage, action.microbatch)
        if key not in self.values:
            raise Broken(f"nothing to start from: {action}")
        return self.values.pop(key)

    def weight(self, stage: int, unit: int, version: int, needs_gather: bool = True) -> int:
        """Return the weights of a unit: its own, and the tied ones at the stage's first unit."""
        header = self.world.schedule.header
        states = states_of(header, stage, unit)
        names = [("unit", first_holder(header, stage), state) for state in states]
        if unit == 0:
            names += [("tied", group, 0) for group, uses in enumerate(header.tied_groups) if stage in uses]
        values = [self.weights[name][version % len(self.weights[name])] for name in names]
        for index, state in enumerate(states):
            if header.stage_states[stage][state].weights != "whole" and needs_gather:
                if (stage, state, version) not in self.gathered:
                    raise Broken(f"weights of state unit {state} of stage {stage} are not gathered")
                values[index] = self.gathered[stage, state, version]
        return mix(*values)

    def gather_weights(self, action: Action) -> bool:
        place = action.stage, action.unit, action.version
        states = self.world.schedule.header.stage_states
        if place in self.gathered or states[action.stage][action.unit].weights == "whole":
            raise Broken(f"nothing to gather: {action}")
        gathered = sum(states[stage][unit].size for stage, unit, _ in (*self.gathered, place))
        if gathered > self.world.schedule.header.states.weight_pool:
            raise Broken(f"no room: {action}")
        copies = self.weights["unit", first_holder(self.world.schedule.header, action.stage), action.unit]
        self.gathered[place] = copies[action.version % len(copies)]
        return True

    def release_weights(self, action: Action) -> bool:
        del self.gathered[action.stage, action.unit, action.version]
        return True

    def units(self, action: Action) -> list[int]:
        count = self.world.schedule.header.units_per_stage[action.stage]
        return list(range(count)) if action.unit < 0 else [action.unit]

    def offload(self, action: Action) -> bool:
        if action.version >= 0:
            self.states_here.remove((action.stage, action.unit))
            return True
        for unit in self.units(action):
            place = action.stage, unit, action.microbatch
            if place not in self.inputs or place in self.away or place in self.runs_again:
                raise Broken(f"nothing to move: {action}")
            self.away.add(place)
        return True

    def reload(self, action: Action) -> bool:
        if action.version >= 0:
            place = action.stage, action.unit
            if place in self.states_here or len(self.states_here) == 2:
                raise Broken(f"no room: {action}")
            self.states_here.add(place)
            return True
        for unit in self.units(action):
            self.away.remove((action.stage, unit, action.microbatch))
        return True

    def saved_input(self, stage: int, unit: int, microbatch: int) -> int:
        """Return the current input of a unit: a receive buffer may have been overwritten since the forward."""
        if (stage, unit, microbatch) not in self.inputs:
            raise Broken("backward without forward")
        if (stage, unit, microbatch) in self.away:
            raise Broken("its activations are in host memory")
        slot = self.input_slot[stage, microbatch]
        if unit == 0 and slot >= 0:
            return mix(self.slots["activation", stage, slot])
        return mix(self.inputs[stage, unit, microbatch])

    def step(self) -> bool:
        """Run the next action if it does not have to wait."""
        if self.position == len(self.program):
            return False
        action = self.program[self.position]
        if not getattr(self, action.kind.name.lower())(action):
            return False
        self.position += 1
        return True

    def forward(self, action: Action) -> bool:
        stage, microbatch, units = action.stage, action.microbatch, self.units(action)
        schedule = self.world.schedule
        if units[0] > 0:
            value = self.values.pop(("between", stage, microbatch), None)
            if value is None:
                raise Broken(f"no unit before: {action}")
        elif schedule.previous_stage(stage, microbatch) is None:
            value = mix("data", microbatch)
        else:
            value = self.take("activation", action)
            if value is None:
                return False
        if units[0] == 0:
            self.input_slot[stage, microbatch] = action.slot
        for unit in units:
            self.inputs[stage, unit, microbatch] = value
            value = mix("forward", self.weight(stage, unit, action.version), value)
        if units[-1] < schedule.header.units_per_stage[stage] - 1:
            self.values["between", stage, microbatch] = value
        else:
            self.hand_on("activation", stage, microbatch, schedule.next_stage(stage, microbatch), value)
        return True

    def recompute(self, action: Action) -> bool:
        for unit in self.units(action):
            place = action.stage, unit, action.microbatch
            if place not in self.inputs or place in self.again:
                raise Broken(f"no forward to run again: {action}")
            self.again[place] = self.weight(action.stage, unit, action.version)
        return True

    def hand_on(self, sort: str, stage: int, microbatch: int, target: int | None, value: int) -> None:
        if target is not None and self.world.schedule.rank_of(target) == self.rank:
            self.values[sort, target, microbatch] = value
        else:
            self.values["out " + sort, stage, microbatch] = value

    def backward(self, action: Action) -> bool:
        return self.backward_input(action, weights_too=True)

    def backward_input(self, action: Action, weights_too: bool = False) -> bool:
        stage, microbatch, units = action.stage, action.microbatch, self.units(action)[::-1]
        schedule = self.world.schedule
        if units[0] < schedule.header.units_per_stage[stage] - 1:
            gradient = self.values.pop(("back", stage, microbatch), None)
            if gradient is None:
                raise Broken(f"no gradient of the next unit: {action}")
        elif schedule.next_stage(stage, microbatch) is None:
            step = microbatch // schedule.header.num_microbatches
            counts = action._replace(microbatch=(step + 1) * schedule.header.num_microbatches - 1)
            if self.world.result(("counts",), self.collective(("counts",), counts)) is None:
                return False
            gradient = mix("loss", self.values.pop(("out activation", stage, microbatch), None))
        else:
            taken = self.take("gradient", action)
            if taken is None:
                return False
            gradient = taken
        for unit in units:
            saved = self.saved_input(stage, unit, microbatch)
            weight = self.weight(stage, unit, action.version)
            place = stage, unit, microbatch
            if place in self.runs_again and self.again.pop(place, None) != weight:
                raise Broken(f"did not run again on the same weights: {action}")
            self.halves[stage, unit, microbatch] = gradient
            if weights_too:
                self.add_gradients(stage, unit, microbatch, weight)
            gradient = mix("backward", weight, saved, gradient)
        if units[-1] > 0:
            self.values["back", stage, microbatch] = gradient
        else:
            self.hand_on("gradient", stage, microbatch, schedule.previous_stage(stage, microbatch), gradient)
        return True

    def backward_weight(self, action: Action) -> bool:
        for unit in self.units(action)[::-1]:
            weight = self.weight(action.stage, unit, action.version, needs_gather=False)
            self.add_gradients(action.stage, unit, action.microbatch, weight)
        return True

    def add_gradients(self, stage: int, unit: int, microbatch: int, weight: int) -> None:
        header = self.world.schedule.header
        if (stage, unit, microbatch) not in self.halves:
            raise Broken("weight half without input half")
        update = microbatch // header.microbatches_per_update
        gradient = self.halves.pop((stage, unit, microbatch))
        value = mix("dw", weight, self.saved_input(stage, unit, microbatch), gradient)
        buffer = update % header.gradient_buffers
        for state in states_of(header, stage, unit):
            self.gradients["unit", stage, state, buffer].append(mix(state, value))
            if header.stage_states[stage][state].sharded_gradients:
                self.whole_gradients.add((stage, state, buffer))
        gathered = sum(header.stage_states[each][state].size for each, state, _ in self.whole_gradients)
        if gathered > header.states.gradient_pool:
            raise Broken(f"no room for the gradients of unit {unit} of stage {stage}")
        if unit == 0:
            for group, uses in enumerate(header.tied_groups):
                if stage in uses:
                    self.gradients["use", group, stage, buffer].append(value)

    def send_activation(self, action: Action) -> bool:
        target = self.world.schedule.next_stage(action.stage, action.microbatch)
        return self.send("activation", action, target)

    def send_gradient(self, action: Action) -> bool:
        return self.send("gradient", action, self.world.schedule.previous_stage(action.stage, action.microbatch))

    def send(self, sort: str, action: Action, target: int | None) -> bool:
        key = ("out " + sort, action.stage, action.microbatch)
        if target is None or key not in self.values:
            raise Broken(f"nothing to send: {action}")
        posted = self.world.posted[self.rank, self.world.schedule.rank_of(target)]
        if not posted:
            return False  # rendezvous: the receive is not posted
        receiver, slot = posted.popleft()
        receiver.slots[slot] = self.values.pop(key)
        return True

    def recv_activation(self, action: Action) -> bool:
        return self.receive("activation", action, self.world.schedule.previous_stage(action.stage, action.microbatch))

    def recv_gradient(self, action: Action) -> bool:
        return self.receive("gradient", action, self.world.schedule.next_stage(action.stage, action.microbatch))

    def receive(self, sort: str, action: Action, source: int | None) -> bool:
        if source is None:
            raise Broken(f"no rank sends: {action}")
        slot = (sort, action.stage, action.slot)
        self.slots[slot] = None
        self.world.posted[self.world.schedule.rank_of(source), self.rank].append((self, slot))
        return True

    def buffer(self, action: Action) -> int:
        header = self.world.schedule.header
        return action.microbatch // header.microbatches_per_update % header.gradient_buffers

    def summed(self, key: tuple[object, ...]) -> int:
        values = self.gradients[key]
        return mix("sum", *(values if self.world.ordered else sorted(values)))

    def reduce_gradients(self, action: Action) -> bool:
        key = ("unit", action.stage, action.unit, self.buffer(action))
        if self.shared(action.stage):
            first = first_holder(self.world.schedule.header, action.stage)
            self.join(("shared", first, action.unit), action, {str(action.stage): self.summed(key)})
            return True
        self.reduced[key] = mix("reduced", self.summed(key))
        self.whole_gradients.discard((action.stage, action.unit, self.buffer(action)))
        return True

    def reduce_tied(self, action: Action) -> bool:
        header = self.world.schedule.header
        group = header.tied_group(action.stage, action.unit)
        buffer = self.buffer(action)
        uses = {
            str(stage): self.summed(("use", group, stage, buffer))
            for stage in header.tied_groups[group]
            if header.stages[stage].rank == self.rank
        }
        self.join(("tied", group), action, uses)
        return True

    def reduce_counts(self, action: Action) -> bool:
        self.join(("counts",), action, {})
        return True

    def reduce_scalars(self, action: Action) -> bool:
        """Norms over everything reduced on this rank; tied sums enter when they are there."""
        buffer = self.buffer(action)
        local: dict[str, object] = {}
        for (stage, unit), (sort, index, _) in self.names.items():
            summed = ("tied", index) if sort == "tied" else ("shared", index, unit)
            local[str((stage, unit))] = (
                (summed, self.collective(summed, action))
                if sort == "tied" or self.shared(stage)
                else self.plain_gradient(stage, unit, buffer)
            )
        self.join(("scalars",), action, local)
        return True

    def plain_gradient(self, stage: int, unit: int, buffer: int) -> int:
        key = ("unit", stage, unit, buffer)
        return self.reduced[key] if key in self.reduced else self.summed(key)

    def join(self, name: tuple[object, ...], action: Action, part: dict[str, object]) -> None:
        """Start a collective: the members' n-th starts meet, whatever they were meant for."""
        number = self.started[name]
        self.started[name] += 1
        self.meant_for[name, action.microbatch] = number
        self.world.collectives[name, number][self.rank] = part

    def collective(self, name: tuple[object, ...], action: Action) -> int:
        if (name, action.microbatch) not in self.meant_for:
            raise Broken(f"{name} was never started for {action}")
        return self.meant_for[name, action.microbatch]

    def update(self, action: Action) -> bool:
        header, buffer = self.world.schedule.header, self.buffer(action)
        if self.state_moves and (action.stage, action.unit) not in self.states_here:
            raise Broken(f"its state is in host memory: {action}")
        sort, index, _ = name = self.names[action.stage, action.unit]
        gradient: int | None
        if sort == "tied":
            gradient = self.world.result(("tied", index), self.collective(("tied", index), action))
        elif self.shared(action.stage):
            summed = ("shared", index, action.unit)
            gradient = self.world.result(summed, self.collective(summed, action))
        else:
            gradient = self.plain_gradient(action.stage, action.unit, buffer)
        scalars: int | None = 0
        if header.updates_per_step == 1:
            scalars = self.world.result(("scalars",), self.collective(("scalars",), action))
        if gradient is None or scalars is None:
            return False
        copies = self.weights[name]
        base = copies[(action.version - 1) % len(copies)]
        copies[action.version % len(copies)] = mix("update", base, gradient, scalars)
        self.reduced.pop(("unit", action.stage, action.unit, buffer), None)
        used: list[tuple[object, ...]] = [("unit", action.stage, action.unit, buffer)]
        if sort == "tied":
            used = [("use", index, stage, buffer) for stage in header.tied_groups[index]]
        for key in used:
            self.gradients.pop(key, None)
        return True


class World:
    """All ranks, their links and collectives."""

    def __init__(self, schedule: Schedule, steps: int, ordered: bool) -> None:
        self.schedule, self.ordered = schedule, ordered
        self.posted: dict[tuple[int, int], deque[tuple[Rank, tuple[str, int, int]]]] = defaultdict(deque)
        self.collectives: dict[tuple[tuple[object, ...], int], dict[int, dict[str, object]]] = defaultdict(dict)
        programs = schedule.expand(steps)
        self.ranks = [
            Rank(self, rank, [Action(Kind(row[0]), *row[1:]) for row in rows.tolist()])
            for rank, rows in enumerate(programs)
        ]

    def members(self, name: tuple[object, ...]) -> set[int]:
        header = self.schedule.header
        if name[0] == "tied":
            return {header.stages[stage].rank for stage in header.tied_groups[int(str(name[1]))]}
        if name[0] == "shared":
            return {place.rank for place in header.stages if place.part == header.stages[int(str(name[1]))].part}
        return set(range(header.num_ranks))

    def result(self, name: tuple[object, ...], number: int) -> int | None:
        """A collective's result, None until every member has started it."""
        parts = self.collectives[name, number]
        if set(parts) != self.members(name):
            return None
        values = []
        for key, value in sorted((key, value) for part in parts.values() for key, value in part.items()):
            resolved = self.result(*value) if isinstance(value, tuple) else value
            if resolved is None:
                return None
            values.append((key, resolved))
        return mix(name, *values)


def run(schedule: Schedule, steps: int, *, ordered: bool = True) -> Weights:
    """Weights after the steps; raises Broken where the schedule cannot run. ``ordered`` keeps the order of sums."""
    world = World(schedule, steps, ordered)
    moved = True
    while moved:
        moved = False
        for rank in world.ranks:
            while rank.step():
                moved = True
    if any(rank.position < len(rank.program) for rank in world.ranks):
        raise Broken("deadlock")
    if any(world.posted.values()):
        raise Broken("a receive was never served")
    weights: Weights = {}
    for rank in world.ranks:
        for name, copies in rank.weights.items():
            if weights.setdefault(name, copies) != copies:
                raise Broken(f"copies of {name} differ between ranks")
    return weights
