"""Measure whether a run waits for its data, and compute how to avoid these waits.

Source: Mohan et al., "Analyzing and Mitigating Data Stalls in DNN Training", VLDB 2021, arXiv 2007.06775, section 3
and its what-if analysis. There, a loader fetches and prepares at the same time, so a run has the minimum of three
rates. Here, one thread does both in turn, because it reads mapped files. Their times add up, and a run has the minimum
of the model's rate and the loader's.
"""

import gc
import itertools
import math
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, cast

from megapipe.calibration.planning import with_recompute
from megapipe.config import ConfigError
from megapipe.config.command_line import bytes_text
from megapipe.config.parallel import ScheduleConfig
from megapipe.config.run import BatchConfig, PretrainConfig
from megapipe.data.files import drop_from_page_cache, resident_share
from megapipe.data.shards import bin_path, idx_path
from megapipe.engine.step import StepInput
from megapipe.parallel.launch import initialize
from megapipe.training.device import with_precision
from megapipe.training.loop.batches import open_loader, open_samples
from megapipe.training.loop.loader import Consumer, Loader, StepBatch
from megapipe.training.loop.replica import Replica
from megapipe.training.memory_check import free_on_host
from megapipe.training.observe.metrics import finite
from megapipe.training.validation import validate


@dataclass(frozen=True)
class Rates:
    """Tokens per second of each part, as if the other two took no time.

    ingestion: the model, on a batch in memory. preparation: the loader, with all files in memory. fetch: the time that
    storage adds to the loader, as a rate; infinite if it adds nothing, None if storage could not be measured.
    """

    ingestion: float
    preparation: float
    fetch: float | None

    def loading(self, cached: float = 0.0) -> float:
        """Return the rate of the loader if this share of its data is in memory; NaN if storage was not measured."""
        if not 0 <= cached <= 1:
            raise ValueError(f"cached is {cached}; it is a share, from 0 to 1")
        if cached == 1:
            return self.preparation
        fetching = math.nan if self.fetch is None else (1.0 - cached) / self.fetch
        return 1.0 / (1.0 / self.preparation + fetching)

    def throughput(self, cached: float = 0.0) -> float:
        """Return the rate of the run if this share of its data is in memory; NaN if storage was not measured."""
        loading = self.loading(cached)
        return math.nan if math.isnan(loading) else min(self.ingestion, loading)


class StepTime(NamedTuple):
    """Mean seconds over the steps of a run."""

    whole: float
    """Time from the request for the batch to the end of training on it."""
    waited: float
    """Time from the request for the batch to its arrival."""


@dataclass(frozen=True)
class Measurement:
    """Step times of separate runs. resident, cached, cold: training on one batch in memory, on files in memory, on
    files on storage. loading_cached, loading_cold: only the loader, without training. The cold times are None if the
    files could not be removed from memory.
    """

    resident: StepTime
    cached: StepTime
    cold: StepTime | None
    loading_cached: StepTime
    loading_cold: StepTime | None

    def rates(self, tokens: int) -> Rates:
        """Return the rates of the parts. tokens: number of tokens of a step."""
        fetch = None
        if self.loading_cold is not None:
            fetching = self.loading_cold.whole - self.loading_cached.whole
            fetch = tokens / fetching if fetching > 0 else math.inf
        return Rates(tokens / self.resident.whole, tokens / self.loading_cached.whole, fetch)

    def stalls(self) -> "Stalls":
        """Return the stalls: the measured differences between the runs, not those that the rates predict.

        A step cannot become longer by more than the time of its loading, even if nothing overlaps. A larger difference
        is noise, and so is a negative one.
        """
        preparation = _clamped(self.cached.whole - self.resident.whole, self.loading_cached.whole)
        step, fetch = self.resident.whole + preparation, None
        if self.cold is not None and self.loading_cold is not None:
            fetch = _clamped(self.cold.whole - self.cached.whole, self.loading_cold.whole)
            step += fetch
        return Stalls(preparation / step, None if fetch is None else fetch / step)


