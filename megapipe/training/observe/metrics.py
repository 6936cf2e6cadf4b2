"""The files of a run's folder that other programs read: metrics.jsonl, run.json and the picture of the loss curve.

metrics.jsonl has every step, evaluation and event of all starts of a run, one JSON object per line. The file is only
appended to, line by line, so that no start destroys the lines of an earlier one, and a killed run keeps all lines up
to its last step.
"""

import json
import math
import os
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypeGuard

import numpy as np

from megapipe.config.files import decode_json, no_constant
from megapipe.training.observe.records import EvaluationRecord, LineFile, Listener, StepRecord

METRICS = "metrics.jsonl"
_LONGEST_LINE = 1 << 24
LARGEST = 1e100
"""Larger numbers in a metrics file are not read."""


class MetricsFile(LineFile, Listener):
    """Writes `metrics.jsonl` in the run's folder.

    A step's line has the fields of StepRecord; other lines have `event`: start (with `run`, the id of this start, and
    `step`, the step that it continues from), evaluation (with the fields of EvaluationRecord), checkpoint, rewind
    (with `step`, the step that a spike made the run return to), skipped_samples, other_data (with `step`, the last
    step on the previous data), ranks and save_wait (see records.py), end, failed. Numbers that are not finite become
    null, because JSON has no such values. All lines between one start and the next belong to the first one.
    """

    def __init__(self, directory: Path) -> None:
        super().__init__(directory / METRICS)

    def event(self, name: str, **fields: Any) -> None:
        """Write a line with the name of the event, the time and the fields."""
        self._record({"event": name, "time": time.time(), **fields})

    def step(self, record: StepRecord) -> None:
        self._record(asdict(record))

    def evaluation(self, record: EvaluationRecord) -> None:
        self.event("evaluation", **asdict(record))

    def _record(self, record: dict[str, Any]) -> None:
        self.write(json.dumps(finite(record)))


