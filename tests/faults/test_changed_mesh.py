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

from megapipe.config.run import PretrainConfig
from tests.checkpoint.runs import Outcome, Sizes, assert_close, assert_same_bits, config_in, run
from tests.support.gpt_runs import GPT2_SHAPE, write_shard

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
    config = config_in(folder, corpus, MODEL, batch={"global_size": 4}, zero={"stage": stage}, **groups)
    return replace(config, checkpoint=replace(config.checkpoint, every=SAVED_AT))


def unsaved(config: PretrainConfig, resume: bool) -> PretrainConfig:
    return replace(config, checkpoint=replace(config.checkpoint, every=None, at_end=False, resume=resume))


def check_all_pairs(folder: Path, layouts: Sequence[Sizes], **groups: dict[str, Any]) -> None:
    corpus = write_shard(folder)
    folders = [folder / "-".join(str(size) for size in sizes.values()) for sizes in layouts]
    saved: list[Outcome] = []
    reference: Outcome | None = None
    for sizes, own in zip(layouts, folders, strict=True):
        config = configuration(own, corpus, sizes, saved_stage(sizes), **groups)
        outcome = run(sizes, config, SAVED_AT)
        resumed, undisturbed = (run(sizes, unsaved(config, resume), END) for resume in (True, False))
        assert (resumed.start, undisturbed.start) == (SAVED_AT, 0)
        assert_same_bits(replace(outcome, tensors=resumed.loaded), outcome)
        assert_same_bits(resumed, undisturbed)
        saved.append(outcome)
        reference = undisturbed if reference is None else reference
        assert_close(undisturbed, reference)
    assert reference is not None
    for sizes in layouts:
        for source, own, expected in zip(layouts, folders, saved, strict=True):
            config = configuration(own, corpus, sizes, loaded_stage(sizes), **groups)
            outcome = run(sizes, unsaved(config, True), END)
            assert outcome.start == SAVED_AT
            try:
                assert_same_bits(replace(expected, tensors=outcome.loaded), expected)
                assert_close(outcome, reference)
            except AssertionError as error:
                raise AssertionError(f"saved on {source}, resumed on {sizes}") from error


@pytest.mark.exhaustive
def test_every_layout_resumes_on_every_other(tmp_path: Path) -> None:
    check_all_pairs(tmp_path, LAYOUTS)


@pytest.mark.slow
def test_both_versions_of_2bw_move_between_layouts(tmp_path: Path) -> None:
    check_all_pairs(tmp_path, TWO_VERSIONS, schedule={"name": "2bw"})
