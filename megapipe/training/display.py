"""Progress for people: a bar in a terminal, plain lines everywhere else."""

import sys
from collections.abc import Callable
from datetime import timedelta

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, Progress, TextColumn
from rich.text import Text

from megapipe.training.records import EvaluationRecord, Listener, StepRecord
from megapipe.training.throughput import Window

BAR_WINDOW = 20
"""Steps over which the bar's rates are taken."""


def open_display(steps: int, log_every: int, total_samples: int) -> Listener:
    """A bar when standard output is a terminal, else lines.

    steps: of the whole run. log_every: steps between lines. total_samples: of the whole run, for the time left.
    """
    if sys.stdout.isatty():
        return ProgressBar(steps, total_samples, Console())
    return PlainLines(steps, log_every, total_samples, lambda line: print(line, flush=True))


class PlainLines(Listener):
    """A line every `log_every` steps, with rates over the steps since the last one; the first and last step too."""

    def __init__(self, steps: int, log_every: int, total_samples: int, printer: Callable[[str], None]) -> None:
        self._steps = steps
        self._log_every = log_every
        self._total_samples = total_samples
        self._print = printer
        self._window = Window(log_every)
        self._first = True

    def say(self, line: str) -> None:
        self._print(line)

    def step(self, record: StepRecord) -> None:
        self._window.add(record)
        if record.skipped:
            self._print(skipped_line(record))
        if self._first or record.step % self._log_every == 0 or record.step == self._steps:
            self._first = False
            left = self._window.seconds_for(self._total_samples - record.consumed_samples)
            self._print(
                f"step {record.step:>{len(str(self._steps))}}/{self._steps} | {vital_signs(record)} | "
                f"{rates(self._window)} | {duration(left)} left"
            )
            self._window.clear()

    def evaluation(self, record: EvaluationRecord) -> None:
        self._print(evaluation_line(record))


class ProgressBar(Listener):
    """A bar with the rates and a line with the losses, at the bottom of the terminal; other lines scroll above."""

    def __init__(self, steps: int, total_samples: int, console: Console) -> None:
        self._steps = steps
        self._total_samples = total_samples
        self._console = console
        self._window = Window(BAR_WINDOW)
        self._validation = ""
        columns = TextColumn("{task.description}"), BarColumn(bar_width=None), TextColumn("{task.fields[rates]}")
        self._bar = Progress(*columns, expand=True)
        self._task = self._bar.add_task("step 0", total=steps, rates="")
        self._signs = Text(no_wrap=True, overflow="ellipsis")
        self._live = Live(Group(self._bar, self._signs), console=console)
        self._live.start()

    def say(self, line: str) -> None:
        self._console.print(Text(line))

    def step(self, record: StepRecord) -> None:
        self._window.add(record)
        if record.skipped:
            self.say(skipped_line(record))
        left = self._window.seconds_for(self._total_samples - record.consumed_samples)
        self._bar.update(
            self._task,
            completed=record.step,
            description=f"step {record.step}/{self._steps}",
            rates=f"{rates(self._window)} | {duration(left)} left",
        )
        self._signs.plain = vital_signs(record) + self._validation

    def evaluation(self, record: EvaluationRecord) -> None:
        self._validation = f" | validation {record.loss:.4f}"
        self.say(evaluation_line(record))

    def close(self) -> None:
        self._live.stop()


def vital_signs(record: StepRecord) -> str:
    """Loss, gradient norm and learning rate of a step, and the load variation of the block where it is worst."""
    loads = record.expert_load_variations
    return (
        f"loss {record.loss:.4f}{_terms(record.terms)} | gradient norm {record.gradient_norm:.3f} | "
        f"learning rate {record.learning_rate:.2e}"
        f"{'' if record.loss_scale is None else f' | loss scale {record.loss_scale:g}'}"
        f"{f' | expert loads vary by {max(loads):.0%}' if loads else ''}"
    )


def rates(window: Window) -> str:
    """Tokens per second and MFU."""
    return f"{window.tokens_per_second:,.0f} tokens/s | MFU {window.mfu:.1%}"


def evaluation_line(record: EvaluationRecord) -> str:
    """What an evaluation found."""
    shares = "".join(f", {name} accuracy {share:.1%}" for name, share in record.accuracies.items())
    return (
        f"after step {record.step}: validation loss {record.loss:.4f}{_terms(record.terms)}, perplexity "
        f"{record.perplexity:.2f}{shares} ({record.loss_tokens:,} tokens in {record.seconds:.1f} s)"
    )


def _terms(terms: dict[str, float]) -> str:
    return f" ({', '.join(f'{name} {loss:.4f}' for name, loss in terms.items())})" if terms else ""


def skipped_line(record: StepRecord) -> str:
    """Why a step changed nothing."""
    scale = "" if record.loss_scale is None else f" at loss scale {record.loss_scale:g}"
    return f"step {record.step}: gradients are not finite (norm {record.gradient_norm}){scale}; the update is skipped"


def duration(seconds: float) -> str:
    """Hours, minutes and seconds."""
    return str(timedelta(seconds=round(seconds)))
