"""Time steps, with contestants that take turns or run one after another, and summarize the times."""

import gc
import math
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from .contestants import OURS, Step

WARM_UP = 2


@dataclass(frozen=True)
class Rate:
    """Tokens per second: median, lower and upper quartile. mfu: MFU at the median; None if it is unknown."""

    tokens_per_second: float
    lower_quartile: float
    upper_quartile: float
    mfu: float | None


def timed(step: Step, device: torch.device) -> float:
    """Return the seconds of one step."""
    _synchronize(device)
    start = time.perf_counter()
    step()
    _synchronize(device)
    return time.perf_counter() - start


def in_turns(contestants: Mapping[str, Callable[[], float]], repeats: int) -> dict[str, list[float]]:
    """Return the seconds of each step by contestant, without rounds of warm-up.

    The contestants take turns and change their order from round to round, so that a change of the machine's load
    affects all of them.
    """
    seconds: dict[str, list[float]] = {name: [] for name in contestants}
    names = list(contestants)
    for round_ in range(repeats + WARM_UP):
        for name in names[round_ % len(names) :] + names[: round_ % len(names)]:
            elapsed = contestants[name]()
            if round_ >= WARM_UP:
                seconds[name].append(elapsed)
    return seconds


def one_by_one(
    contestants: Mapping[str, Callable[[], Step]],
    device: torch.device,
    repeats: int,
    deadline: float = math.inf,
    report: Callable[[dict[str, list[float]], dict[str, str]], None] = lambda seconds, failures: None,
) -> tuple[dict[str, list[float]], dict[str, str]]:
    """Run contestants one after another, so that each can use all memory of the device.

    Returns the seconds of each step by contestant, and the reasons why contestants failed. deadline: a time of
    time.monotonic, after which no contestant starts, and a running one stops when it has measured two steps. report:
    called with both results after each contestant.
    """
    seconds: dict[str, list[float]] = {}
    failures: dict[str, str] = {}
    for name, build in contestants.items():
        try:
            if time.monotonic() > deadline:
                raise TimeoutError("the time was up")
            seconds[name] = _alone(build, device, repeats, deadline)
        except Exception as error:  # such as lack of memory or a missing library; the other contestants continue
            failures[name] = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
        outcome = failures.get(name) or f"{statistics.median(seconds[name]):.4g} s a step"
        print(f"  {name}: {outcome}", flush=True)
        report(seconds, failures)
    return seconds, failures


def rates(
    seconds: Mapping[str, list[float]], num_tokens: int, mfu: Callable[[float], float | None]
) -> dict[str, Rate]:
    """Return the rates by contestant. mfu: returns the MFU for the seconds of a step; None if it is unknown."""
    rate_of = {}
    for name, values in seconds.items():
        quarters, middle = statistics.quantiles(values, n=4), statistics.median(values)
        share = mfu(middle)
        rate_of[name] = Rate(
            round(num_tokens / middle, 1),
            round(num_tokens / quarters[2], 1),
            round(num_tokens / quarters[0], 1),
            None if share is None else round(share, 4),
        )
    return rate_of


def show(title: str, rates_by_name: Mapping[str, Rate]) -> None:
    """Print a table."""
    print(title)
    for name, rate in rates_by_name.items():
        interval = f"({rate.lower_quartile:,.0f} to {rate.upper_quartile:,.0f})"
        mfu = "" if rate.mfu is None else f"  MFU {rate.mfu:.1%}"
        print(f"  {name:<26}{rate.tokens_per_second:>12,.0f} tokens/s  {interval}{mfu}")


def ratio_to_best_peer(seconds: Mapping[str, list[float]]) -> float | None:
    """Return the median over rounds of (seconds of the fastest peer / seconds of our fastest contestant).

    Above 1, megapipe is faster. The result is None until a peer and a contestant of ours have run.
    """
    megapipe = [values for name, values in seconds.items() if name.startswith(OURS)]
    peers = [values for name, values in seconds.items() if not name.startswith(OURS)]
    return paired_ratio(megapipe, peers) if megapipe and peers else None


def paired_ratio(megapipe: list[list[float]], peers: list[list[float]]) -> float:
    """Return the median over rounds of the seconds of the fastest peer, divided by those of our fastest contestant."""
    best_peer, best_megapipe = min(peers, key=statistics.median), min(megapipe, key=statistics.median)
    # If the time ran out, one of them has fewer rounds.
    return round(statistics.median(a / b for a, b in zip(best_peer, best_megapipe, strict=False)), 4)


def _alone(build: Callable[[], Step], device: torch.device, repeats: int, deadline: float) -> list[float]:
    torch.compiler.reset()
    step = build()
    for _ in range(WARM_UP):
        step()
    seconds: list[float] = []
    while len(seconds) < repeats and (len(seconds) < 2 or time.monotonic() < deadline):
        seconds.append(timed(step, device))
    return seconds


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
