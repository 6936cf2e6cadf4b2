"""A schedule as one self-contained page: zoom, hover, critical path, activation memory. No network, no library."""

from megapipe.schedules.drawing.bars import activation_curves, bars_of
from megapipe.schedules.drawing.document import Curves, Line, html_page
from megapipe.schedules.simulation.simulate import Simulation


def draw_html(simulation: Simulation) -> str:
    """The simulated run as an HTML document."""
    header = simulation.table.header
    bars = bars_of(simulation)
    figures = [
        ["first to last action", f"{simulation.finish:g}", "over all ranks: the length of the time axis"],
        ["longest rank", f"{simulation.makespan:g}", "from a rank's first forward to its last action (makespan)"],
        [
            "bubble from the first forward on",
            f"{simulation.bubble:.2%}",
            "its idle time over its work, without the first wait",
        ],
        [
            "idle from first to last action",
            f"{simulation.idle:.2%}",
            "all idle time of the busiest rank over its work",
        ],
        ["peak activations", f"{max(simulation.peak_activations):g}", "micro-batches on the fullest rank"],
        ["weight versions", f"{max(simulation.weight_versions)}", "copies of the weights a rank keeps"],
        ["class", header.numerical_class, "A: bit-equal to one process, B: to its own recursion, C: in tolerance"],
    ]
    return html_page(
        f"{header.name}, {header.num_ranks} ranks, {header.num_microbatches} micro-batches",
        figures,
        [Line(f"rank {rank}") for rank in range(header.num_ranks)],
        [(bar.rank, bar, "") for bar in bars],
        simulation.finish,
        Curves(
            "Activations alive on each rank, in micro-batches of the rank's layers",
            "micro-batches of activations alive",
            activation_curves(simulation),
            1.0,
        ),
    )
