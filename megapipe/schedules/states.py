"""State units: the weights of a layer, or of a part of it, that are gathered, reduced and updated together."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Final, Literal, NamedTuple

from megapipe.schedules.errors import ScheduleError

WeightHome = Literal["whole", "sharded", "host"]
"""Where weights are between their uses: whole on every replica, sharded over replicas, or in host memory."""


MOST_UNITS: Final = 4_000_000
"""Maximum number of units of all stages of a schedule: more would take gigabytes of memory."""


class StateUnit(NamedTuple):
    """One state unit of a stage.

    layer: the unit of the stage's compute that uses it. weights: where its weights are between their uses; those that
    are not whole are gathered before each use and released after it. sharded_gradients: whether its gradients are
    reduced into shards. size: the part of a pool that its whole weights, or its whole gradients, take. shards: number
    of neighbouring replicas that share one copy of it; 0 if that is the same as for other units of the run.
    """

    layer: int
    weights: WeightHome = "whole"
    sharded_gradients: bool = False
    size: int = 1
    shards: int = 0


@dataclass(frozen=True)
class StateTable:
    """The state units of every stage, and how much of them a rank may hold whole at once.

    units: per stage, in the order of their layers; empty if each layer is one unit that is kept whole.
    weight_pool: maximum total size of the units whose weights a rank may hold gathered at once. gradient_pool: the
    same for sharded gradients that are not reduced yet, or are being reduced. With sizes of 1, both are numbers of
    units.
    """

    units: tuple[tuple[StateUnit, ...], ...] = ()
    weight_pool: int = 0
    gradient_pool: int = 0

    @classmethod
    def uniform(
        cls,
        layers_per_stage: Sequence[int],
        *,
        weight_pool: int = 0,
        gradient_pool: int = 0,
        weights: WeightHome = "sharded",
        zero: Sequence[Sequence[int]] = (),
    ) -> "StateTable":
        """Return the table in which each layer is one unit of size 1.

        weight_pool, gradient_pool: numbers of units; 0 keeps weights, or gradients, whole. weights: their home if
        weight_pool is not 0. zero: by stage, the ZeRO stage of each layer, 3 by default; weights are sharded if it is
        3, and gradients from 2.
        """
        check_number(sum(layers_per_stage))
        if not (weight_pool or gradient_pool):
            return cls()
        home: WeightHome = weights if weight_pool else "whole"
        units = tuple(
            tuple(
                StateUnit(layer, home if limit >= 3 else "whole", gradient_pool > 0 and limit >= 2)
                for layer, limit in enumerate(limits)
            )
            for limits in zero or [(3,) * layers for layers in layers_per_stage]
        )
        return cls(units, weight_pool, gradient_pool)

    def checked(self, name: str, layers_per_stage: Sequence[int]) -> "StateTable":
        """Return the table, without its units if each layer is one whole unit; raise ScheduleError if it does not fit
        the stages.

        name: of the schedule, for errors.
        """
        check_number(sum(layers_per_stage))
        for pool, size in (("weight_pool", self.weight_pool), ("gradient_pool", self.gradient_pool)):
            if size < 0:
                raise ScheduleError(f"{name}: {pool} is {size}; it must be at least 0")
        if self.units and len(self.units) != len(layers_per_stage):
            raise ScheduleError(f"{name} has state units of {len(self.units)} stages, but has {len(layers_per_stage)}")
        for stage, (units, layers) in enumerate(zip(self.units, layers_per_stage, strict=False)):
            used = [unit.layer for unit in units]
            if used != sorted(used) or set(used) != set(range(layers)):
                raise ScheduleError(
                    f"{name}: the state units of stage {stage} are of layers {used}; "
                    f"they must be in the order of its {layers} layers and leave none out"
                )
            for layer, layer_units in groupby(units, lambda unit: unit.layer):
                self._check_room(f"{name}: layer {layer} of stage {stage}", list(layer_units))
        return self if self.units != whole_units(layers_per_stage) else replace(self, units=())

    def _check_room(self, what: str, units: Sequence[StateUnit]) -> None:
        """Raise ScheduleError unless everything that a layer computes with fits into the pools at one time."""
        for pool, of, used in (
            ("weight_pool", "weights", [unit.size for unit in units if unit.weights != "whole"]),
            ("gradient_pool", "gradients", [unit.size for unit in units if unit.sharded_gradients]),
        ):
            needed, room = max(1, sum(used)), getattr(self, pool)
            if used and needed > room:
                raise ScheduleError(
                    f"{what} needs {needed} of the {pool} for its whole {of}, but the pool is {room}; make it larger"
                )


WHOLE_STATES: Final = StateTable()
"""Each layer is one unit that is kept whole."""


def check_number(num_units: int) -> None:
    """Raise ScheduleError if there are more units than `MOST_UNITS`. num_units: of all stages."""
    if num_units > MOST_UNITS:
        raise ScheduleError(f"the stages have {num_units:,} units (layers); the maximum is {MOST_UNITS:,}: use fewer")


def whole_units(layers_per_stage: Sequence[int]) -> tuple[tuple[StateUnit, ...], ...]:
    """Return one unit for each layer, kept whole."""
    return tuple(tuple(StateUnit(layer) for layer in range(layers)) for layers in layers_per_stage)
