"""From three rates to where a run waits for its data, and what would change that.

Source: Mohan et al., "Analyzing and Mitigating Data Stalls in DNN Training", VLDB 2021, arXiv 2007.06775, section 3
and its what-if analysis. There a loader fetches and prepares at once, so that a run goes at the least of three rates.
Here one thread does both in turn, reading mapped files: their times add up, and a run goes at the lesser of the
model's rate and the loader's.
"""

import math
from dataclasses import dataclass
from typing import NamedTuple


@dataclass(frozen=True)
class Rates:
    """Tokens a second, each as if the two others took no time.

    ingestion: the model, on batches that are at hand. preparation: the loader, with all files in memory. fetch: what
    storage adds to the loader's time; infinite where that is nothing, None where storage could not be measured.
    """

    ingestion: float
    preparation: float
    fetch: float | None

    def loading(self, cached: float = 0.0) -> float:
        """Of the loader, with that share of what it reads in memory; NaN where storage was not measured."""
        return 1.0 / (1.0 / self.preparation + self._fetching(cached))

    def throughput(self, cached: float = 0.0) -> float:
        """Of the run, with that share of what it reads in memory; NaN where storage was not measured."""
        loading = self.loading(cached)
        return math.nan if math.isnan(loading) else min(self.ingestion, loading)

    def _fetching(self, cached: float) -> float:
        """Seconds a token that storage takes."""
        if not 0 <= cached <= 1:
            raise ValueError(f"cached is {cached}; it is a share, from 0 to 1")
        if cached == 1:
            return 0.0
        return math.nan if self.fetch is None else (1.0 - cached) / self.fetch


class StepTime(NamedTuple):
    """Mean over the steps of a run, in seconds."""

    whole: float
    """From taking the batch to the end of training on it."""
    waited: float
    """Until the batch was there."""


@dataclass(frozen=True)
class Measurement:
    """One run each. resident, cached, cold: training on one batch that is at hand, on files in memory, on files on
    storage. loading_cached, loading_cold: the loader by itself. The cold ones are None where files could not be made
    cold.
    """

    resident: StepTime
    cached: StepTime
    cold: StepTime | None
    loading_cached: StepTime
    loading_cold: StepTime | None

    def rates(self, tokens: int) -> Rates:
        """tokens: of a step."""
        fetch = None
        if self.loading_cold is not None:
            fetching = self.loading_cold.whole - self.loading_cached.whole
            fetch = tokens / fetching if fetching > 0 else math.inf
        return Rates(tokens / self.resident.whole, tokens / self.loading_cached.whole, fetch)

    def stalls(self) -> "Stalls":
        """The differences between the runs, as measured and not as the rates predict.

        A step cannot be longer by more than its loading takes, even if nothing overlaps: what a difference has beyond
        that is noise, and so is one below zero.
        """
        preparation = _within(self.cached.whole - self.resident.whole, self.loading_cached.whole)
        step, fetch = self.resident.whole + preparation, None
        if self.cold is not None and self.loading_cold is not None:
            fetch = _within(self.cold.whole - self.cached.whole, self.loading_cold.whole)
            step += fetch
        return Stalls(preparation / step, None if fetch is None else fetch / step)


class Stalls(NamedTuple):
    """Shares of a step, from 0 to 1: of one from storage, or from memory where storage could not be measured."""

    preparation: float
    fetch: float | None


def _within(seconds: float, most: float) -> float:
    return min(max(seconds, 0.0), most)


def needed_fetch(rates: Rates) -> float | None:
    """The slowest storage, in tokens a second, that the run would not wait for; None where preparation is too slow."""
    slack = 1.0 / rates.ingestion - 1.0 / rates.preparation
    return 1.0 / slack if slack > 0 else None


def needed_cached_share(rates: Rates) -> float | None:
    """The least share of what is read that has to be in memory so that the run does not wait for storage.

    None where preparation alone is too slow, or storage was not measured.
    """
    needed = needed_fetch(rates)
    if needed is None or rates.fetch is None:
        return None
    return max(0.0, 1.0 - rates.fetch / needed)


def accelerator_headroom(rates: Rates, cached: float = 0.0) -> float:
    """How many times as fast as now the model may become before it waits for data; below 1 it waits already."""
    return rates.loading(cached) / rates.ingestion
