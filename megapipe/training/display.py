"""Progress for people: a bar in a terminal, plain lines everywhere else, and the same lines in log.txt."""

import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, Progress, TextColumn
from rich.text import Text

from megapipe.training.output import LineFile, write_line
from megapipe.training.records import EvaluationRecord, Listener, StepRecord
from megapipe.training.throughput import RateWindow

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

    steps: of the whole run. log_every: steps between lines.
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
        self._total_samples = 0
        self._window = RateWindow(log_every)
        self._first = True
        self._seconds = 0.0

    def say(self, line: str) -> None:
        self._print(line)

    def event(self, name: str, **fields: Any) -> None:
        if name == "start":
            self._total_samples = fields["total_samples"]

    def step(self, record: StepRecord) -> None:
        self._window.add(record)
        self._seconds += record.seconds
        if record.skipped:
            self._print(skipped_line(record))
        due = record.step % self._log_every == 0 and self._seconds >= self._least_seconds
        if self._first or due or record.step == self._steps:
            self._first = False
            self._seconds = 0.0
            left = self._window.seconds_for(max(0, self._total_samples - record.consumed_samples))
            self._print(
                f"step {record.step:>{len(str(self._steps))}}/{self._steps} | {vital_signs(record)} | "
                f"{rates(self._window)} | {duration(left)} left"
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
        super().event(name, **fields)
        if name == "failed" and self._separator is None:  # a start that has printed nothing may not own the folder
            self._write(f"failed: {fields['error']}")

    def close(self) -> None:
        self._file.close()

    def _write(self, line: str) -> None:
        if self._separator is not None:
            self._file.write(self._separator)
            self._separator = None
        now = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime())
        for each in line.splitlines():
            self._file.write(f"{now} {each}")


class TrainingBar(Listener):
    """A bar with the rates and a line with the losses, at the bottom of the terminal; other lines scroll above.

    The lines of PlainLines are left in the scrollback, at least BAR_LINE_SECONDS apart.
    """

    def __init__(self, steps: int, log_every: int, console: Console) -> None:
        self._steps = steps
        self._console = console
        self._lines = PlainLines(steps, log_every, self.say, least_seconds=BAR_LINE_SECONDS)
        self._total_samples = 0
        self._window = RateWindow(BAR_WINDOW)
        self._validation = ""
        columns = TextColumn("{task.description}"), BarColumn(bar_width=None), TextColumn("{task.fields[rates]}")
        self._bar = Progress(*columns, expand=True)
        self._task = self._bar.add_task("step 0", total=steps, rates="")
        self._signs = Text(no_wrap=True, overflow="ellipsis")
        # Drawn only by this thread, because an error of a dead terminal must be raised where it is caught.
        self._next_drawing = 0.0
        self._live = Live(Group(self._bar, self._signs), console=console, auto_refresh=False)

    def say(self, line: str) -> None:
        self._console.print(Text(line))

    def event(self, name: str, **fields: Any) -> None:
        self._lines.event(name, **fields)
        if name == "start":
            self._total_samples = fields["total_samples"]
            self._live.start()
        elif name == "end":  # the last lines follow below the bar
            self._live.stop()

    def step(self, record: StepRecord) -> None:
        self._window.add(record)
        self._lines.step(record)
        left = self._window.seconds_for(max(0, self._total_samples - record.consumed_samples))
        self._bar.update(
            self._task,
            completed=record.step,
            description=f"step {record.step}/{self._steps}",
            rates=f"{rates(self._window)} | {duration(left)} left",
        )
        self._signs.plain = vital_signs(record) + self._validation
        if time.monotonic() >= self._next_drawing:
            self._live.refresh()
            self._next_drawing = time.monotonic() + BAR_DRAWING_SECONDS

    def evaluation(self, record: EvaluationRecord) -> None:
        self._validation = f" | validation {record.loss:.4f}"
        self._lines.evaluation(record)

    def close(self) -> None:
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


def rates(window: RateWindow) -> str:
    """Return tokens per second and MFU."""
    return f"{window.tokens_per_second:,.0f} tokens/s | MFU {window.mfu:.1%}"


def evaluation_line(record: EvaluationRecord, name: str = "validation loss") -> str:
    """Return the results of an evaluation. name: of the loss."""
    shares = "".join(f", {name} accuracy {share:.1%}" for name, share in record.accuracies.items())
    return (
        f"after step {record.step}: {name} {record.loss:.4f}{_terms(record.terms)}, perplexity "
        f"{record.perplexity:.2f}{shares} ({record.loss_tokens:,} tokens in {record.seconds:.1f} s)"
    )


def _terms(terms: dict[str, float]) -> str:
    return f" ({', '.join(f'{name} {loss:.4f}' for name, loss in terms.items())})" if terms else ""


def skipped_line(record: StepRecord) -> str:
    """Return why a step changed nothing."""
    scale = "" if record.loss_scale is None else f" at loss scale {record.loss_scale:g}"
    return f"step {record.step}: gradients are not finite (norm {record.gradient_norm}){scale}; the update is skipped"


def duration(seconds: float) -> str:
    """Return hours, minutes and seconds."""
    return str(timedelta(seconds=round(seconds)))
