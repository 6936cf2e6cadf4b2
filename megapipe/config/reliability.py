"""What a run does about its faults: hangs, numbers that are not finite, spikes of the loss, replicas that differ."""

from dataclasses import dataclass, field
from math import isfinite


@dataclass(kw_only=True)
class WatchdogConfig:
    """A process beside each rank that ends the job when the rank stops making progress (docs/reliability.md)."""

    enabled: bool = True
    """Watch every rank; Linux alone."""
    floor_seconds: float = 300.0
    """Within a step: no action begun for so long, and for `factor` median steps, is a hang."""
    factor: float = 10.0
    """Median steps without progress that are a hang, if they take longer than floor_seconds."""
    pause_seconds: float = 3600.0
    """Outside of steps, and in the first step, which may compile: no progress for so long is a hang."""

    def problems(self) -> list[str]:
        """Rules that single fields break, one message each."""
        return [
            f"watchdog.{name} is {value}; it must be finite and above 0, or set watchdog.enabled false"
            for name, value in (
                ("floor_seconds", self.floor_seconds),
                ("factor", self.factor),
                ("pause_seconds", self.pause_seconds),
            )
            if not (isfinite(value) and value > 0)
        ]


@dataclass(kw_only=True)
class SpikesConfig:
    """Going back to the last checkpoint when the loss jumps up, to leave out the samples that made it jump (Chowdhery
    et al., 2022, arXiv 2204.02311, section 5.1)."""

    deviations: float | None = None
    """A loss above the running median by so many robust standard deviations is a spike (null: none is); 10 is rare."""
    threshold: float | None = None
    """A loss above this number is a spike, whatever those before it were (null: no such number)."""
    window: int = 50
    """deviations: losses that the median is taken over; nothing is judged before there are half as many."""
    skip_batches: int = 1
    """Batches left out: the one that spiked and those right before it, back to the checkpoint at most."""
    patience: int = 3
    """Times that the run may go back to one checkpoint; one more spike ends it with an error."""

    @property
    def watched(self) -> bool:
        """Whether there is anything that counts as a spike."""
        return self.deviations is not None or self.threshold is not None

    def problems(self) -> list[str]:
        """Rules that single fields break, one message each."""
        found = [
            f"spikes.{name} is {value}; it must be finite and above 0, or null"
            for name, value in (("deviations", self.deviations), ("threshold", self.threshold))
            if value is not None and not (isfinite(value) and value > 0)
        ]
        if not 4 <= self.window <= 100:
            found.append(
                f"spikes.window is {self.window}; it must be at least 4, and at most the 100 losses that a checkpoint "
                "keeps"
            )
        found += [
            f"spikes.{name} is {value}; it must be at least 1"
            for name, value in (("skip_batches", self.skip_batches), ("patience", self.patience))
            if value < 1
        ]
        return found


@dataclass(kw_only=True)
class ReliabilityConfig:
    """Checks on numbers and ranks between steps."""

    skip_non_finite: bool = True
    """Leave the weights as they are after a step whose loss or gradients are not finite; false ends the run there."""
    non_finite_patience: int = 20
    """Skipped steps in a row that end the run; fp16 counts by loss_scale.patience, at its lowest scale."""
    skip_samples: list[list[int]] = field(default_factory=list)
    """Ranges [first, behind the last] of samples that no step takes, numbered as consumed_samples counts them."""
    compare_every: int | None = 1000
    """Steps between comparisons, bit for bit, of the weights and moments that several ranks hold (null: none)."""
    stragglers_every: int | None = 50
    """Steps between measurements of each rank's own time in one step, waits left out (null: none)."""
    straggler_factor: float = 1.3
    """A rank is slow where it takes so many times the median of the ranks with the same work."""
    straggler_reports: int = 3
    """Measurements in a row that a rank has to be slow in before it is named."""

    def problems(self) -> list[str]:
        """Rules that single fields break, one message each."""
        found = [
            f"reliability.skip_samples has {each}; a range is [first, behind the last] with 0 <= first < last"
            for each in self.skip_samples
            if len(each) != 2 or not 0 <= each[0] < each[1]
        ]
        found += [
            f"reliability.{name} is {value}; it must be at least 1"
            for name, value in (
                ("non_finite_patience", self.non_finite_patience),
                ("compare_every", self.compare_every),
                ("stragglers_every", self.stragglers_every),
                ("straggler_reports", self.straggler_reports),
            )
            if value is not None and value < 1
        ]
        if not (isfinite(self.straggler_factor) and self.straggler_factor > 1):
            found.append(f"reliability.straggler_factor is {self.straggler_factor}; it must be above 1, 1.3 say")
        return found
