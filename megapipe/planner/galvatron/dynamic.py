"""Galvatron's dynamic programming: a strategy for each layer of a stage, within memory, with transition costs.

Miao et al. (2022), arXiv 2211.13878, dynamic-programming search:
C(L, E) = min over S_j of [ min over S_i of ( C(L - 1, E - O(L, S_j)) + R(L, S_i, S_j) ) + c(L, S_j) ].
Beside the paper's memory O, that every layer keeps, stands what only the layer at hand needs and the next one reuses.
"""

from dataclasses import dataclass

import numpy as np

from megapipe.planner.checks import require_counts

ROUNDING = 1e-9
"""Relative, by which sums of the same numbers in another order may differ at the most."""
Floats = np.ndarray[tuple[int, ...], np.dtype[np.float64]]
Counts = np.ndarray[tuple[int, ...], np.dtype[np.int64]]


@dataclass(frozen=True)
class LayerStrategies:
    """The strategy of each layer by its index, their seconds with transitions, and the bytes that they take."""

    strategies: tuple[int, ...]
    seconds: float
    memory_bytes: float


@dataclass(frozen=True)
class Tables:
    """Costs of every layer under every strategy; an endless number of seconds rules a strategy out.

    seconds: c, [layers, strategies]. kept: O, bytes that a layer keeps, [layers, strategies]. working: bytes that it
    needs while it runs, of which a stage needs the largest, [layers, strategies]. transitions: R, seconds from a
    strategy to another before the next layer, [strategies, strategies].
    Raises ValueError when shapes differ or a value is negative or not a number.
    """

    seconds: Floats
    kept: Floats
    working: Floats
    transitions: Floats

    def __post_init__(self) -> None:
        layers, strategies = self.seconds.shape if self.seconds.ndim == 2 else (0, 0)
        if not layers or not strategies:
            raise ValueError(
                f"seconds must have shape [layers, strategies] with both sizes above 0, got {self.seconds.shape}"
            )
        shapes = {"kept": (layers, strategies), "working": (layers, strategies), "transitions": (strategies,) * 2}
        for name, shape in shapes.items():
            if getattr(self, name).shape != shape:
                raise ValueError(f"{name} must have shape {list(shape)}, got {list(getattr(self, name).shape)}")
        for name, table in vars(self).items():
            if not (table >= 0).all():
                raise ValueError(f"{name} must not have negative values or NaN, got {table[~(table >= 0)][0]}")


def choose(
    tables: Tables, budget_bytes: float, units: int = 512, most: float = float("inf")
) -> LayerStrategies | None:
    """The fastest strategies within the budget, None where none fit in at most `most` seconds.

    Where the fastest of all does not fit, kept bytes are rounded up to `units` equal parts of what the budget leaves:
    the answer is never over it, exact where they are whole units, and leaves at most layers / units of it unused.

    Raises:
        ValueError: `units` below 1.
    """
    require_counts({"units": units})
    best: LayerStrategies | None = None
    nothing = np.zeros(tables.kept.shape, dtype=np.int64)
    classes = _classes(tables.transitions)
    for working in np.unique(tables.working[np.isfinite(tables.seconds)]):
        left = budget_bytes - working
        if left < 0:
            break
        seconds = np.where(tables.working <= working, tables.seconds, np.inf)
        if np.where(np.isfinite(seconds), tables.kept, np.inf).min(axis=1).sum() > left * (1 + ROUNDING):
            continue  # not even what keeps least of every layer
        least = seconds.min(axis=1).sum()
        if least * (1 - ROUNDING) > most or (best is not None and least >= best.seconds):
            continue  # not even with changes for nothing
        picked = _within(seconds, nothing, tables.transitions, classes, units=1)
        if picked is None or picked[1] > most or (best is not None and picked[1] >= best.seconds):
            continue  # not even without the bound of memory
        layers = np.arange(len(picked[0]))
        if tables.kept[layers, picked[0]].sum() > left:
            picked = _within(seconds, _in_units(tables.kept, left, units), tables.transitions, classes, units)
        if picked is None or picked[1] > most or (best is not None and picked[1] >= best.seconds):
            continue
        memory = tables.kept[layers, picked[0]].sum() + tables.working[layers, picked[0]].max()
        best = LayerStrategies(tuple(picked[0]), picked[1], float(memory))
    return best


def _in_units(kept: Floats, left: float, units: int) -> Counts:
    """Kept bytes in whole units, rounded up; more than all of them for what cannot fit."""
    if left == 0:
        return np.where(kept > 0, units + 1, 0).astype(np.int64)
    # A hair below the quotient, so that a whole number of units does not become one more by rounding.
    return np.minimum(np.ceil(kept / (left / units) * (1 - 1e-12)), units + 1).astype(np.int64)


def _within(
    seconds: Floats,
    kept: Counts,
    transitions: Floats,
    alike: tuple[Counts, Floats],
    units: int,
) -> tuple[list[int], float] | None:
    """The strategies and their seconds within so many units. alike: by `_classes`."""
    classes, between = alike
    num_layers, num_strategies = seconds.shape
    order = np.argsort(classes, kind="stable")
    first_of_class = np.searchsorted(classes[order], np.arange(len(between)))
    places = np.arange(units + 1)
    # fastest[l][j, e]: seconds of the layers up to l, which is under strategy j, in at most e units.
    fastest: list[Floats] = []
    for layer in range(num_layers):
        if layer == 0:
            before = np.zeros((num_strategies, units + 1))
        else:
            grouped = np.minimum.reduceat(fastest[-1][order], first_of_class, axis=0)
            before = (grouped[:, None] + between[:, :, None]).min(axis=0)[classes]
        left = places - kept[layer, :, None]
        spent = np.take_along_axis(before, np.maximum(left, 0), axis=1) + seconds[layer, :, None]
        fastest.append(np.where(left >= 0, spent, np.inf))
    strategy, left_units = int(fastest[-1][:, units].argmin()), units
    total = float(fastest[-1][strategy, units])
    if np.isinf(total):
        return None
    picked = [strategy]
    for layer in range(num_layers - 1, 0, -1):
        left_units -= int(kept[layer, strategy])
        strategy = int((fastest[layer - 1][:, left_units] + transitions[:, strategy]).argmin())
        picked.append(strategy)
    return picked[::-1], total


def _classes(transitions: Floats) -> tuple[Counts, Floats]:
    """Strategies from and to which all changes take the same, as one: the class of each, and seconds from class to
    class."""
    both = np.concatenate([transitions, transitions.T], axis=1)
    _, first, classes = np.unique(both, axis=0, return_index=True, return_inverse=True)
    return classes.reshape(-1), transitions[np.ix_(first, first)]