class Stalls(NamedTuple):
    """Shares of the time of a step, from 0 to 1. The step reads from storage, or from memory if storage was not
    measured."""

    preparation: float
    fetch: float | None


def _clamped(seconds: float, maximum: float) -> float:
    return min(max(seconds, 0.0), maximum)


def needed_fetch(rates: Rates) -> float | None:
    """Return the minimum rate of storage, in tokens per second, for which a run does not wait; None if preparation is
    too slow."""
    slack = 1.0 / rates.ingestion - 1.0 / rates.preparation
    return 1.0 / slack if slack > 0 else None


def needed_cached_share(rates: Rates) -> float | None:
    """Return the minimum share of the data that must be in memory so that the run does not wait for storage.

    None if preparation is too slow in any case, or if storage was not measured.
    """
    needed = needed_fetch(rates)
    if needed is None or rates.fetch is None:
        return None
    return max(0.0, 1.0 - rates.fetch / needed)


def accelerator_headroom(rates: Rates, cached: float = 0.0) -> float:
    """Return the factor by which the model can become faster before it waits for data; below 1, it already waits."""
    return rates.loading(cached) / rates.ingestion


MAX_SHOWN_HEADROOM = 1000.0
"""Maximum headroom that is printed exactly."""

MAX_WARM_SHARE = 0.5
"""Largest share of the shards that may be in memory after a run from storage; with more, later steps were not cold."""


