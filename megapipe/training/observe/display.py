"""Progress for people: a bar in a terminal, plain lines everywhere else, and the same lines in log.txt; the rates that
they show.
"""

import sys
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, Progress, TextColumn
from rich.text import Text

from megapipe.config.run import PretrainConfig
from megapipe.layout.hardware.roofline import peak_flops
from megapipe.models import DTYPES
from megapipe.spec.layers import model_flops_per_token
from megapipe.spec.ops import Precision
from megapipe.spec.parameters import LayerSpec
from megapipe.training.device import SIZES, product_flops
from megapipe.training.observe.records import EvaluationRecord, LineFile, Listener, StepRecord, write_line


@dataclass(frozen=True)
class DevicePeak:
    """Peak FLOP/s of one device in the run's precision. source: where the figure comes from."""

    flops: float
    source: str

    def __str__(self) -> str:
        return f"{self.flops / 1e12:,.3g} TFLOP/s per rank ({self.source})"


def device_peak(device: torch.device, precision: Precision) -> DevicePeak:
    """Return the peak from the data sheet of a known GPU, else measured with a matrix product."""
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
        flops = peak_flops(name, precision)
        if flops is not None:
            return DevicePeak(flops, f"{name}, data sheet")
    size = SIZES[device.type]
    return DevicePeak(product_flops(DTYPES[precision], device), f"measured with a {size} x {size} product")


class UtilisationMeter:
    """MFU: the model's FLOPs (see `spec.layers.model_flops_per_token`) divided by the peak of all ranks."""

    def __init__(
        self, config: PretrainConfig, layers: tuple[LayerSpec, ...], peak: DevicePeak, num_ranks: int
    ) -> None:
        length, predictions = config.data.sequence_length, config.predictions
        self._flops_per_token = model_flops_per_token(config.model, layers, length, predictions)
        self._flops_per_second = peak.flops * num_ranks

    def mfu(self, tokens: int, seconds: float) -> float:
        """Return the fraction of the peak FLOP/s that training on `tokens` tokens in `seconds` has used."""
        return self._flops_per_token * tokens / (seconds * self._flops_per_second)


class RateWindow(deque[StepRecord]):
    """The last steps, over which rates are averaged."""

    @property
    def tokens_per_second(self) -> float:
        """Rate over all ranks, without the time that evaluations and saves take."""
        return sum(record.tokens for record in self) / self._seconds

    @property
    def mfu(self) -> float:
        """Mean MFU over time."""
        return sum(record.mfu * record.seconds for record in self) / self._seconds

    def seconds_for(self, samples: int) -> float:
        """Return the seconds that this number of samples takes at the window's rate."""
        return samples * self._seconds / sum(record.samples for record in self)

    @property
    def _seconds(self) -> float:
        return sum(record.seconds for record in self)


LOG = "log.txt"
"""File in the run's folder that contains every printed line."""

BAR_WINDOW = 20
"""Number of steps over which the bar's rates are averaged."""

BAR_DRAWING_SECONDS = 0.25
"""Minimum time between two drawings of the bar."""

BAR_LINE_SECONDS = 5.0
"""Minimum time of steps between two lines that the bar leaves in the scrollback."""


def open_display(steps: int, log_every: int) -> Listener:
    """Return a bar when standard output is a terminal, else plain lines.

    steps: number of steps of the whole run. log_every: steps between lines.
    """
    if sys.stdout is not None and sys.stdout.isatty():
        return TrainingBar(steps, log_every, Console())
    return PlainLines(steps, log_every, write_line)


class PlainLines(Listener):
    """Writes a line every `log_every` steps, with rates over the steps since the last one, and a line for the first
    and the last step.

    least_seconds: minimum time of steps between two lines, if that is longer than `log_every` steps. Event `start`
    gives the number of samples of the whole run (`total_samples`), from which the remaining time is computed.
    """

    def __init__(
        self, steps: int, log_every: int, printer: Callable[[str], None], *, least_seconds: float = 0.0
    ) -> None:
        self._steps = steps
        self._log_every = log_every
        self._print = printer
        self._least_seconds = least_seconds
        self.total_samples = 0
        self._window = RateWindow(maxlen=log_every)
        self._first = True
        self._seconds = 0.0

    def say(self, line: str) -> None:
        self._print(line)

    def event(self, name: str, **fields: Any) -> None:
        """Store the number of samples of the whole run, from which the remaining time is computed."""
        if name == "start":
            self.total_samples = fields["total_samples"]

    def step(self, record: StepRecord) -> None:
        """Print a line if one is due. Always print why an update was skipped."""
        self._window.append(record)
        self._seconds += record.seconds
        if record.skipped:
            self._print(skipped_line(record))
        due = record.step % self._log_every == 0 and self._seconds >= self._least_seconds
        if self._first or due or record.step == self._steps:
            self._first = False
            self._seconds = 0.0
            self._print(
                f"step {record.step:>{len(str(self._steps))}}/{self._steps} | "
                f"{vital_signs(record)} | {rates(self._window, self.total_samples)}"
            )
            self._window.clear()

    def evaluation(self, record: EvaluationRecord) -> None:
        self._print(evaluation_line(record))


