"""Every layout of up to four ranks goes on from the checkpoint of every other, and holds the bits that were saved.

A layout is saved once and loaded on all. Oracles: the saver's own weights and moments, bit for bit; of the steps after
the load the undisturbed run, bit for bit on the same layout and within tolerance of one process on another. Stages are
uneven, the vocabulary is padded on two and four tensor ranks, and replicas save at one stage of ZeRO and load at
another.
"""

import itertools
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from megapipe.config.run import PretrainConfig
from megapipe.parallel.mesh import Mesh
from tests.checkpoint.runs import (
    Outcome,
    RankOutcome,
    Sizes,
    assert_close,
    assert_same_bits,
    config_in,
    train,
    whole_tensors,
)
from tests.support.gpt_runs import GPT2_SHAPE, write_shard
from tests.support.meshes import run_threads

Tensors = dict[str, dict[str, Tensor]]

SAVED_AT = 4
END = 6
MODEL = replace(GPT2_SHAPE, num_layers=5)
DIMENSIONS = ("data", "tensor", "pipeline")
LAYOUTS: list[Sizes] = [
    dict(zip(DIMENSIONS, sizes, strict=True))
    for sizes in itertools.product((1, 2, 4), repeat=3)
    if sizes[0] * sizes[1] * sizes[2] <= 4
]
REPLICATED = [sizes for sizes in LAYOUTS if sizes["data"] > 1]
TWO_VERSIONS: list[Sizes] = [sizes for sizes in LAYOUTS if sizes["pipeline"] > 1]


def saved_stage(sizes: Sizes) -> int:
    """ZeRO's stage that a layout saves at: with `loaded_stage` every pair of stages is met."""
    return REPLICATED.index(sizes) if sizes in REPLICATED else 0


def loaded_stage(sizes: Sizes) -> int:
    """The stage that a layout loads at: not the one that it saves at."""
    return 3 - REPLICATED.index(sizes) if sizes in REPLICATED else 0


def configuration(folder: Path, corpus: str, sizes: Sizes, stage: int, **groups: dict[str, Any]) -> PretrainConfig:
    parallel = {**sizes, "timeout_seconds": 60.0}
    config = config_in(
        folder, corpus, MODEL, batch={"global_size": 4}, parallel=parallel, zero={"stage": stage}, **groups
    )
    return replace(config, checkpoint=replace(config.checkpoint, every=SAVED_AT))


def unsaved(config: PretrainConfig, resume: bool) -> PretrainConfig:
    return replace(config, checkpoint=replace(config.checkpoint, every=None, at_end=False, resume=resume))


def save_and_go_on(mesh: Mesh, config: PretrainConfig) -> list[RankOutcome]:
    """Return the rank's state when it saved, at the end of a run that resumed there, and of an undisturbed run."""
    saved = train(mesh, config, SAVED_AT)
    return [saved, train(mesh, unsaved(config, True), END), train(mesh, unsaved(config, False), END)]


def load_each(mesh: Mesh, configs: Sequence[PretrainConfig]) -> list[RankOutcome]:
    """Runs that go on from every checkpoint."""
    return [train(mesh, unsaved(config, True), END) for config in configs]


def put_together(ranks: Sequence[Sequence[RankOutcome]]) -> list[tuple[Outcome, Tensors]]:
    """Merge the ranks of each run, and the state that they had at its start."""
    runs = []
    for run in zip(*ranks, strict=True):
        assert all(rank.losses == run[0].losses for rank in run)
        kept, loaded = (whole_tensors([getattr(rank, when) for rank in run]) for when in ("kept", "loaded"))
        runs.append((Outcome(run[0].losses, run[0].start, run[0].said, kept), loaded))
    return runs


def check_all_pairs(folder: Path, layouts: Sequence[Sizes], **groups: dict[str, Any]) -> None:
    corpus = write_shard(folder)
    folders = [folder / "-".join(str(size) for size in sizes.values()) for sizes in layouts]
    saved: list[Outcome] = []
    reference: Outcome | None = None
    for sizes, own in zip(layouts, folders, strict=True):
        config = configuration(own, corpus, sizes, saved_stage(sizes), **groups)
        ranks = run_threads(sizes, save_and_go_on, config)
        (outcome, _), (resumed, loaded), (undisturbed, _) = put_together(ranks)
        assert (resumed.start, undisturbed.start) == (SAVED_AT, 0)
        assert_same_bits(replace(outcome, tensors=loaded), outcome)
        assert_same_bits(resumed, undisturbed)
        saved.append(outcome)
        reference = undisturbed if reference is None else reference
        assert_close(undisturbed, reference)
    assert reference is not None
    for sizes in layouts:
        configs = [configuration(own, corpus, sizes, loaded_stage(sizes), **groups) for own in folders]
        outcomes = put_together(run_threads(sizes, load_each, configs))
        for source, expected, (outcome, loaded) in zip(layouts, saved, outcomes, strict=True):
            assert outcome.start == SAVED_AT
            try:
                assert_same_bits(replace(expected, tensors=loaded), expected)
                assert_close(outcome, reference)
            except AssertionError as error:
                raise AssertionError(f"saved on {source}, resumed on {sizes}") from error


@pytest.mark.exhaustive
def test_every_layout_resumes_on_every_other(tmp_path: Path) -> None:
    check_all_pairs(tmp_path, LAYOUTS)


@pytest.mark.slow
def test_both_versions_of_2bw_move_between_layouts(tmp_path: Path) -> None:
    check_all_pairs(tmp_path, TWO_VERSIONS, schedule={"name": "2bw"})