@dataclass(frozen=True)
class StallReport:
    """A measurement, and the conditions under which it was made.

    prefixes: paths of the shards, without suffixes. corpus_bytes: size of all their files. memory_bytes: memory to
    cache files, None if unknown. samples, tokens: numbers per step of a replica. num_replicas: data-parallel replicas.
    given_ingestion: tokens per second of one replica, None if the model ran. not_cold: why storage was not measured,
    None if it was. resident_share: share of the shards' pages in memory after they were removed from the page cache.
    read_share: the same after a cold run. epochs: how many times the steps read the training split.
    """

    prefixes: tuple[str, ...]
    corpus_bytes: int
    memory_bytes: int | None
    samples: int
    tokens: int
    num_steps: int
    num_replicas: int
    device: str
    given_ingestion: float | None
    not_cold: str | None
    resident_share: float | None
    read_share: float | None
    epochs: float
    measurement: Measurement

    @property
    def rates(self) -> Rates:
        """Rates of one replica."""
        measured, given = self.measurement.rates(self.tokens), self.given_ingestion
        return measured if given is None else replace(measured, ingestion=given)

    def to_json(self) -> dict[str, Any]:
        """Return all figures as JSON data; a missing figure is null."""
        rates, stalls = self.rates, self.measurement.stalls()
        by_name = {"ingestion": rates.ingestion, "preparation": rates.preparation, "fetch": rates.fetch}
        figures = {
            "shards": list(self.prefixes),
            "corpus_bytes": self.corpus_bytes,
            "memory_bytes": self.memory_bytes,
            "samples_per_step": self.samples,
            "tokens_per_step": self.tokens,
            "steps": self.num_steps,
            "epochs_read": self.epochs,
            "replicas": self.num_replicas,
            "device": self.device,
            "ingestion_was_given": self.given_ingestion is not None,
            "storage_not_measured": self.not_cold,
            "resident_share_after_dropping": self.resident_share,
            "resident_share_after_a_cold_run": self.read_share,
            "tokens_per_second": by_name,
            "samples_per_second": {
                name: None if rate is None else rate * self.samples / self.tokens for name, rate in by_name.items()
            },
            "seconds_per_step": {
                each.name: None if (step := getattr(self.measurement, each.name)) is None else step._asdict()
                for each in fields(self.measurement)
            },
            "stall_shares": {"preparation": stalls.preparation, "fetch": stalls.fetch},
            "what_if": {
                "tokens_per_second_from_storage": rates.throughput(0.0),
                "tokens_per_second_from_memory": rates.throughput(1.0),
                "storage_needed_tokens_per_second": needed_fetch(rates),
                "cached_share_needed": needed_cached_share(rates),
                "accelerator_headroom": {
                    "memory": accelerator_headroom(rates, 1.0),
                    "storage": accelerator_headroom(rates),
                },
            },
        }
        return cast(dict[str, Any], finite(figures))

    def lines(self) -> Iterator[str]:
        """Yield the lines of the printed report."""
        yield (
            f"{', '.join(self.prefixes)}: {bytes_text(self.corpus_bytes)}; "
            f"{self.samples} samples of {self.tokens // self.samples} tokens a step, "
            f"{self.num_steps} steps, {self.epochs:.3g} epochs, on {self.device}"
        )
        if self.num_replicas > 1:
            yield f"one of {self.num_replicas} data-parallel replicas; those on one host share its storage and cores"
        if self.epochs > 1:
            yield "note: the steps read some samples twice, and the second time from memory; lower --steps"
        if self.read_share is not None and self.read_share > MAX_WARM_SHARE:
            yield (
                f"note: {self.read_share:.0%} of the shards were in memory after the run from storage, so "
                "its later steps read from memory; a larger corpus has longer waits"
            )
        yield ""
        yield from self._table()
        yield ""
        yield from self._stall_lines()
        yield ""
        yield "what if"
        yield from (f"  {line}" for line in self._advice())

    def _table(self) -> Iterator[str]:
        rates = self.rates
        yield f"{'rate of':<34}{'tokens/s':>18}{'samples/s':>14}"
        source = "model (as given)" if self.given_ingestion is not None else "model, batches in memory"
        for name, rate in (
            (f"ingestion: {source}", rates.ingestion),
            ("preparation: loader, from memory", rates.preparation),
            ("fetch: time added by storage", rates.fetch),
        ):
            if rate is None:
                yield f"{name:<34}{'not measured':>18}"
            elif math.isinf(rate):
                yield f"{name:<34}{'not measurable':>18}"
            else:
                yield f"{name:<34}{rate:>18,.0f}{rate * self.samples / self.tokens:>14,.1f}"
        if self.not_cold is not None:
            yield f"storage was not measured: {self.not_cold}"

    def _stall_lines(self) -> Iterator[str]:
        measurement, stalls = self.measurement, self.measurement.stalls()
        yield f"{'a step, in ms':<34}{'whole':>18}{'waited':>14}"
        for name, step in (
            ("on a batch in memory", measurement.resident),
            ("files in memory", measurement.cached),
            ("files on storage", measurement.cold),
        ):
            shown = "not measured" if step is None else f"{1e3 * step.whole:.2f}"
            yield f"{name:<34}{shown:>18}" + ("" if step is None else f"{1e3 * step.waited:>14.2f}")
        fetch = "not measured" if stalls.fetch is None else f"{stalls.fetch:.1%}"
        yield f"stalls, as shares of a step: preparation {stalls.preparation:.1%}, fetch {fetch}"

    def _advice(self) -> Iterator[str]:
        rates = self.rates
        from_memory = rates.throughput(1.0)
        yield f"all in memory: {from_memory:,.0f} tokens/s, {from_memory / rates.ingestion:.1%} of the model's rate"
        if rates.fetch is not None:
            yield f"nothing in memory: {rates.throughput():,.0f} tokens/s, {rates.throughput() / rates.ingestion:.1%}"
            yield from self._memory_advice()
        headroom, cold = accelerator_headroom(rates, 1.0), accelerator_headroom(rates)
        shown = "" if math.isnan(cold) else f", or {_factor(cold)} with nothing in memory"
        yield f"a faster accelerator: data would keep up with {_factor(headroom)} the model's rate{shown}"
        if headroom < 1:
            yield (
                "preparation is slower than the model for any storage: one thread prepares "
                "the data of a replica, so replicas with fewer devices wait less"
            )

    def _memory_advice(self) -> Iterator[str]:
        """Yield lines about storage and memory, if storage was measured."""
        rates, needed, share = self.rates, needed_fetch(self.rates), needed_cached_share(self.rates)
        if self.memory_bytes is not None:
            fits = min(1.0, self.memory_bytes / max(self.corpus_bytes, 1))
            yield (
                f"memory: {bytes_text(self.memory_bytes)} are free for files, {fits:.0%} "
                f"of the shards; after one epoch {rates.throughput(fits):,.0f} tokens/s"
            )
        if needed is None or share is None or rates.fetch is None:
            return
        if share == 0:
            yield "storage is fast enough: neither faster storage nor more memory would help"
            return
        times, size = needed / rates.fetch, math.ceil(share * self.corpus_bytes)
        yield (
            f"storage is too slow: the run needs {times:.2g} times its rate ({needed:,.0f} "
            f"tokens/s), or {share:.0%} of the shards in memory ({bytes_text(size)})"
        )


