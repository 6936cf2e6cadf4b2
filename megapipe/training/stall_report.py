"""What megapipe data stalls prints, and the same as JSON."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Any

from megapipe.training.stall_rates import (
    Measurement,
    Rates,
    accelerator_headroom,
    needed_cached_share,
    needed_fetch,
)

FAST = 1000.0
"""Beyond it a headroom says nothing more."""

MUCH = 0.5
"""Share of the shards beyond which a run that reads them from storage soon reads them from memory."""


@dataclass(frozen=True)
class StallReport:
    """One measurement, with what it was made on.

    prefixes: shards. corpus_bytes: of all their files. memory_bytes: that could cache files, None where unknown.
    samples, tokens: of a replica's step. num_replicas: data-parallel. given_ingestion: tokens a second of one replica
    where the model was not run. not_cold: why storage was not measured, else None. resident_share: of the shards'
    pages, in memory after they were dropped. read_share: of them, in memory after a cold run. epochs: how much of the
    training split the steps read.
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
        """Of one replica."""
        found = self.measurement.rates(self.tokens)
        given = self.given_ingestion
        return found if given is None else Rates(given, found.preparation, found.fetch)

    def to_json(self) -> dict[str, Any]:
        """Every figure; null where there is none."""
        rates, stalls = self.rates, self.measurement.stalls()
        by_name = {"ingestion": rates.ingestion, "preparation": rates.preparation, "fetch": rates.fetch}
        headroom = {"memory": accelerator_headroom(rates, 1.0), "storage": accelerator_headroom(rates)}
        return {
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
            "tokens_per_second": {name: _finite(rate) for name, rate in by_name.items()},
            "samples_per_second": {
                name: _finite(None if rate is None else rate * self.samples / self.tokens)
                for name, rate in by_name.items()
            },
            "seconds_per_step": {
                each.name: None if (step := getattr(self.measurement, each.name)) is None else step._asdict()
                for each in fields(self.measurement)
            },
            "stall_shares": {"preparation": stalls.preparation, "fetch": stalls.fetch},
            "what_if": {
                "tokens_per_second_from_storage": _finite(rates.throughput(0.0)),
                "tokens_per_second_from_memory": rates.throughput(1.0),
                "storage_needed_tokens_per_second": needed_fetch(rates),
                "cached_share_needed": needed_cached_share(rates),
                "accelerator_headroom": {name: _finite(factor) for name, factor in headroom.items()},
            },
        }

    def lines(self) -> Iterator[str]:
        """For people."""
        yield (
            f"{', '.join(self.prefixes)}: {_bytes(self.corpus_bytes)}; {self.samples} samples of "
            f"{self.tokens // self.samples} tokens a step, {self.num_steps} steps, {self.epochs:.3g} epochs, on "
            f"{self.device}"
        )
        if self.num_replicas > 1:
            yield f"one of {self.num_replicas} data-parallel replicas; those of one host share its storage and cores"
        if self.epochs > 1:
            yield "note: the steps read some samples twice, and the second time from memory; give fewer with --steps"
        if self.read_share is not None and self.read_share > MUCH:
            yield (
                f"note: {self.read_share:.0%} of the shards were in memory after a run from storage, so that its "
                "later steps were warm; a larger corpus waits longer"
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
        source = "model (as given)" if self.given_ingestion is not None else "model, batches at hand"
        for name, rate in (
            (f"ingestion: {source}", rates.ingestion),
            ("preparation: loader, from memory", rates.preparation),
            ("fetch: what storage adds", rates.fetch),
        ):
            if rate is None:
                yield f"{name:<34}{'not measured':>18}"
            elif math.isinf(rate):
                yield f"{name:<34}{'too fast to see':>18}"
            else:
                yield f"{name:<34}{rate:>18,.0f}{rate * self.samples / self.tokens:>14,.1f}"
        if self.not_cold is not None:
            yield f"storage was not measured: {self.not_cold}"

    def _stall_lines(self) -> Iterator[str]:
        found, stalls = self.measurement, self.measurement.stalls()
        yield f"{'a step, in ms':<34}{'whole':>18}{'waited':>14}"
        for name, step in (
            ("on a batch at hand", found.resident),
            ("files in memory", found.cached),
            ("files on storage", found.cold),
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
                "preparation is slower than the model, whatever the storage: one thread prepares for a whole replica, "
                "so that replicas of fewer devices wait less"
            )

    def _memory_advice(self) -> Iterator[str]:
        """Of storage and memory, where storage was measured."""
        rates, needed, share = self.rates, needed_fetch(self.rates), needed_cached_share(self.rates)
        if self.memory_bytes is not None:
            fits = min(1.0, self.memory_bytes / max(self.corpus_bytes, 1))
            yield (
                f"memory: {_bytes(self.memory_bytes)} are free for files, {fits:.0%} of the shards; after one epoch "
                f"{rates.throughput(fits):,.0f} tokens/s"
            )
        if needed is None or share is None or rates.fetch is None:
            return
        if share == 0:
            yield "storage is fast enough: neither faster storage nor more memory would help"
            return
        yield (
            f"storage is too slow: {needed / rates.fetch:.2g} times its rate would do ({needed:,.0f} tokens/s), or "
            f"{share:.0%} of the shards in memory ({_bytes(math.ceil(share * self.corpus_bytes))})"
        )


def _finite(rate: float | None) -> float | None:
    """A number that JSON has."""
    return rate if rate is not None and math.isfinite(rate) else None


def _factor(times: float) -> str:
    return f"{times:,.2f} times" if times < FAST else f"over {FAST:,.0f} times"


def _bytes(count: int) -> str:
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6)):
        if count >= size:
            return f"{count / size:,.1f} {unit}"
    return f"{count / 1e3:,.1f} kB"
