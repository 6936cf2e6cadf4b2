"""Models with experts in the loop: loads are evened out, checkpoints and texts go to any layout, refusals say why."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megapipe.calibration import commands as plan_commands
from megapipe.layers.feed_forward import Router
from megapipe.parallel.mesh import Mesh
from megapipe.planner.command.main import main
from megapipe.spec.layers import load_variations, model_layers
from megapipe.training.validation import validate
from tests.checkpoint.runs import config_in
from tests.checkpoint.runs import run as run_with_checkpoints
from tests.checkpoint.toy import alone
from tests.inference.test_generate import GREEDY, grown, limits_of
from tests.layers.bound import bind
from tests.planner.command.plan import ROOT
from tests.support.gpt_runs import LLAMA_SHAPE, make_config, opened
from tests.support.meshes import run_mesh

MODEL = replace(LLAMA_SHAPE, num_experts=4, ffn_hidden_size=48)


def variations(
    mesh: Mesh, corpus: str, groups: dict[str, dict[str, Any]], steps: int = 2, favour: float = 0.0, **changes: Any
) -> tuple[list[list[float]], list[float]]:
    """Return the reported variations of each block in each step, and those of the last step's own choices.

    favour: added to the first expert's biases before the first step.
    """
    model = replace(MODEL, num_kv_heads=4, init_std=0.3, **changes)
    config = make_config(corpus, model, batch={"global_size": 4}, **groups)
    replica, given = opened(mesh, config)
    for state in replica.states():
        for segment in state.table:
            if segment.spec.name.endswith("router.bias"):
                state.in_shard(state.master, segment)[:1] += favour
    units = (unit for stage in replica.stages.values() for copies in stage.units for unit in copies)
    routers = [module for unit in units for module in unit.modules() if isinstance(module, Router)]
    counts: dict[Router, Tensor] = {}

    def count(router: Router, _inputs: object, chosen: tuple[Tensor, Tensor]) -> None:
        counts[router] += torch.bincount(chosen[1].flatten(), minlength=4)

    for router in routers:
        router.register_forward_hook(count)
    reported = []
    for step in range(steps):
        counts.update({router: torch.zeros(4) for router in routers})
        scale = 128.0 if replica.loss_scaler is not None else 1.0
        (result,) = (*replica.engine.feed(given(step, 1e-3, loss_scale=scale)), *replica.engine.drain())
        tokens = config.batch.global_size * config.data.sequence_length
        reported.append(load_variations(config.model, result.squared_loads, tokens))
    return reported, [float(each.std(correction=0) / each.mean()) for each in counts.values()]


@pytest.mark.exhaustive
def test_biases_even_out_how_often_experts_are_chosen(corpus: str) -> None:
    left_alone, evened = (
        [max(blocks) for blocks in variations(alone(), corpus, {}, 40, 1.0, expert_balance_rate=rate)[0]]
        for rate in (1e-9, 0.05)
    )
    assert evened[0] == left_alone[0]
    assert sum(evened[-10:]) < 0.5 * sum(left_alone[-10:])


def test_load_variations_follow_the_choices_on_every_layout(corpus: str) -> None:
    ((expected, counted),) = run_mesh({}, variations, corpus, {}, backend="threads")
    assert expected[1] == pytest.approx(counted, rel=1e-6)
    assert len(counted) == 2
    assert min(counted) > 0.1
    layouts: list[tuple[dict[str, int], dict[str, dict[str, Any]]]] = [
        ({"tensor": 2}, {"parallel": {"tensor": 2, "sequence": True}}),
        ({"pipeline": 2}, {"parallel": {"pipeline": 2}, "schedule": {"name": "zb_h1"}}),
        ({"data": 2}, {"parallel": {"data": 2}, "zero": {"stage": 2}}),
    ]
    for sizes, groups in layouts:
        for reported, _ in run_mesh(sizes, variations, corpus, groups, backend="threads"):
            for actual, wanted in zip(reported, expected, strict=True):
                assert actual == pytest.approx(wanted, rel=1e-5), sizes
    ((scaled, counted),) = run_mesh({}, variations, corpus, {"training": {"precision": "fp16"}}, backend="threads")
    assert scaled[1] == pytest.approx(counted, rel=1e-6), "a loss scale is no part of a load"


def test_every_layout_gives_the_same_texts() -> None:
    model = replace(MODEL, max_positions=48, init_std=0.3)
    (expected,) = run_mesh({}, grown, model, GREEDY, limits_of(model), backend="threads")
    assert len({tuple(text.generated) for text in expected}) == len(expected), "texts should differ"
    for texts in run_mesh({"tensor": 2, "pipeline": 2}, grown, model, GREEDY, limits_of(model), backend="threads"):
        assert texts == expected


@pytest.mark.slow
@pytest.mark.parametrize(
    ("first", "second"), [({"tensor": 2}, {"data": 2}), ({"pipeline": 2}, {"tensor": 4})], ids=str
)
def test_runs_resume_on_another_layout(
    corpus: str, tmp_path: Path, first: dict[str, int], second: dict[str, int]
) -> None:
    model = replace(MODEL, num_kv_heads=4)
    zero = {"stage": 2 if "data" in second else 0}
    straight = run_with_checkpoints({}, config_in(tmp_path / "straight", corpus, model), 16)
    run_with_checkpoints(first, config_in(tmp_path / "parts", corpus, model), 10)
    resumed = run_with_checkpoints(second, config_in(tmp_path / "parts", corpus, model, zero=zero), 16)
    assert resumed.start == 10
    assert [loss for _, loss in resumed.losses] == pytest.approx([loss for _, loss in straight.losses], rel=1e-3)
    for block in range(2):
        name = f"blocks.{block}.mlp.router.bias"
        assert straight.tensors["weights"][name].any()


def test_top_1_experts_learn_from_shares_of_scores() -> None:
    """A share that is normalised over one expert is 1, whatever its score: the router would get no gradient."""
    model = replace(MODEL, experts_per_token=1, normalize_expert_shares=False)
    validate(make_config("shard", model), 1)
    block = bind(model_layers(model)[1], model)
    x = torch.randn((2, 12, model.hidden_size), generator=torch.Generator().manual_seed(1))
    for normalize, learns in ((False, True), (True, False)):
        block.module.mlp.router.model = replace(model, normalize_expert_shares=normalize)
        block.module.mlp(x, None).square().sum().backward()
        gradient = block.gradients().pop("blocks.0.mlp.router.weight").abs().max().item()
        assert (gradient > 1e-6) is learns
        block = bind(model_layers(model)[1], model)


def test_a_dry_run_takes_tokens_to_be_evenly_shared(capsys: pytest.CaptureFixture[str]) -> None:
    """Its tensors have no values that could choose."""
    example = str(ROOT / "examples/parallel/experts.yaml")
    assert main(["dry-run", example, "--devices=2"], {"dry-run": plan_commands.run_dry_run}) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "shapes: a forward and a backward of every stage fit together (1 in all)" in lines
    assert lines[-1] == "2 ranks checked in one process"
