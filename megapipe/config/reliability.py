"""Configuration for faults of a run: hangs, numbers that are not finite, loss spikes, replicas that differ."""

from dataclasses import dataclass, field
from math import isfinite


@dataclass(kw_only=True)
class WatchdogConfig:
    """A separate process per rank that ends the job if the rank makes no progress (docs/reliability.md)."""

    enabled: bool = True
    """Watch every rank; only available on Linux."""
    floor_seconds: float = 300.0
    """Within a step: shortest time without any new action that counts as a hang."""
    factor: float = 10.0
    """Within a step: number of median step times without any new action that counts as a hang, if longer than
    floor_seconds."""
    pause_seconds: float = 3600.0
    """Outside of steps, and in the first step, which may compile: time without progress that counts as a hang."""

    def problems(self) -> list[str]:
        """Return one message for every rule that a single field breaks."""
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
    """Recovery from loss spikes: return to the last checkpoint and skip the batches that caused the spike.

    Source: Chowdhery et al., 2022, arXiv 2204.02311, section 5.1.
    """

    deviations: float | None = None
    """A loss that exceeds the running median by this many robust standard deviations is a spike; null turns this check
    off. 10 is rarely exceeded by chance."""
    threshold: float | None = None
    """A loss above this value is always a spike; null turns this check off."""
    window: int = 50
    """For deviations: number of losses in the running median; the check starts after half as many."""
    skip_batches: int = 1
    """Number of batches to skip: the one that spiked and those right before it, at most back to the checkpoint."""
    patience: int = 3
    """How often the run may return to the same checkpoint; one more spike ends it with an error."""

    @property
    def watched(self) -> bool:
        """Whether any loss counts as a spike."""
        return self.deviations is not None or self.threshold is not None

    def problems(self) -> list[str]:
        """Return one message for every rule that a single field breaks."""
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
    """Checks of numbers and ranks between steps."""

    skip_non_finite: bool = True
    """Skip the update of a step whose loss or gradients are not finite; false ends the run instead."""
    non_finite_patience: int = 20
    """Consecutive skipped steps that end the run; fp16 uses loss_scale.patience, counted at its lowest scale."""
    skip_samples: list[list[int]] = field(default_factory=list)
    """Ranges [first, end) of samples that no step uses, written [[first, end], ...] and numbered as consumed_samples
    in metrics.jsonl."""
    compare_every: int | None = 1000
    """Steps between bitwise comparisons of weights and moments that several ranks hold; null means no comparison."""
    stragglers_every: int | None = 50
    """Steps between measurements of each rank's time by part of a step, and peak memory; null means no measurement."""
    straggler_factor: float = 1.3
    """A rank is slow if its time exceeds the median of ranks with the same work by this factor."""
    straggler_reports: int = 3
    """Consecutive measurements in which a rank must be slow before it is reported."""

    def problems(self) -> list[str]:
        """Return one message for every rule that a single field breaks."""
        found = [
            f"reliability.skip_samples has {each}; a range is [first, end) with 0 <= first < end"
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
            found.append(
                f"reliability.straggler_factor is {self.straggler_factor}; it must be above 1, for example 1.3"
            )
        return found
