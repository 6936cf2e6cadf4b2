"""Galvatron's dynamic programming: a strategy for each layer of a stage, within memory, with transition costs.

Miao et al. (2022), arXiv 2211.13878, dynamic-programming search:
C(L, E) = min over S_j of [ min over S_i of ( C(L - 1, E - O(L, S_j)) + R(L, S_i, S_j) ) + c(L, S_j) ].
Beside the paper's memory O, that every layer keeps, stands what only the layer at hand needs and the next one reuses.
"""

from dataclasses import dataclass

import numpy as np

from megapipe.planner.checks import require_counts

Floats = np.ndarray[tuple[int, ...], np.dtype[np.float64]]


@dataclass(frozen=True)
class Choice:
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
                f"seconds must be of shape [layers, strategies], none of them 0, got {self.seconds.shape}"
            )
        shapes = {"kept": (layers, strategies), "working": (layers, strategies), "transitions": (strategies,) * 2}
        for name, shape in shapes.items():
            if getattr(self, name).shape != shape:
                raise ValueError(f"{name} must be of shape {list(shape)}, got {list(getattr(self, name).shape)}")
        for name, table in vars(self).items():
            if not (table >= 0).all():
                raise ValueError(f"{name} must not have negative values or NaN, got {table[~(table >= 0)][0]}")


def choose(tables: Tables, budget_bytes: float, units: int = 512) -> Choice | None:
    """The fastest strategies within the budget, None where none fit.

    Where the fastest of all does not fit, kept bytes are rounded up to `units` equal parts of what the budget leaves:
    the answer is never over it, exact where they are whole units, and leaves at most layers / units of it unused.

    Raises:
        ValueError: `units` below 1.
    """
    require_counts({"units": units})
    best: Choice | None = None
    nothing = np.zeros(tables.kept.shape, dtype=np.int64)
    for working in np.unique(tables.working[np.isfinite(tables.seconds)]):
        left = budget_bytes - working
        if left < 0:
            break
        seconds = np.where(tables.working <= working, tables.seconds, np.inf)
        picked = _within(seconds, nothing, tables.transitions, units=1)
        if picked is None or (best is not None and picked[1] >= best.seconds):
            continue  # not even without the bound of memory
        layers = np.arange(len(picked[0]))
        if tables.kept[layers, picked[0]].sum() > left:
            picked = _within(seconds, _in_units(tables.kept, left, units), tables.transitions, units)
        if picked is None or (best is not None and picked[1] >= best.seconds):
            continue
        memory = tables.kept[layers, picked[0]].sum() + tables.working[layers, picked[0]].max()
        best = Choice(tuple(picked[0]), picked[1], float(memory))
    return best


def _in_units(kept: Floats, left: float, units: int) -> np.ndarray[tuple[int, ...], np.dtype[np.int64]]:
    """Kept bytes in whole units, rounded up; more than all of them for what cannot fit."""
    if left == 0:
        return np.where(kept > 0, units + 1, 0).astype(np.int64)
    # A hair below the quotient, so that a whole number of units does not become one more by rounding.
    return np.minimum(np.ceil(kept / (left / units) * (1 - 1e-12)), units + 1).astype(np.int64)


def _within(
    seconds: Floats, kept: np.ndarray[tuple[int, ...], np.dtype[np.int64]], transitions: Floats, units: int
) -> tuple[list[int], float] | None:
    """The strategies and their seconds within so many units."""
    num_layers, num_strategies = seconds.shape
    # fastest[j, e]: seconds of the layers so far, the last of them under strategy j, in at most e units.
    fastest = np.full((num_strategies, units + 1), np.inf)
    came_from = np.zeros((num_layers, num_strategies, units + 1), dtype=np.int64)
    for layer in range(num_layers):
        following = np.full_like(fastest, np.inf)
        for strategy in range(num_strategies):
            need = int(kept[layer, strategy])
            if need > units or np.isinf(seconds[layer, strategy]):
                continue
            if layer == 0:
                following[strategy, need:] = seconds[layer, strategy]
                continue
            before = fastest[:, : units + 1 - need] + transitions[:, strategy, None]
            came_from[layer, strategy, need:] = before.argmin(axis=0)
            following[strategy, need:] = before.min(axis=0) + seconds[layer, strategy]
        fastest = following
    strategy, left = int(fastest[:, units].argmin()), units
    total = float(fastest[strategy, units])
    if np.isinf(total):
        return None
    picked = []
    for layer in range(num_layers - 1, -1, -1):
        picked.append(strategy)
        previous = int(came_from[layer, strategy, left])
        left -= int(kept[layer, strategy])
        strategy = previous
    return picked[::-1], total
