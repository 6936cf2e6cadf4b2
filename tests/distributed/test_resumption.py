"""A run that is saved and resumed, on the same layout or another one, is the run that never stopped."""

from dataclasses import replace
from pathlib import Path

import pytest

from megapipe.config.run import PretrainConfig
from tests.checkpoint.runs import Outcome, assert_close, assert_same_bits, run
from tests.distributed.conftest import Make
from tests.distributed.layout_cases import (
    C2,
    C4,
    D2,
    D4,
    DT,
    EXHAUSTIVE,
    FP16,
    MUON,
    NO_MASTER,
    NOTHING,
    ONE,
    P2,
    P4,
    SHARED,
    T2,
    UNCLIPPED,
    Groups,
    context,
    schedule,
    sequence,
    zero,
)

Part = tuple[dict[str, int], Groups]
RISING: Groups = {**FP16, "loss_scale": {"initial": 256.0, "window": 4}}
"""The loss scale rises on the way, so that its counters matter."""
SLOW = pytest.mark.slow


def outcome(make: Make, folder: Path, model: str, part: Part, run_options: Groups, until: int) -> Outcome:
    """Train or resume the run of a folder on a layout until a step, and save it there."""
    sizes, layout = part
    config: PretrainConfig = make(model, sizes, run_options, layout)
    config.checkpoint = replace(config.checkpoint, every=None, at_end=True, asynchronous=False)
    config.training = replace(config.training, directory=str(folder))
    return run(sizes, config, until)


MOMENTS: Groups = {**NO_MASTER, "optimizer": {"moment_dtype": "bf16"}}
RESUMED = [
    ("gpt2-untied-dropout", schedule("2bw"), P2, P4),
    ("llama", {**schedule("pipedream"), **UNCLIPPED}, P2, P2),
    ("llama", MUON, P2, ONE),
    pytest.param("llama", RISING, ONE, ONE, marks=EXHAUSTIVE),
    pytest.param("gpt2-untied-dropout", schedule("2bw"), P2, ONE, marks=EXHAUSTIVE),
    pytest.param("bert-pre-dropout", schedule("1f1b"), P2, P4, marks=EXHAUSTIVE),
    pytest.param("bert-pre-dropout", schedule("2bw"), P2, P4, marks=EXHAUSTIVE),
    pytest.param("llama", {**NO_MASTER, **MUON}, P2, ONE, marks=EXHAUSTIVE),
    pytest.param("gpt2", {**MOMENTS, **schedule("1f1b")}, P2, ONE, marks=SLOW),
    pytest.param("gpt2", {**MOMENTS, **schedule("2bw")}, P2, P2, marks=SLOW),
]


@pytest.mark.parametrize(("model", "options", "first", "second"), RESUMED)
def test_a_resumed_run_goes_on_with_the_same_bits(
    make: Make, tmp_path: Path, model: str, options: Groups, first: dict[str, int], second: dict[str, int]
) -> None:
    steps = 7 if options is RISING else 4
    whole = outcome(make, tmp_path / "whole", model, (first, NOTHING), options, 2 * steps)
    for number, sizes in enumerate((first, second)):
        resumed = outcome(make, tmp_path / "parts", model, (sizes, NOTHING), options, (number + 1) * steps)
        assert resumed.start == number * steps
    assert_same_bits(resumed, whole)
    if options == MUON:
        assert set(whole.tensors) == {"weights", "momentum", "first_moment", "second_moment"}
        assert "blocks.0.mlp.up.weight" not in whole.tensors["second_moment"]


@pytest.mark.parametrize(
    ("model", "parts"),
    [
        ("llama", [(C2, context("ring")), (C4, context("all_to_all")), (ONE, NOTHING)]),
        ("gpt2-untied-dropout", [(P2, SHARED), (P4, SHARED), (ONE, NOTHING)]),
        pytest.param("gpt2-untied-dropout", [(T2, sequence()), (T2, NOTHING)], marks=SLOW),
        pytest.param("gpt2-untied-dropout", [(T2, NOTHING), (T2, sequence())], marks=SLOW),
    ],
)
def test_a_run_goes_on_with_other_shards_of_samples(make: Make, tmp_path: Path, model: str, parts: list[Part]) -> None:
    whole = outcome(make, tmp_path / "whole", model, parts[-1], NOTHING, 2 * len(parts))
    for number, part in enumerate(parts):
        resumed = outcome(make, tmp_path / "parts", model, part, NOTHING, 2 * (number + 1))
        assert resumed.start == 2 * number
    assert_close(resumed, whole)


@SLOW
def test_checkpoints_of_muon_move_between_shards(make: Make, tmp_path: Path) -> None:
    """Each layout reads the bits of weights and moments that another one has saved."""

    def after(step: int, part: Part) -> Outcome:
        return outcome(make, tmp_path, "llama", part, MUON, step)

    sharded = after(2, (D4, zero(3)))
    for part in ((D2, zero(1)), (ONE, NOTHING)):
        assert_same_bits(after(2, part), sharded)
    alone = after(3, (ONE, NOTHING))
    assert_same_bits(after(3, (DT, zero(2))), alone)


def test_other_masks_are_another_run(make: Make, tmp_path: Path) -> None:
    outcome(make, tmp_path, "bert-pre-dropout", (ONE, NOTHING), NOTHING, 2)
    with pytest.raises(Exception, match=r"data\.mask_probability is 0\.3 and was 0\.15"):
        outcome(make, tmp_path, "bert-pre-dropout", (ONE, NOTHING), {"data": {"mask_probability": 0.3}}, 4)
