"""On two streams, no kernel of one half of a pair waits for a collective of the other half; on one stream many do."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.fake_cuda import runs
from tests.fake_cuda.options import DROPOUT, EXPERTS_OF, FP8, WIDE, check, shortened
from tests.fake_cuda.pairs import Pair
from tests.fake_cuda.server import run_fake
from tests.support.gpt_runs import make_config, write_shard

RUNS: dict[str, tuple[Any, dict[str, Any]]] = {
    "tensor": (WIDE, {"parallel": {"tensor": 2}}),
    "sequence": (WIDE, {"parallel": {"tensor": 2, "sequence": True, "sequence_chunks": 2}}),
    "experts": (EXPERTS_OF, {"parallel": {"tensor": 2, "sequence": True}}),
    "ring": (WIDE, {"parallel": {"context": 2}}),
    "all_to_all": (WIDE, {"parallel": {"context": 2, "context_attention": "all_to_all"}}),
    "recomputation, layer by layer": (WIDE, {"parallel": {"tensor": 2}, "recompute": {"method": "full"}}),
    "selective recomputation": (DROPOUT, {"parallel": {"tensor": 2}, "recompute": {"method": "selective"}}),
    "fp8 tensorwise": (WIDE, {"parallel": {"tensor": 2}, "training": {**FP8, "fp8": "tensorwise"}}),
    "shards of the optimizer": (WIDE, {"parallel": {"tensor": 2, "data": 2}, "zero": {"stage": 1}}),
}
SLOW = ("tensor",)
MICROBATCHES = {"tensor": 8}
"""Enough to find gradients that are added on the stream of the other half; 4 elsewhere."""
IN_ORDER: dict[str, dict[str, Any]] = {
    "gathered weights": {"parallel": {"tensor": 2, "data": 2}, "zero": {"stage": 3}},
    "offloaded activations": {"parallel": {"tensor": 2}, "offload": {"activations": "blocks"}},
}


def run(
    folder: Path,
    model: Any,
    groups: dict[str, Any],
    microbatches: int = 4,
    *,
    in_order: bool = False,
    dropped: str | None = None,
) -> list[runs.Report]:
    parallel = {"pipeline": 2, **groups["parallel"]}
    training = {"precision": "bf16", **groups.get("training", {})}
    changes = {**groups, "parallel": parallel, "training": training, "schedule": {"name": "dualpipe_v"}}
    config = shortened(make_config(write_shard(folder), replace(model, num_layers=4), **changes), microbatches)
    ranks = 2 * max(parallel.get("tensor", 1), parallel.get("context", 1)) * parallel.get("data", 1)
    how: dict[str, Any] = {"steps": 1, "dropped": dropped, "pairs_in_order": in_order}
    reports = run_fake(runs.train, config, ranks=ranks, timeout=300.0, **how)
    if dropped is None:
        check(reports)  # no fault, and the same order of collectives on all members of a group
    return reports


def pairs_of(reports: list[runs.Report]) -> list[Pair]:
    return [pair for report in reports for pair in report.pairs.values()]


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if name in SLOW else pytest.mark.exhaustive) for name in RUNS]
)
def test_no_half_waits_for_the_other_s_collectives(tmp_path: Path, name: str) -> None:
    microbatches = MICROBATCHES.get(name, 4)
    overlapping, in_order = (run(tmp_path, *RUNS[name], microbatches, in_order=flag) for flag in (False, True))
    assert all(sum(pair.waiting) == 0 for pair in pairs_of(overlapping))
    assert any(min(pair.collectives) > 0 for pair in pairs_of(overlapping))
    # The count can fail: on one stream, every backward runs after the collectives of its forward.
    pairs = pairs_of(in_order)
    assert all(sum(pair.waiting) > 0 for pair in pairs if pair.collectives[0])
    # The halves are the same programs.
    assert [(pair.kernels, pair.collectives) for pair in pairs_of(overlapping)] == [
        (pair.kernels, pair.collectives) for pair in pairs
    ]


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", IN_ORDER)
def test_pairs_without_a_known_order_stay_on_one_stream(tmp_path: Path, name: str) -> None:
    reports = run(tmp_path, WIDE, IN_ORDER[name])
    assert any(sum(pair.waiting) > 0 for pair in pairs_of(reports))


@pytest.mark.exhaustive
def test_every_wait_of_the_two_streams_is_needed(tmp_path: Path) -> None:
    reports = run(tmp_path, *RUNS["tensor"])
    places = {place for report in reports for place in report.waits if place.startswith("megapipe/engine/pairs.py")}
    assert places
    without = {place: run(tmp_path, *RUNS["tensor"], dropped=place) for place in sorted(places)}
    assert [place for place, reports in without.items() if not any(report.faults for report in reports)] == []
