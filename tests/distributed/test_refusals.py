"""Options that do not go together are refused with the value and the rule, before any rank starts.

The rules for pairs of features are those of `tests/support/layouts.py`, which test_covering.py checks.
"""

import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from megapipe.config import ConfigError
from megapipe.config.load import parse
from megapipe.config.memory import RecomputeConfig
from megapipe.config.parallel import MeshShape, ParallelConfig
from megapipe.inference.trained_model import on_layout
from megapipe.schedules import build
from megapipe.schedules.text import dumps
from megapipe.training.validation import attention_kept, validate
from tests.distributed.conftest import Make
from tests.distributed.layout_cases import (
    D2,
    D4,
    DP,
    FULL,
    ONE,
    P2,
    SELECTIVE,
    SHARED,
    T2,
    TP,
    Groups,
    every,
    fp8,
    schedule,
    sequence,
    zero,
)
from tests.support.gpt_runs import run_gpt
from tests.support.meshes import run_threads

REFUSED: list[tuple[dict[str, int], Groups, str]] = [
    (ONE, {"recompute": {"every": 0}}, r"recompute.every is 0; it must be at least 1"),
    (ONE, {"recompute": {"method": "full", "num_blocks": 0}}, r"recompute.num_blocks is 0"),
    (ONE, {"recompute": {"method": "selective", "parts": []}}, r"recompute.parts is empty"),
    (ONE, every(2, SELECTIVE), r"need recompute.method full, and it is selective; set it to full"),
    (ONE, {**SELECTIVE, "training": {"compile": True}}, r"selective cannot be combined with training.compile"),
    (D4, zero(1, shard_size=3), r"zero.shard_size 3 does not divide the 4 replicas"),
    (D4, zero(1, shard_size=1), r"zero.shard_size is 1; it must be at least 2"),
    (D2, zero(3, weight_buffers=0), r"zero.weight_buffers is 0; it must be at least 1"),
    (DP, {**zero(3, weight_buffers=1), **schedule("dualpipe_v")}, r"zero.weight_buffers is 1, but dualpipe_v over"),
    (DP, {**zero(3, weight_memory=8e-5), **schedule("dualpipe_v")}, r"zero.weight_memory is 8e-05 GiB, but dualp"),
    (
        P2,
        {"offload": {"weights": True, "optimizer": True, "weight_buffers": 1}, **schedule("dualpipe_v")},
        r"offload.weight_buffers is 1, but dualpipe_v overlaps the forward",
    ),
    (D2, zero(1, gradient_buffers=3), r"gradient_buffers is 3 but zero.stage 1 does"),
    (D2, zero(0, reduce_dtype="bf16"), r"zero.reduce_dtype is bf16 but zero.stage 0 does"),
    (ONE, sequence(), r"parallel.tensor is 1; .*set parallel.tensor to 2 or more"),
    (T2, {**sequence(), "data": {"sequence_length": 15}}, r"data.sequence_length 15 is not divisible by .*tensor 2"),
    (T2, sequence(3), r"16 .* parallel.tensor 2 x .*chunks 3.*of 6"),
    (T2, {"parallel": {"sequence_chunks": 2}}, r"sequence_chunks is 2 but parallel.sequence is false"),
    (T2, sequence(0), r"sequence_chunks is 0; it must be at least 1"),
    (ONE, fp8("rowwise", precision="fp16"), r"fp8 rowwise already scales every operand .*precision bf16"),
    (ONE, fp8("tensorwise", fp8_first_kept=2), r"fp8_first_kept 2 and .*must leave some of the 2 blocks"),
    (ONE, fp8("tensorwise", fp8_last_kept=-1), r"fp8_last_kept is -1; it must be at least 0"),
    (ONE, fp8("none", fp8_last_kept=1), r"fp8_last_kept 1, but training.fp8 is none"),
    (ONE, SHARED, "parallel.pipeline is 1"),
    (TP, {"parallel": {**SHARED["parallel"], "sequence": True}}, "parallel.sequence is true"),
    (P2, {**SHARED, "recompute": {"logits": True}}, "recompute.logits is true"),
    (P2, {**SHARED, **schedule("2bw")}, "2bw never flushes, so its output layer cannot be sharded"),
    (P2, {**SHARED, **schedule("dualpipe_v")}, "dualpipe_v overlaps forwards with backwards"),
    (P2, {**SHARED, **schedule("seq1f1b")}, "seq1f1b passes slices of sequences"),
]


@pytest.mark.parametrize(
    ("sizes", "groups", "message"), REFUSED, ids=lambda part: part if isinstance(part, str) else ""
)
def test_options_that_do_not_go_together_are_refused(
    make: Make, sizes: dict[str, int], groups: Groups, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        validate(make("gpt2", sizes, groups), MeshShape(sizes).world_size)


def test_a_lowered_schedule_fits_recomputation_and_sums(make: Make, tmp_path: Path) -> None:
    file = tmp_path / "schedule.txt"
    lowered: Groups = {"schedule": {"name": str(file)}}
    file.write_text(dumps(build("1f1b", 1, 8, units_per_stage=[4])))
    with pytest.raises(ConfigError, match=r"is lowered and defines recomputation itself"):
        validate(make("llama", ONE, FULL, lowered), 1)
    config = make("llama", T2, sequence(), lowered)
    with pytest.raises(Exception, match=r"sums of gradients over shards of the tokens or replicas no, but this run"):
        run_threads(T2, run_gpt, config, 1)
    file.write_text(dumps(build("1f1b", 1, 8, units_per_stage=[4], data_parallel=True)))
    actual, expected = (run_threads(T2, run_gpt, each, 2)[0] for each in (config, make("llama", T2, sequence())))
    assert [result.loss for result in actual.results] == [result.loss for result in expected.results]


def test_the_note_on_selective_recomputation_knows_fused_attention(make: Make) -> None:
    config, cpu = make("llama", ONE, SELECTIVE), torch.device("cpu")
    assert "runs fused here" in str(attention_kept(config, cpu))
    for recompute in (RecomputeConfig(method="selective", parts=["mlp"]), RecomputeConfig(method="full")):
        assert attention_kept(replace(config, recompute=recompute), cpu) is None
    assert attention_kept(replace(config, model=replace(config.model, attention="unfused")), cpu) is None


def test_generation_takes_whole_samples(make: Make) -> None:
    """Its passes have few tokens, which need not divide."""
    config = make("gpt2", T2, sequence())
    assert config.parallel.sequence
    assert not on_layout(config, ParallelConfig(tensor=2, data=1, device="cpu")).parallel.sequence


def test_the_example_of_sharded_state_fits_its_launch_line() -> None:
    path = Path(__file__).resolve().parents[2] / "examples/parallel/zero.yaml"
    line = re.search(r"megapipe train -n (\d+) --config (\S+)", path.read_text())
    assert line is not None
    assert line[2] == path.stem
    config = parse(["--config", str(path)])
    validate(config, int(line[1]))
    assert config.schedule.chunks == config.model.num_layers + 2
