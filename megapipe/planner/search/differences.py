"""What two layouts differ in, in words."""

from itertools import groupby

from megapipe.config.run import PretrainConfig
from megapipe.planner.cost.estimate import Estimate

EXPOSED = ("tensor", "context", "pipeline", "data", "tied", "scalars", "waiting")
"""Terms of a step that are spent on others, apart from the bubble."""
WORTH_NAMING = 0.005
"""Of a step, the share that a difference of a term needs to be named."""


def differences(ours: Estimate, theirs: Estimate) -> tuple[str, ...]:
    """What `ours` has instead of `theirs`, setting by setting, then term by term of a step; empty where they are the
    same."""
    found = [f"{what} {mine} instead of {other}" for what, mine, other in _settings(ours.config, theirs.config)]
    if not found:
        return ()
    found.append(faster_or_slower(ours, theirs))
    found += term_differences(ours, theirs)
    missing = ours.peak_bytes - theirs.peak_bytes
    return (*found, f"{gigabytes(abs(missing))} {'more' if missing > 0 else 'less'} memory on the fullest rank")


def faster_or_slower(ours: Estimate, theirs: Estimate) -> str:
    """The step times' ratio in words."""
    change = ours.tokens_per_second / theirs.tokens_per_second - 1.0
    if abs(change) < 0.0005:
        return "as fast"
    return f"{abs(change):.1%} {'faster' if change > 0 else 'slower'} in tokens per second"


def term_differences(ours: Estimate, theirs: Estimate) -> list[str]:
    """Terms of a step by how much they differ, the largest first; small ones left out."""
    names = dict.fromkeys(term.name for estimate in (ours, theirs) for term in estimate.terms)
    changes = {name: ours.seconds_of(name) - theirs.seconds_of(name) for name in names}
    least = WORTH_NAMING * max(ours.step_seconds, theirs.step_seconds)
    large = sorted((name for name in changes if abs(changes[name]) >= least), key=lambda name: -abs(changes[name]))
    return [f"{name} {seconds(abs(changes[name]))} {'more' if changes[name] > 0 else 'less'}" for name in large]


def exposed_seconds(estimate: Estimate) -> float:
    """Communication that nothing hides, of a step."""
    return sum(estimate.seconds_of(name) for name in EXPOSED)


def seconds(value: float) -> str:
    """With three digits, in a unit that fits."""
    if value >= 1.0:
        return f"{value:.3g} s"
    return f"{value * 1e3:.3g} ms" if value >= 1e-3 else f"{value * 1e6:.3g} us"


def gigabytes(num_bytes: float) -> str:
    """In units of 10^9 bytes, of 10^6 where that would be below 1."""
    return f"{num_bytes / 1e9:.1f} GB" if num_bytes >= 1e9 else f"{num_bytes / 1e6:.1f} MB"


def _settings(ours: PretrainConfig, theirs: PretrainConfig) -> list[tuple[str, str, str]]:
    found = []
    for (what, mine), (_, other) in zip(_described(ours), _described(theirs), strict=True):
        if mine != other:
            found.append((what, mine, other))
    return found


def _described(config: PretrainConfig) -> list[tuple[str, str]]:
    parallel, schedule = config.parallel, config.schedule
    name = schedule.file or schedule.name
    chunks = f" with {schedule.chunks} chunks" if schedule.chunks is not None else ""
    by_hand = parallel.layers_per_stage
    return [
        ("data parallel", str(parallel.data)),
        ("tensor parallel", str(parallel.tensor)),
        ("pipeline", str(parallel.pipeline)),
        ("context parallel", str(parallel.context)),
        ("sequence parallelism", "on" if parallel.sequence else "off"),
        ("micro-batches of", str(config.batch.micro_size)),
        ("schedule", name + chunks),
        ("ZeRO stage", str(config.zero.stage)),
        ("recomputation", config.recompute.method),
        ("layers by stage", "balanced by FLOPs" if by_hand is None else _in_runs(by_hand)),
    ]


def _in_runs(sizes: list[int]) -> str:
    """Such as `2, 62 x 1, 2`."""
    runs = [(size, len(list(group))) for size, group in groupby(sizes)]
    return ", ".join(f"{count} x {size}" if count > 1 else str(size) for size, count in runs)