class LogFile(PlainLines):
    """Appends every printed line, with the time (UTC), to `log.txt` in the run's folder.

    separator: the line that marks this start, written before the first one.
    """

    def __init__(self, directory: Path, steps: int, log_every: int, separator: str) -> None:
        super().__init__(steps, log_every, self._write)
        self._file = LineFile(directory / LOG)
        self._separator: str | None = separator

    def event(self, name: str, **fields: Any) -> None:
        """Write why the run failed, unless this start has printed nothing and may not own the folder."""
        super().event(name, **fields)
        if name == "failed" and self._separator is None:
            self._write(f"failed: {fields['error']}")

    def close(self) -> None:
        self._file.close()

    def _write(self, line: str) -> None:
        if self._separator is not None:
            self._file.write(self._separator)
            self._separator = None
        now = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime())
        for text in line.splitlines():
            self._file.write(f"{now} {text}")


class TrainingBar(Listener):
    """A bar with the rates and a line with the losses, at the bottom of the terminal; other lines scroll above.

    The lines of PlainLines are left in the scrollback, at least BAR_LINE_SECONDS apart.
    """

    def __init__(self, steps: int, log_every: int, console: Console) -> None:
        self._steps = steps
        self._console = console
        self._lines = PlainLines(steps, log_every, self.say, least_seconds=BAR_LINE_SECONDS)
        self._window = RateWindow(maxlen=BAR_WINDOW)
        self._validation = ""
        columns = TextColumn("{task.description}"), BarColumn(bar_width=None), TextColumn("{task.fields[rates]}")
        self._bar = Progress(*columns, expand=True)
        self._task = self._bar.add_task("step 0", total=steps, rates="")
        self._signs = Text(no_wrap=True, overflow="ellipsis")
        # Only this thread draws the bar, because an error of a dead terminal must be raised where it is caught.
        self._next_drawing = 0.0
        self._live = Live(Group(self._bar, self._signs), console=console, auto_refresh=False)

    def say(self, line: str) -> None:
        self._console.print(Text(line))

    def event(self, name: str, **fields: Any) -> None:
        """Show the bar from the start of training to its end."""
        self._lines.event(name, **fields)
        if name == "start":
            self._live.start()
        elif name == "end":  # the last lines follow below the bar
            self._live.stop()

    def step(self, record: StepRecord) -> None:
        """Advance the bar, and redraw it if the last drawing is old enough."""
        self._window.append(record)
        self._lines.step(record)
        self._bar.update(
            self._task,
            completed=record.step,
            description=f"step {record.step}/{self._steps}",
            rates=rates(self._window, self._lines.total_samples),
        )
        self._signs.plain = vital_signs(record) + self._validation
        if time.monotonic() >= self._next_drawing:
            self._live.refresh()
            self._next_drawing = time.monotonic() + BAR_DRAWING_SECONDS

    def evaluation(self, record: EvaluationRecord) -> None:
        """Show the validation loss next to the training losses, and print the whole result above the bar."""
        self._validation = f" | validation {record.loss:.4f}"
        self._lines.evaluation(record)

    def close(self) -> None:
        """Restore the terminal, with the cursor visible."""
        self._live.stop()


def vital_signs(record: StepRecord) -> str:
    """Return the loss, gradient norm and learning rate of a step, and the load variation of its worst block."""
    loads = record.expert_load_variations
    return (
        f"loss {record.loss:.4f}{_terms(record.terms)} | gradient norm {record.gradient_norm:.3f} | "
        f"learning rate {record.learning_rate:.2e}"
        f"{'' if record.loss_scale is None else f' | loss scale {record.loss_scale:g}'}"
        f"{f' | expert loads vary by {max(loads):.0%}' if loads else ''}"
    )


def rates(window: RateWindow, total_samples: int) -> str:
    """Return tokens per second, MFU, and the time left. total_samples: of the whole run."""
    remaining_seconds = window.seconds_for(max(0, total_samples - window[-1].consumed_samples))
    return f"{window.tokens_per_second:,.0f} tokens/s | MFU {window.mfu:.1%} | {duration(remaining_seconds)} left"


def evaluation_line(record: EvaluationRecord, name: str = "validation loss") -> str:
    """Return the results of an evaluation. name: name of the loss."""
    shares = "".join(f", {name} accuracy {share:.1%}" for name, share in record.accuracies.items())
    return (
        f"after step {record.step}: {name} {record.loss:.4f}{_terms(record.terms)}, "
        f"perplexity {record.perplexity:.2f}{shares} ({record.loss_tokens:,} tokens in {record.seconds:.1f} s)"
    )


def _terms(terms: dict[str, float]) -> str:
    return f" ({', '.join(f'{name} {loss:.4f}' for name, loss in terms.items())})" if terms else ""


def skipped_line(record: StepRecord) -> str:
    """Return why a step did not change the weights."""
    scale = "" if record.loss_scale is None else f" at loss scale {record.loss_scale:g}"
    return f"step {record.step}: gradients are not finite (norm {record.gradient_norm}){scale}; the update is skipped"


def duration(seconds: float) -> str:
    """Return hours, minutes and seconds; at most the longest time that timedelta can represent, 2.7 million years."""
    return str(timedelta(seconds=min(round(seconds), timedelta.max // timedelta(seconds=1))))