def finite(value: Any) -> Any:
    """Return a value for JSON, in which numbers that are not finite are None."""
    if isinstance(value, dict):
        return {name: finite(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return [finite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


@dataclass
class LossHistory:
    """Finite losses by step. training[s]: loss of step s. evaluation[s]: loss after s steps.

    dropped: training losses by step that did not lead to the newest weights, because the run returned to a checkpoint;
    oldest first.
    """

    training: dict[int, float] = field(default_factory=dict)
    evaluation: dict[int, float] = field(default_factory=dict)
    dropped: list[dict[int, float]] = field(default_factory=list)

    _latest: int = 0

    def add(self, record: Mapping[str, Any]) -> int | None:
        """Add a record of a metrics file. Return the step that the run went back to before it, if it did."""
        event, step, loss = record.get("event"), count_in(record, "step"), record.get("loss")
        if step is None:
            return None
        returned = None
        if event in ("start", "rewind"):
            self.drop_after(step)
            self._latest = returned = step
        elif event == "evaluation" and is_number(loss):
            self.evaluation[step] = float(loss)
        elif event is None:
            if step <= self._latest:  # the line of the `start` event before it is lost
                returned = step - 1
                self.drop_after(returned)
            self._latest = step
            if is_number(loss):
                self.training[step] = float(loss)
        return returned

    def drop_after(self, step: int) -> None:
        """Move the losses after `step` to `dropped`, because the run continues from `step`."""
        rewound = {s: loss for s, loss in self.training.items() if s > step}
        if rewound:
            self.dropped.append(rewound)
        self.training = {s: loss for s, loss in self.training.items() if s <= step}
        self.evaluation = {s: loss for s, loss in self.evaluation.items() if s <= step}


def smoothed(values: np.ndarray) -> np.ndarray:
    """Return the running mean, float64 [n], over a centred window of a fiftieth of the run, narrower at the ends."""
    reach = max(1, len(values) // 100)
    sums = np.concatenate([[0.0], np.cumsum(values)])
    places = np.arange(len(values))
    starts, stops = np.maximum(places - reach, 0), np.minimum(places + reach + 1, len(values))
    return (sums[stops] - sums[starts]) / (stops - starts)


def read_losses(path: Path) -> LossHistory:
    """Return the losses that led to the newest weights, over all starts in a metrics file.

    Lines without a complete record, such as the last line of a killed process, are skipped. Raises OSError.
    """
    history = LossHistory()
    for record in read_records(path):
        if record is not None:
            history.add(record)
    return history


def read_records(path: Path) -> Iterator[dict[str, Any] | None]:
    """Yield the record of each line of a metrics file, None for a line that is damaged.

    An incomplete last line is skipped: the run is writing it, or was killed. Values are not checked. Raises OSError.
    """
    decode = json.JSONDecoder(parse_constant=no_constant).decode
    with path.open("rb") as file:
        while line := file.readline(_LONGEST_LINE):
            try:
                record = decode(line.decode("utf-8"))
            except (ValueError, RecursionError):
                record = None
            if isinstance(record, dict):
                yield record
            elif line.endswith(b"\n") or len(line) == _LONGEST_LINE:
                yield None


def count_in(record: Mapping[str, Any], name: str) -> int | None:
    """Return a value of a record if it is a whole number from 0 to `LARGEST`, otherwise None."""
    value = record.get(name)
    return value if type(value) is int and 0 <= value < LARGEST else None


def is_number(value: Any) -> TypeGuard[int | float]:
    """Return whether a value of a record is a finite number that later arithmetic can hold."""
    return type(value) in (int, float) and -LARGEST < value < LARGEST


CONFIG = "config.yaml"
RUN = "run.json"

RUNNING = "running, or killed"
"""Status of a start that has not recorded its end."""


def read_starts(path: Path) -> list[dict[str, Any]]:
    """Return the starts in a run.json; each has an `id`. Raises OSError, and ValueError if it has other content."""
    if path.exists() and not path.is_file():
        raise ValueError(f"{path} is not a regular file")
    value = decode_json(path.read_bytes(), str(path), ValueError)
    starts = value.get("starts") if isinstance(value, dict) else None
    if not isinstance(starts, list) or not all(
        isinstance(each, dict) and isinstance(each.get("id"), str) for each in starts
    ):
        raise ValueError(f"{path} is not a list of the starts of a run")
    return starts


LOSS_CURVE = "loss_curve.png"

_REFERENCE = "#8a8a8a"
_COLOURS = ("#1f6fb4", "#d9541e", "#3a8f3a", "#8a4fb0", "#b8860b", "#c2407e")


@dataclass(frozen=True)
class References:
    """Losses in nats per token. uniform: ln(vocabulary). unigram: entropy of the training split's token frequencies.

    num_tokens: tokens counted for `unigram`. pairs: ln 2 where the loss has a second term, for pairs of sentences,
    else 0.
    """

    uniform: float
    unigram: float
    num_tokens: int
    pairs: float = 0.0

    def __str__(self) -> str:
        pairs = f"; of sentence pairs {self.pairs:.3f}" if self.pairs else ""
        return (
            f"ln(vocabulary) {self.uniform:.3f}, unigram entropy {self.unigram:.3f} "
            f"({self.num_tokens:,} training tokens){pairs}"
        )


class LossCurve(Listener):
    """Draws `loss_curve.png` in the run's folder at the end of a run, from all starts in its metrics file."""

    def __init__(self, directory: Path, references: References) -> None:
        self._directory = directory
        self._references = references

    def event(self, name: str, **fields: Any) -> None:
        """Draw the picture when the run ends."""
        if name == "end":
            runs = {"": read_losses(self._directory / METRICS)}
            draw_loss_curves(self._directory / LOSS_CURVE, runs, self._references, title=self._directory.name)


def draw_loss_curves(path: Path, runs: Mapping[str, LossHistory], references: References, title: str) -> None:
    """Draw training losses of runs over steps as lines and validation losses as points, with both reference losses, to
    a PNG at `path`.

    Each run has its own colour, and its name in the legend; a single run without a name has one colour for training
    and one for validation. Losses of steps that a rewind undid are drawn in faint grey.
    """
    # The import of matplotlib takes half a second, so it happens only at the end of a run.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(8, 4.5), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for index, (run, history) in enumerate(runs.items()):
        training = _COLOURS[index % len(_COLOURS)]
        name, evaluation = (f"{run}, ", training) if run else ("", _COLOURS[1])
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
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_ylabel("loss (nats per token)")
    axes.margins(x=0.01)
    axes.grid(color="#e6e6e6", linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(frameon=False, loc="best")
    partial = path.with_name(f".{path.name}.partial")
    figure.savefig(partial, format="png")
    os.replace(partial, path)
