"""Data stalls: planted delays are found where they were planted, and the advice is the arithmetic of the rates."""

import math
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megapipe.calibration.stalls import (
    Measurement,
    Rates,
    StepTime,
    accelerator_headroom,
    measure,
    needed_cached_share,
    needed_fetch,
)
from megapipe.engine.step import Counts
from megapipe.layers.context import MicrobatchContext
from megapipe.layout.batch_plan import BatchPlan
from megapipe.training.loop.loader import Loader, StepBatch

rate_numbers = st.integers(1, 10**6).map(float)
shares = st.floats(0.0, 1.0)


class PlannedTime:
    """A clock that advances on request, and storage that keeps its files until it is made cold."""

    def __init__(self, preparation: float, fetch: float, can_be_cold: bool = True) -> None:
        self.now = 0.0
        self.preparation, self.fetch = preparation, fetch
        self.can_be_cold = can_be_cold
        self.in_memory: set[int] = set()

    def clock(self) -> float:
        return self.now

    def pass_by(self, seconds: float) -> None:
        self.now += seconds

    def make_cold(self) -> bool:
        if self.can_be_cold:
            self.in_memory.clear()
        return self.can_be_cold

    def loading(self, consumed: int) -> float:
        """Seconds until a step is loaded, which is in memory from then on."""
        seconds = self.preparation + (0.0 if consumed in self.in_memory else self.fetch)
        self.in_memory.add(consumed)
        return seconds


class PlannedLoader(Loader):
    """Load as a prefetching thread would, at most `depth` steps early, in planned time."""

    def __init__(self, time: PlannedTime, depth: int = 2) -> None:
        super().__init__(BatchPlan(1, 1, 0), 1)
        self._time = time
        self._depth = depth

    def load(self, consumed: int) -> StepBatch:
        self._time.pass_by(self._time.loading(consumed))
        return super().load(consumed)

    @contextmanager
    def steps(self, consumed: int) -> Iterator[Iterator[StepBatch]]:
        yield self._prefetched(consumed)

    def _prefetched(self, consumed: int) -> Iterator[StepBatch]:
        thread = self._time.now
        taken: deque[float] = deque([-math.inf] * (self._depth + 1), maxlen=self._depth + 1)
        while True:
            # A step is started when the previous one is in the queue, which needs room for it.
            thread = max(thread, taken[0]) + self._time.loading(consumed)
            self._time.now = max(self._time.now, thread)
            taken.append(self._time.now)
            yield super().load(consumed)
            consumed += 1

    def _microbatch(self, consumed: int, index: int, num_microbatches: int) -> tuple[MicrobatchContext, Counts | None]:
        return MicrobatchContext(), 1.0


def planned(compute: float, preparation: float, fetch: float, can_be_cold: bool = True) -> Measurement:
    world = PlannedTime(preparation, fetch, can_be_cold)
    return measure(
        lambda: PlannedLoader(world),
        lambda batch: world.pass_by(compute),
        world.make_cold,
        num_steps=20,
        warm_up=5,
        clock=world.clock,
    )


milliseconds = st.integers(1, 50).map(float)


@settings(max_examples=40)
@given(compute=milliseconds, preparation=milliseconds, fetch=milliseconds)
def test_rates_predict_the_runs(compute: float, preparation: float, fetch: float) -> None:
    measurement = planned(compute, preparation, fetch)
    rates = measurement.rates(tokens=1)
    assert rates.ingestion == pytest.approx(1 / compute)
    assert rates.preparation == pytest.approx(1 / preparation)
    assert rates.fetch == pytest.approx(1 / fetch)
    assert measurement.cold is not None
    assert 1 / measurement.cached.whole == pytest.approx(rates.throughput(1.0))
    assert 1 / measurement.cold.whole == pytest.approx(rates.throughput(0.0))
    assert measurement.cold.waited == pytest.approx(max(0.0, preparation + fetch - compute))
    step = max(compute, preparation + fetch)
    memory = max(compute, preparation)
    assert measurement.stalls() == pytest.approx(((memory - compute) / step, (step - memory) / step))


def test_storage_that_cannot_be_made_cold_is_not_measured() -> None:
    measurement = planned(4.0, 8.0, 5.0, can_be_cold=False)
    assert measurement.cold is None
    assert measurement.loading_cold is None
    rates = measurement.rates(tokens=1)
    assert rates.fetch is None
    assert measurement.stalls() == (pytest.approx(0.5), None)
    assert math.isnan(rates.throughput(0.0))
    assert rates.throughput(1.0) == pytest.approx(1 / 8)
    assert needed_cached_share(rates) is None
    assert math.isnan(accelerator_headroom(rates))


def test_noise_in_the_models_time_is_no_stall() -> None:
    """The loader needs 1 ms a step: it cannot have cost the 300 ms that the later runs took longer."""
    step = StepTime
    measurement = Measurement(step(0.5, 0.0), step(0.8, 0.0), step(0.4, 0.0), step(0.001, 0.001), step(0.002, 0.002))
    assert measurement.stalls() == (pytest.approx(0.001 / 0.501), 0.0)


@given(ingestion=rate_numbers, preparation=rate_numbers, fetch=rate_numbers, cached=shares)
def test_more_memory_never_slows_a_run(ingestion: float, preparation: float, fetch: float, cached: float) -> None:
    rates = Rates(ingestion, preparation, fetch)
    less, more = rates.throughput(cached / 2), rates.throughput(cached)
    assert 0 < less <= more * (1 + 1e-12)
    assert more <= min(ingestion, preparation) * (1 + 1e-12)
    assert rates.throughput(1.0) == pytest.approx(min(ingestion, preparation))
    with pytest.raises(ValueError, match=r"cached is 1\.5"):
        rates.throughput(1.5)


@given(ingestion=rate_numbers, preparation=rate_numbers, fetch=rate_numbers)
def test_what_is_needed_is_enough_and_no_more(ingestion: float, preparation: float, fetch: float) -> None:
    rates = Rates(ingestion, preparation, fetch)
    needed, share = needed_fetch(rates), needed_cached_share(rates)
    if needed is None or share is None:
        assert preparation <= ingestion
        assert rates.throughput(1.0) <= ingestion
        return
    assert Rates(ingestion, preparation, needed).throughput() == pytest.approx(ingestion)
    assert rates.throughput(share) == pytest.approx(ingestion)
    assert (share == 0) == (fetch >= needed)
    if share > 0.01:
        assert rates.throughput(share * 0.9) < ingestion
    assert share == 0 or accelerator_headroom(rates, share) == pytest.approx(1.0)


@given(ingestion=rate_numbers, preparation=rate_numbers, fetch=rate_numbers)
def test_headroom_is_the_fastest_model_that_does_not_wait(ingestion: float, preparation: float, fetch: float) -> None:
    rates = Rates(ingestion, preparation, fetch)
    fastest = ingestion * accelerator_headroom(rates)
    assert Rates(fastest, preparation, fetch).throughput() == pytest.approx(fastest)
    assert Rates(2 * fastest, preparation, fetch).throughput() == pytest.approx(fastest)