def _factor(times: float) -> str:
    return f"{times:,.2f} times" if times < MAX_SHOWN_HEADROOM else f"over {MAX_SHOWN_HEADROOM:,.0f} times"


Item = TypeVar("Item")
Clock = Callable[[], float]

READ_AHEAD = 4
"""Maximum number of steps that a prefetching loader starts in advance."""


def measure(
    open_loader: Callable[[], Loader],
    train: Callable[[StepBatch], object],
    make_cold: Callable[[], bool],
    *,
    num_steps: int,
    warm_up: int,
    clock: Clock = time.perf_counter,
    say: Callable[[str], None] = lambda _: None,
) -> Measurement:
    """Measure the first steps of a run three times: on a batch in memory, on files in memory, on files on storage.

    The differences are stalls. Each run opens its files again, because mapped files cannot be removed from memory.
    train: trains on a batch and returns at its end. make_cold: removes the files from memory, and returns False if
    that failed. warm_up: number of first steps of each run that are not measured. say: prints which run starts. A
    progress bar would take time from the steps.
    """

    def starts(number: int, source: str) -> None:
        say(f"run {number} of 3: {warm_up + num_steps:,} steps {source}")

    def training() -> StepTime:
        with open_loader().steps(0) as batches:
            return seconds_a_step(batches, train, num_steps, warm_up, clock)

    def loading(more: int = 0) -> StepTime:
        return seconds_a_step(open_loader().each(0), lambda batch: None, num_steps + more, warm_up, clock)

    def cold(run: Callable[[], StepTime]) -> StepTime | None:
        return run() if make_cold() else None

    starts(1, "with the shards on storage")
    loading_cold, training_cold = cold(loading), cold(training)
    starts(2, "with the shards in memory")
    loading(READ_AHEAD)  # reads the data of the steps into memory
    loading_cached, training_cached = loading(), training()
    starts(3, "on a batch in memory")
    batch = open_loader().load(0)
    resident = seconds_a_step(itertools.repeat(batch), train, num_steps, warm_up, clock)
    return Measurement(resident, training_cached, training_cold, loading_cached, loading_cold)


def seconds_a_step(
    batches: Iterable[Item], train: Callable[[Item], object], num_steps: int, warm_up: int, clock: Clock
) -> StepTime:
    """Return the time of the steps after the first `warm_up` ones."""
    steps = iter(batches)
    for batch in itertools.islice(steps, warm_up):
        train(batch)
    start, waited = clock(), 0.0
    for _ in range(num_steps):
        requested = clock()
        batch = next(steps)
        waited += clock() - requested
        train(batch)
    return StepTime((clock() - start) / num_steps, waited / num_steps)


COLD = 0.05
"""Maximum share of the shards' pages in memory that counts as cold; the index of an open shard is in memory."""


@dataclass
class StandIn:
    """A placeholder for a model on other devices, which needs the data of the first and last stage."""

    is_first: bool = True
    is_last: bool = True


