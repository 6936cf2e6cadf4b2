"""Tables of the differences between runs of every family on every layout and a plain loop over transformers.

The environment variable PARITY_FAMILIES, names separated by spaces, limits the runs; other rows stay as they are.
"""

import os
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path

from tests.distributed.parity import (
    LAYOUTS,
    TOLERANCES,
    Outcome,
    differences,
    family_cases,
    may_differ,
    refusal,
    run_layout,
    run_transformers,
    same_bits,
    written,
)
from tests.docs.figures import END, head, read, row, table
from tests.models.random_configs import bases, draws_of, keys_of, share_of

PAGE = "docs/parity.md"

BOUNDS = (1e-6, 1e-5, 1e-4, 1e-3)
Cells = dict[tuple[str, str, str], str]
"""(quantity, family, layout) -> text of a cell."""


@table(PAGE, "parity", tier="exhaustive")
def parity() -> Iterator[str]:
    """Yield a table for each quantity with a row for each family, and the lines of refusals."""
    before = known()
    chosen = os.environ.get("PARITY_FAMILIES", "").split() or list(family_cases())
    cells = {key: cell for key, cell in before.items() if key[1] not in chosen}
    refusals = known_refusals() if cells else []
    with tempfile.TemporaryDirectory() as folder:
        families = written(Path(folder), chosen)
        expected = run_transformers(families)
        alone: dict[str, Outcome] = {}
        for layout in LAYOUTS:
            refused = {family.model_type: line for family in families if (line := refusal(family.config, layout))}
            outcomes = run_layout(layout, [family for family in families if family.model_type not in refused])
            for name, line in refused.items():
                refusals += [line] if line not in refusals else []
                cells |= {(quantity, name, layout): f"refused ({refusals.index(line) + 1})" for quantity in TOLERANCES}
            alone = alone or outcomes
            for name, outcome in outcomes.items():
                assert may_differ(name, layout) or same_bits(outcome, alone[name]), f"{name} on {layout}: other bits"
                cells |= measured(name, layout, outcome, expected[name], before)
    for quantity in TOLERANCES:
        yield from ("", *head(quantity, *LAYOUTS))
        names = [name for name in family_cases() if (quantity, name, "one process") in cells]
        yield from (row(f"`{name}`", *(cells[quantity, name, layout] for layout in LAYOUTS)) for name in names)
    yield ""
    yield from (f"{number}. `{line}`" for number, line in enumerate(refusals, 1))


def measured(name: str, layout: str, actual: Outcome, expected: Outcome, before: Cells) -> Cells:
    """Return the cells of a run, which must be within the tolerances.

    A cell keeps its bound while that holds and is at most a hundred times too large: the differences are rounding, and
    vary between machines.
    """
    cells = Cells()
    for quantity, difference in differences(actual, expected).items():
        limit = TOLERANCES[quantity]
        assert difference <= limit, f"{name} on {layout}: {quantity} differ by {difference:.2g}, allowed {limit:g}"
        key = quantity, name, layout
        if quantity == "text":
            cells[key] = "same" if actual.text is not None else ""
            continue
        bounds = [bound for bound in BOUNDS if difference <= bound <= limit]
        old = [bound for bound in bounds if before.get(key) == written_bound(bound) and bound <= 100 * difference]
        # Half of a new bound, so that another machine is not above it.
        cells[key] = written_bound(*old or [next((bound for bound in bounds if 2 * difference <= bound), bounds[-1])])
    return cells


def written_bound(bound: float) -> str:
    """Return the text of a bound, such as < 1e-6."""
    return f"< {bound:.0e}".replace("e-0", "e-")


def known_refusals() -> list[str]:
    """Return the numbered messages on the page."""
    return re.findall(r"^\d+\. `(.*)`$", read(PAGE), re.MULTILINE)


def known() -> Cells:
    """Return the cells on the page. The page's other table, with other columns, comes after these."""
    cells, quantity = Cells(), ""
    for line in read(PAGE).partition(END)[0].splitlines():
        first, *others = (cell.strip() for cell in line.strip("|").split("|"))
        quantity = first if first in TOLERANCES else quantity
        if line.startswith("| `"):
            cells |= {(quantity, first.strip("`"), layout): each for layout, each in zip(LAYOUTS, others, strict=True)}
    return cells


@table(PAGE, "random configurations", tier="exhaustive")
def random_configurations() -> Iterator[str]:
    """Yield a row for every family: how many random configurations train as in transformers.

    Rows of the page stay, unless PARITY_FAMILIES names them: tests/models/test_random_configs.py compares them.
    """
    yield from head("family", "keys drawn", "draws", "same logits and gradients", "refused, for example", "not drawn")
    chosen = os.environ.get("PARITY_FAMILIES", "").split()
    before = dict(re.findall(r"^(\| `(?:[\w-]+)`) (\| \d+ \| \d+ \| \d+% \|.*)$", read(PAGE), re.MULTILINE))
    for name in bases():
        start = f"| `{name}`"
        yield f"{start} {before[start]}" if start in before and name not in chosen else shown_share(name)


def shown_share(name: str) -> str:
    """Return the row of a family."""
    known, share = keys_of(name), share_of(name, draws_of(name))
    line = min(share.refused, key=len, default="")
    reason = re.sub(r"^.*?(config\.json|cannot be used): ", "", line).split(",")[0].split(";")[0]
    undrawn = " ".join(f"`{key}`" for key in known.undrawn)
    return row(f"`{name}`", len(known.drawn), share.drawn, f"{share.agree / share.drawn:.0%}", reason, undrawn)
