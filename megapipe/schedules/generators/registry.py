"""What a generator is, and the names that they are known by."""

import difflib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from megapipe.schedules.errors import ScheduleError
from megapipe.schedules.generators.flush import gpipe, one_forward_one_backward
from megapipe.schedules.placements import Placement, linear
from megapipe.schedules.schedule import NumericalClass, Sections


@dataclass(frozen=True)
class Generator:
    """A named schedule: the pure function that orders its compute actions, where its stages live, what it promises.

    ``order`` takes ``(num_ranks, num_microbatches)`` and the options it declares.
    """

    name: str
    order: Callable[..., Sections]
    placement: Callable[..., Placement]
    numerical_class: NumericalClass

    def summary(self) -> str:
        """First line of the generator's documentation."""
        return (self.order.__doc__ or "").strip().splitlines()[0]

    def sections(self, num_ranks: int, num_microbatches: int, **options: Any) -> Sections:
        """The compute actions per rank, in order."""
        return self.order(num_ranks, num_microbatches, **options)


GENERATORS: dict[str, Generator] = {
    generator.name: generator
    for generator in (
        Generator("gpipe", gpipe, linear, "A"),
        Generator("1f1b", one_forward_one_backward, linear, "A"),
    )
}


def find_generator(name: str) -> Generator:
    """The generator of that name; raises ScheduleError with the nearest known name."""
    if name in GENERATORS:
        return GENERATORS[name]
    nearest = difflib.get_close_matches(name, GENERATORS, n=1, cutoff=0.4)
    hint = f"; did you mean {nearest[0]!r}?" if nearest else ""
    raise ScheduleError(f"unknown schedule {name!r}{hint} Known: {', '.join(GENERATORS)}")