class ColdShards:
    """Removes shards from the page cache, and records whether that worked.

    resident: share of the shards that remained in memory. read: share in memory before the shards were removed again,
    because a cold run or the kernel's read-ahead had read it. why_not: why the shards could not be removed.
    """

    def __init__(self, prefixes: tuple[str, ...]) -> None:
        self._paths = [path(prefix) for prefix in prefixes for path in (bin_path, idx_path)]
        self.resident: float | None = None
        self.read: float | None = None
        self.why_not: str | None = None

    @property
    def num_bytes(self) -> int:
        return sum(Path(path).stat().st_size for path in self._paths)

    def make(self) -> bool:
        """Remove the files from the page cache, and return whether they are cold."""
        gc.collect()  # a loader in a reference cycle keeps them mapped
        try:
            if self.resident is not None:
                self.read = resident_share(self._paths)
            drop_from_page_cache(self._paths)
            self.resident = resident_share(self._paths)
        except OSError as error:
            self.why_not = f"the page cache could not be emptied of the shards ({error})"
            return False
        if self.resident <= COLD:
            return True
        self.why_not = (
            f"{self.resident:.0%} of the shards remain in memory after they were removed from the page cache: "
            "they are on a file system in memory (tmpfs), another process has mapped them, "
            "or another user owns them; copy them to your own files on a disk"
        )
        return False


def measure_stalls(
    config: PretrainConfig,
    *,
    ingestion: float | None,
    num_steps: int,
    warm_up: int,
    say: Callable[[str], None],
) -> StallReport:
    """Measure the first steps of a run, as one of its data-parallel replicas runs them.

    ingestion: tokens per second of all replicas, None to run the model here.

    Raises ConfigError, DataError or LaunchError before the measurement starts.
    """
    parallel, num_replicas = config.parallel, config.parallel.data or 1
    ranks_per_replica = parallel.pipeline * parallel.context * parallel.tensor
    validate(config, num_replicas * ranks_per_replica)
    if ingestion is None and ranks_per_replica > 1:
        shared = f" x parallel.context {parallel.context}" if parallel.context > 1 else ""
        raise ConfigError(
            f"parallel.pipeline {parallel.pipeline}{shared} "
            f"x parallel.tensor {parallel.tensor}: one process cannot be as fast as several; "
            "give the tokens/s that a run's log prints with --ingestion-tokens-per-second, or "
            f"set {'all' if shared else 'both'} to 1 to measure the whole model on this device"
        )
    config = _one_replica(config, num_replicas)
    mesh = initialize({}, device=config.parallel.device)
    samples = config.batch.global_size
    tokens = samples * config.data.sequence_length
    replica_ingestion = None if ingestion is None else ingestion / num_replicas
    num_samples = len(open_samples(config, "train"))
    consumer: Consumer
    if replica_ingestion is None:
        config = with_recompute(with_precision(config, mesh, None, say), mesh, say)
        consumer = replica = Replica(config, mesh)
        numbers = itertools.count()

        def train(batch: StepBatch) -> None:
            replica.engine.run(StepInput(next(numbers), batch.contexts, batch.token_counts, learning_rate=0.0))

    else:
        consumer, seconds = StandIn(), tokens / replica_ingestion

        def train(batch: StepBatch) -> None:
            time.sleep(seconds)

    shards = ColdShards(config.data.prefixes)
    measurement = measure(
        lambda: open_loader(config, mesh, consumer, open_samples(config, "train")),
        train,
        shards.make,
        num_steps=num_steps,
        warm_up=warm_up,
        say=say,
    )
    free = free_on_host()
    return StallReport(
        prefixes=config.data.prefixes,
        corpus_bytes=shards.num_bytes,
        memory_bytes=None if free is None else free.num_bytes,
        samples=samples,
        tokens=tokens,
        num_steps=num_steps,
        num_replicas=num_replicas,
        device=str(mesh.device),
        given_ingestion=replica_ingestion,
        not_cold=shards.why_not,
        resident_share=shards.resident,
        read_share=shards.read,
        epochs=(num_steps + warm_up) * samples / num_samples,
        measurement=measurement,
    )


def _one_replica(config: PretrainConfig, num_replicas: int) -> PretrainConfig:
    """Return the run of one replica in one process: its share of a full batch, without a ramp."""
    batch = BatchConfig(global_size=config.batch.global_size // num_replicas, micro_size=config.batch.micro_size)
    parallel = replace(config.parallel, data=1, pipeline=1, context=1, tensor=1, layers_per_stage=None)
    return replace(config, batch=batch, parallel=parallel, schedule=ScheduleConfig())
