"""Pictures of the loss curve of one run or of several."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from megapipe.training import metrics
from megapipe.training.metrics import LossHistory, smoothed
from megapipe.training.records import Listener
from megapipe.training.references import References

FILE_NAME = "loss_curve.png"

_TRAINING, _EVALUATION, _REFERENCE = "#1f6fb4", "#d9541e", "#8a8a8a"
_RUNS = (_TRAINING, _EVALUATION, "#3a8f3a", "#8a4fb0", "#b8860b", "#c2407e")

Curve = tuple[str, LossHistory, str, str]
"""Prefix of a run's labels, its losses, and the colours of its training and validation losses."""


class LossCurve(Listener):
    """Draws `loss_curve.png` in the run's folder at the end of a run, from all starts in its metrics file."""

    def __init__(self, directory: Path, references: References) -> None:
        self._directory = directory
        self._references = references

    def event(self, name: str, **fields: Any) -> None:
        if name == "end":
            history = metrics.read_losses(self._directory / metrics.FILE_NAME)
            draw_loss_curve(self._directory / FILE_NAME, history, self._references, title=self._directory.name)


def draw_loss_curve(path: Path, history: LossHistory, references: References, title: str) -> None:
    """Draw training and validation losses over steps, with both reference losses, to a PNG at `path`.

    Losses of steps that the run went back over are drawn faint and grey.
    """
    _draw(path, [("", history, _TRAINING, _EVALUATION)], references, title)


def draw_loss_curves(path: Path, runs: Mapping[str, LossHistory], references: References, title: str) -> None:
    """Draw several runs into one picture, each in one colour: training as a line, validation as points."""
    curves = []
    for index, (name, history) in enumerate(runs.items()):
        colour = _RUNS[index % len(_RUNS)]
        curves.append((f"{name}, ", history, colour, colour))
    _draw(path, curves, references, title)


def _draw(path: Path, runs: Sequence[Curve], references: References, title: str) -> None:
    # The import of matplotlib takes half a second, which only the end of a run spends.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for name, history, training, evaluation in runs:
        for losses_by_step in history.dropped:
            axes.plot(*zip(*sorted(losses_by_step.items()), strict=True), color=_REFERENCE, alpha=0.25, linewidth=0.8)
        steps = np.array(sorted(history.training))
        losses = np.array([history.training[step] for step in steps])
        if len(steps):
            axes.plot(steps, losses, color=training, alpha=0.25, linewidth=0.8)
            mean = smoothed(losses)
            axes.plot(steps, mean, color=training, linewidth=1.8, label=f"{name}training, {mean[-1]:.3f} at the end")
        if history.evaluation:
            points = sorted(history.evaluation.items())
            label = f"{name}validation, {points[-1][1]:.3f} at the end"
            axes.plot(*zip(*points, strict=True), "o-", color=evaluation, markersize=4, linewidth=1.2, label=label)
    with_pairs = "\n+ ln 2" if references.pairs else ""
    for loss, words in ((references.uniform, "ln(vocabulary)"), (references.unigram, "unigram\nentropy")):
        value = loss + references.pairs
        axes.axhline(value, color=_REFERENCE, linewidth=1, linestyle=(0, (4, 3)))
        axes.annotate(f"{words}{with_pairs}\n{value:.2f}", (1, value), (6, 0), xycoords=("axes fraction", "data"),
                      textcoords="offset points", color=_REFERENCE, fontsize=9, va="center")  # fmt: skip
    axes.set_title(title, loc="left", fontsize=11)
    axes.set_xlabel("step")
    axes.set_ylabel("loss (nats per token)")
    axes.margins(x=0.01)
    axes.grid(color="#e6e6e6", linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(frameon=False, loc="best")
    partial = path.with_name(f".{path.name}.partial")
    figure.savefig(partial, format="png")
    os.replace(partial, path)
