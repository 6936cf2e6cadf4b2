"""Effects of each kind of action on a rank of the interpreter."""

from __future__ import annotations

from megapipe.schedules import Action
from tests.schedules.interpreter_state import Broken, RankState
from tests.schedules.serial import first_holder, mix, states_of


class Rank(RankState):
    """One pipeline rank, running its program."""

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
