"""The numerical class that the order of a schedule can keep."""

from typing import NamedTuple

import numpy as np

from megapipe.schedules.errors import ScheduleError, excerpt
from megapipe.schedules.gathers import ADDING
from megapipe.schedules.schedule import NumericalClass
from megapipe.schedules.table import Table


class Promise(NamedTuple):
    """The strongest class of a schedule, and why it is not a stronger one ("" for A).

    A, the gradients of one process, needs one holder of each part of the model that adds micro-batches in their order,
    whole micro-batches, and one update per step of weights that a flush has brought up to date. B, those of the
    schedule's own serial recursion, needs the first two of these.
    """

    numerical_class: NumericalClass
    reason: str = ""

    @classmethod
    def of(cls, table: Table, *, flushes: bool) -> "Promise":
        """Return the promise of a schedule, unrolled over as many steps as it is checked for."""
        header = table.header
        parts = [place.part for place in header.stages]
        if len(set(parts)) < len(parts):
            part = max(parts, key=parts.count)
            stages = [stage for stage, each in enumerate(parts) if each == part]
            return cls("C", f"stages {', '.join(map(str, stages))} all hold part {part} of the model")
        if header.slices > 1:
            return cls("C", f"it computes samples in {header.slices} slices")
        row = first_reordered(table)
        if row >= 0:
            stage, microbatch = table.stage[row], table.microbatch[row]
            return cls(
                "C",
                f"stage {stage} adds the gradients of micro-batch {microbatch} after those of a later one, "
                f"on {table.place_of(row)}",
            )
        for stale, reason in (
            (not flushes, "its steps do not end with an empty pipeline"),
            (header.updates_per_step > 1, f"it updates {header.updates_per_step} times per step"),
            (header.num_versions > 1, f"it keeps {header.num_versions} versions of weights"),
        ):
            if stale:
                return cls("B", reason)
        return cls("A")

    def check(self, table: Table) -> None:
        """Raise ScheduleError if the header states a stronger class."""
        header, origin = table.header, table.origin
        if header.numerical_class >= self.numerical_class:
            return
        where, near, remedy = "", "", f"register it with class {self.numerical_class}"
        if origin is not None:
            number = origin.header["class"]
            where, near = f" ({origin.source}, line {number})", excerpt(origin.text, number)
            remedy = f"leave out that line, or write class {self.numerical_class}"
        raise ScheduleError(
            f"schedule {header.name} states class {header.numerical_class}{where}, but its order is of class "
            f"{self.numerical_class}, because {self.reason}: change the order, or {remedy}",
            near,
        )


def first_reordered(table: Table) -> int:
    """Return the first row that adds to a stage's gradients after a later micro-batch, -1 if there is none."""
    rows = table.rows_with(*ADDING)
    rows = rows[np.argsort(table.stage[rows], kind="stable")]
    same = table.stage[rows[1:]] == table.stage[rows[:-1]]
    late = rows[1:][same & (table.microbatch[rows[1:]] < table.microbatch[rows[:-1]])]
    return int(late.min()) if len(late) else -1
