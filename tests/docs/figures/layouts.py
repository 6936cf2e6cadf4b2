"""The table of docs/parallelism.md: one model on many layouts, and the first step's loss and gradient norm of each."""

import tempfile
from collections.abc import Iterator
from dataclasses import replace
from math import prod
from pathlib import Path

from tests.docs.figures import head, row, table
from tests.support.gpt_runs import RankRun, run_gpt, write_shard
from tests.support.layouts import AXES, BASE, CHUNKED, adds_in_one_order, config_of, sizes_of
from tests.support.meshes import run_threads

RELATIVE = 1e-5
"""Largest relative difference of a first loss or norm from that of one process if sums are reordered."""
SHOWN = 4
"""Digits of figures."""
SEED = 4
"""A seed whose figures round to the same digits anywhere within the tolerance."""

FLUSHING = [name for name in AXES["schedule"] if name not in ("pipedream",)]
ONE_STAGE = [name for name in FLUSHING if name not in CHUNKED]


def layouts() -> Iterator[dict[str, str]]:
    """Yield cases of the GPT-2 shape, tied, with dropout, in fp32, without pipedream, which updates within a step."""
    yield {}
    yield from ({"pipeline": "2", "schedule": name} for name in FLUSHING)
    yield from ({"pipeline": "4", "schedule": name} for name in ONE_STAGE)
    yield from ({"pipeline": "2", "recompute": method} for method in ("selective", "full", "logits"))
    yield from ({dimension: size} for dimension in ("tensor", "data") for size in ("2", "4"))
    for dimension in ("tensor", "data"):
        yield from ({dimension: "2", "pipeline": "2", "schedule": name} for name in ("1f1b", "zb_v", "2bw", "modular"))
        yield {dimension: "2", "pipeline": "4"}
        yield {dimension: "2", "recompute": "full"}
    yield {"data": "2", "tensor": "2"}
    yield {"data": "4", "tensor": "2"}
    yield from ({"data": "2", "pipeline": "2", "tensor": "2", "schedule": name} for name in ("1f1b", "zb_h1"))
    yield from ({feature: value} | needed for feature, value, needed in FURTHER)


FURTHER: tuple[tuple[str, str, dict[str, str]], ...] = (
    ("sequence", "on", {"tensor": "2"}),
    ("sequence", "on", {"tensor": "2", "pipeline": "2"}),
    ("context", "2 ring", {}),
    ("context", "2 all-to-all", {}),
    ("context", "2 ring", {"pipeline": "2"}),
    ("context", "2 ring", {"tensor": "2"}),
    ("zero", "1", {"data": "2"}),
    ("zero", "2", {"data": "2"}),
    ("zero", "3", {"data": "2"}),
    ("zero", "3", {"data": "2", "pipeline": "2"}),
    ("offload", "activations", {"pipeline": "2"}),
    ("offload", "optimizer", {"pipeline": "2"}),
)


def whole_case(case: dict[str, str]) -> dict[str, str]:
    """Return every feature of a case; sizes may be larger than those of the covering array."""
    return {**BASE, "schedule": "1f1b", **case}


def first_step(case: dict[str, str], prefix: str) -> RankRun:
    """Return the first rank's results of the first step, on ranks that are threads."""
    sized = {name: case[name] for name in ("data", "tensor")}
    config = config_of({**case, "data": "1", "tensor": "1"}, prefix, None)  # type: ignore[arg-type]  # no BERT here
    config.training = replace(config.training, seed=SEED)
    config.parallel = replace(config.parallel, **{name: int(size) for name, size in sized.items()})
    ranks: list[RankRun] = run_threads(sizes_of(config), run_gpt, config, 1)
    assert len({(rank.results[0].loss, rank.results[0].gradient_norm) for rank in ranks}) == 1, f"ranks differ: {case}"
    return ranks[0]


@table("docs/parallelism.md", "layouts of one result", "slow")
def rows() -> Iterator[str]:
    """Yield all rows; fail if a layout's figures are not those of one process."""
    with tempfile.TemporaryDirectory() as folder:
        prefix = write_shard(Path(folder))
        base = whole_case({})
        alone = first_step(base, prefix).results[0]
        for figure in (alone.loss, alone.gradient_norm):
            ends = {_shown(figure * (1 + 2 * sign * RELATIVE)) for sign in (-1, 1)}
            assert len(ends) == 1, f"{figure} is shown as one of {ends}; take another SEED"
        yield from head("ranks", "layout", "schedule", "other options", "loss", "gradient norm", "of one process")
        for case in map(whole_case, layouts()):
            result = first_step(case, prefix).results[0]
            exact = adds_in_one_order(case)
            for here, there in ((result.loss, alone.loss), (result.gradient_norm, alone.gradient_norm)):
                assert abs(here - there) <= (0 if exact else RELATIVE * there), f"{case}: {here} instead of {there}"
            yield _row(case, result.loss, result.gradient_norm, exact)


def _row(case: dict[str, str], loss: float, norm: float, exact: bool) -> str:
    sizes = {name: case[name].split()[0] for name in ("data", "pipeline", "context", "tensor") if name in case}
    ranks = prod(map(int, sizes.values()))
    layout = " x ".join(f"{name} {size}" for name, size in sizes.items() if size != "1") or "one process"
    base = whole_case({})
    shown = ("schedule", "data", "pipeline", "tensor")
    others = ", ".join(f"{name} {value}" for name, value in case.items() if name not in shown and value != base[name])
    same = "every bit" if exact else "to rounding"
    return row(ranks, layout, case["schedule"], others, _shown(loss), _shown(norm), same)


def _shown(figure: float) -> str:
    return f"{figure:#.{SHOWN}g}"
