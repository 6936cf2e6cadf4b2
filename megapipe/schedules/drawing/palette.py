"""One palette for all drawings: a colour a kind, lighter for later chunks of a rank."""

from typing import Final

from megapipe.schedules.actions import Kind

FILLS: Final[dict[Kind, tuple[str, ...]]] = {
    Kind.FORWARD: ("#3b7dd8", "#6ea3e8", "#9cc3f2", "#c5dcf8"),
    Kind.BACKWARD: ("#e08a1e", "#eeab57", "#f5c98d", "#fae3c0"),
    Kind.BACKWARD_INPUT: ("#e08a1e", "#eeab57", "#f5c98d", "#fae3c0"),
    Kind.BACKWARD_WEIGHT: ("#3f9c6c", "#6fba92", "#9bd3b5", "#c6e7d5"),
    Kind.RECOMPUTE: ("#8b93a1",),
    Kind.UPDATE: ("#8657c4",),
    Kind.SEND_ACTIVATION: ("#7fa9dc",),
    Kind.SEND_GRADIENT: ("#e9b872",),
    Kind.GATHER_WEIGHTS: ("#5fb3b3",),
    Kind.REDUCE_GRADIENTS: ("#b26bb5",),
    Kind.REDUCE_TIED: ("#b26bb5",),
    Kind.REDUCE_SCALARS: ("#c9a3d6",),
    Kind.OFFLOAD: ("#a8894f",),
    Kind.RELOAD: ("#cdb587",),
}
NAMES: Final[dict[Kind, str]] = {
    Kind.FORWARD: "forward",
    Kind.BACKWARD: "backward",
    Kind.BACKWARD_INPUT: "backward, input half",
    Kind.BACKWARD_WEIGHT: "backward, weight half",
    Kind.RECOMPUTE: "recompute",
    Kind.UPDATE: "update",
    Kind.SEND_ACTIVATION: "send activation",
    Kind.SEND_GRADIENT: "send gradient",
    Kind.GATHER_WEIGHTS: "gather weights",
    Kind.REDUCE_GRADIENTS: "reduce gradients",
    Kind.REDUCE_TIED: "reduce tied weight",
    Kind.REDUCE_SCALARS: "reduce scalars",
    Kind.OFFLOAD: "offload",
    Kind.RELOAD: "reload",
}


def fill(kind: Kind, chunk: int) -> str:
    """Colour of an action."""
    shades = FILLS[kind]
    return shades[min(chunk, len(shades) - 1)]


def ink(colour: str) -> str:
    """Black or white, whichever reads better on a colour."""
    red, green, blue = (int(colour[start : start + 2], 16) for start in (1, 3, 5))
    return "#ffffff" if 0.299 * red + 0.587 * green + 0.114 * blue < 150 else "#1d2430"
