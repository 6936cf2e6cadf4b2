"""Features in pairs: each pair of values of tests/support/layouts.py, compared with one process and the formulas.

Losses, first gradients and weights are those of one process, bit for bit where no sum is reordered. What every rank
exchanges, keeps between steps and holds for a while is what megapipe/layout/prediction.py predicts, to the byte.
"""

import itertools
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch

from megapipe.config import ConfigError
from megapipe.config.parallel import MeshShape
from megapipe.config.rope import RopeScaling
from megapipe.config.run import PretrainConfig
from megapipe.layout.prediction import RankPrediction, predict_rank
from megapipe.optim import muon
from megapipe.parallel.mesh import Mesh
from megapipe.training.validation import validate
from tests.distributed.conftest import Corpora
from tests.support.bert_runs import MODERN, POST_NORM
from tests.support.counting_groups import counts_of
from tests.support.covering import Case, completed, covering_array, possible_pairs
from tests.support.equality import check_bits, check_close, check_gradients, check_weights
from tests.support.gpt_runs import RankRun, assembled
from tests.support.layout_runs import LayoutRun, run_layout
from tests.support.layouts import (
    AXES,
    BASE,
    RULES,
    Change,
    Rule,
    adds_in_one_order,
    allowed,
    config_of,
    oracle_of,
    sizes_of,
    world_size,
)
from tests.support.meshes import run_mesh, run_threads
from tests.support.patience import undisturbed

MOST_CASES = 60
CASES = covering_array(AXES, allowed)
FAST = min((case for case in CASES if case["pipeline"] == "2"), key=world_size)
"""The first pipeline with the fewest ranks."""
EVERY_CASE = [
    case
    if case == FAST
    else pytest.param(case, marks=pytest.mark.slow if number % 10 == 1 else pytest.mark.exhaustive)
    for number, case in enumerate(CASES)
]
PAIRS_OF_SAMPLES = {"micro_size": 2}
OPTIONS: list[tuple[Case, Change]] = [
    (
        {"schedule": "modular", "data": "2", "context": "2 ring", "zero": "3"},
        {"zero": {"shard_size": 2, "reduce_dtype": "bf16", "weight_buffers": 1}, "batch": PAIRS_OF_SAMPLES},
    ),
    (
        {"schedule": "zb_h1", "model": "llama", "tensor": "2", "pipeline": "2", "sequence": "on"},
        {
            "parallel": {"sequence_chunks": 2},
            "training": {"fp8": "tensorwise"},
            "batch": PAIRS_OF_SAMPLES,
            "optimizer": {"name": "muon"},
        },
    ),
    (
        {"model": "bert", "tied": "untied", "pipeline": "2", "context": "2 all-to-all", "offload": "activations"},
        {"batch": PAIRS_OF_SAMPLES, "offload": {"activations": "blocks", "prefetch": 2, "num_blocks": 1}},
    ),
    (
        {"schedule": "1f1b", "model": "llama", "data": "2", "context": "2 ring", "zero": "1"},
        {"optimizer": {"name": "muon"}},
    ),
    (
        {"schedule": "modular", "model": "llama", "data": "2", "tensor": "2", "zero": "3"},
        {"optimizer": {"name": "muon"}, "batch": PAIRS_OF_SAMPLES},
    ),
    (
        {"schedule": "gpipe", "tensor": "2", "recompute": "full", "precision": "bf16"},
        {"training": {"fp8": "tensorwise", "fp8_first_kept": 1}, "recompute": {"every": 2}},
    ),
    (
        {"schedule": "zb_h1", "model": "llama", "tensor": "2", "recompute": "full"},
        {"model": {"mtp_layers": 2}, "training": {"fp8": "tensorwise"}},
    ),
    ({"schedule": "dualpipe_v", "model": "llama", "data": "2", "pipeline": "2", "zero": "3"}, {}),
    ({"schedule": "v_min", "tensor": "2", "pipeline": "2", "recompute": "selective", "precision": "bf16"}, {}),
    ({"pipeline": "2", "tied": "untied"}, {"parallel": {"vocabulary": "pipeline"}}),
    (
        {"schedule": "zb_h1", "model": "llama", "tied": "untied", "data": "2", "pipeline": "2", "zero": "3"},
        {"parallel": {"vocabulary": "pipeline"}, "training": {"precision": "bf16"}},
    ),
    (
        {"schedule": "zb_h1", "model": "llama", "data": "2", "pipeline": "2", "zero": "3"},
        {"parallel": {"vocabulary": "pipeline_2"}, "training": {"precision": "bf16"}},
    ),
]
"""Cases that the array omits, and other changes to their configuration."""
WINDOWS: Change = {
    "model": {"layer_kinds": {"local": {"sliding_window": 5, "rope_theta": 100.0}}, "layer_pattern": ("local", "base")}
}
NO_ROPE: Change = {
    "model": {
        "layer_kinds": {"no_rope": {"positions": "none", "qk_norm": True, "head_size": 4}},
        "layer_pattern": ("base", "no_rope", "base"),
    }
}
SHARED: Change = {"parallel": {"vocabulary": "pipeline"}}
EXPERTS: Change = {
    "model": {
        "num_experts": 4,
        "experts_per_token": 4,
        "ffn_hidden_size": 48,
        "layer_kinds": {"dense": {"num_experts": None, "ffn_hidden_size": 64}},
        "layer_pattern": ("dense", "base"),
    }
}
SINKS: Change = {
    "model": {
        "attention_sinks": True,
        "layer_kinds": {"local": {"sliding_window": 5}, "none": {"attention_sinks": False}},
        "layer_pattern": ("local", "base", "none"),
    }
}
ALIBI: Change = {
    "model": {
        "positions": "alibi",
        "embedding_norm": True,
        "layer_kinds": {"rotary": {"positions": "rotary", "sliding_window": 5}},
        "layer_pattern": ("base", "rotary", "base"),
    }
}
ROBERTA: Change = {"model": {"sentence_head": False, "token_types": 1, "first_position": 2}, "data": {"pairs": "none"}}
ALBERT: Change = {"model": {"embedding_size": 16, "shared_blocks": True}}
MODERNBERT: Change = {
    "model": {name: value for name, value in vars(MODERN).items() if value != getattr(POST_NORM, name)},
    "data": {"pairs": "none"},
}
LATENTS: Change = {
    "model": {
        "num_kv_heads": None,
        "kv_latent_size": 12,
        "query_latent_size": 20,
        "head_size": 8,
        "rotary_head_size": 4,
        "value_head_size": 6,
        "bias": "attention",
        "layer_kinds": {"whole": {"query_latent_size": None, "value_head_size": 12}},
        "layer_pattern": ("base", "whole"),
    }
}
CHUNKS: Change = {
    "model": {"layer_kinds": {"chunked": {"attention_chunk_size": 4}}, "layer_pattern": ("chunked", "base", "chunked")}
}
FURTHER: Change = {
    "model": {
        "mtp_layers": 2,
        "mtp_loss_weight": 0.5,
        "num_experts": 4,
        "experts_per_token": 4,
        "ffn_hidden_size": 48,
        "layer_kinds": {"dense": {"num_experts": None, "ffn_hidden_size": 64}},
        "layer_pattern": ("base", "dense"),
    }
}
SLICES: Change = {
    "model": {"max_positions": 64, **SINKS["model"]},
    "data": {"sequence_length": 64},
    "schedule": {"slices": 3, "slice_split": "flops"},
}
MIXED: list[tuple[Case, Change]] = [
    ({"tensor": "2", "documents": "isolated", "sequence": "on"}, WINDOWS),
    ({"pipeline": "2", "context": "2 ring"}, WINDOWS),
    ({"context": "2 all-to-all", "zero": "3", "recompute": "selective", "data": "2"}, WINDOWS),
    ({"schedule": "zb_h1", "pipeline": "2", "tensor": "2", "sequence": "on"}, NO_ROPE),
    ({"pipeline": "2", "tensor": "2", "recompute": "full"}, EXPERTS),
    ({"pipeline": "2", "tensor": "2", "tied": "untied"}, SHARED),
    ({"pipeline": "2", "tensor": "2"}, {"parallel": {"vocabulary": "pipeline_2"}}),
    ({"pipeline": "2", "data": "2", "zero": "2"}, SHARED),
    ({"pipeline": "4"}, SHARED),
    ({"data": "2", "tensor": "2", "zero": "3", "sequence": "on"}, {**EXPERTS, "zero": {"expert_shard_size": 1}}),
    ({"context": "2 ring", "schedule": "zb_v", "pipeline": "2"}, EXPERTS),
    ({"schedule": "zb_h1", "pipeline": "2", "tensor": "2", "sequence": "on"}, SINKS),
    ({"context": "2 ring", "data": "2", "zero": "3", "documents": "isolated"}, SINKS),
    ({"context": "2 all-to-all", "schedule": "zb_v", "pipeline": "2"}, SINKS),
    ({"precision": "bf16", "recompute": "selective", "offload": "optimizer"}, SINKS),
    ({"schedule": "zb_h1", "tensor": "2", "context": "2 ring"}, ALIBI),
    ({"context": "2 all-to-all", "documents": "isolated", "recompute": "full"}, ALIBI),
    ({"model": "bert", "tensor": "2", "sequence": "on", "schedule": "zb_h1", "pipeline": "2"}, ROBERTA),
    ({"model": "bert", "context": "2 ring", "zero": "3", "data": "2"}, ROBERTA),
    ({"model": "bert", "data": "2", "tensor": "2", "sequence": "on", "zero": "3"}, ALBERT),
    ({"model": "bert", "tensor": "2", "sequence": "on", "schedule": "zb_h1", "pipeline": "2"}, ALBERT),
    ({"model": "bert", "context": "2 ring", "recompute": "full"}, ALBERT),
    ({"model": "bert", "pipeline": "2", "tensor": "2", "precision": "bf16", "offload": "optimizer"}, ALBERT),
    ({"model": "bert", "tensor": "2", "offload": "weights", "recompute": "full"}, ALBERT),
    ({"model": "bert", "pipeline": "2", "data": "2"}, {**ALBERT, "optimizer": {"name": "muon"}}),
    ({"model": "bert", "tensor": "2", "context": "2 ring"}, {"model": {"positions": "alibi"}}),
    (
        {"model": "bert", "pipeline": "2", "recompute": "selective", "schedule": "zb_h1"},
        {"model": {"positions": "alibi"}},
    ),
    ({"model": "bert", "pipeline": "2", "tensor": "2", "sequence": "on"}, MODERNBERT),
    ({"model": "bert", "context": "2 ring", "schedule": "zb_h1", "pipeline": "2"}, MODERNBERT),
    ({"model": "bert", "context": "2 all-to-all", "zero": "3", "recompute": "selective", "data": "2"}, MODERNBERT),
    ({"schedule": "zb_h1", "pipeline": "2", "tensor": "2", "sequence": "on"}, LATENTS),
    ({"tensor": "2", "recompute": "selective", "documents": "isolated"}, LATENTS),
    ({"context": "2 ring", "tensor": "2", "sequence": "on", "precision": "bf16"}, LATENTS),
    ({"context": "2 all-to-all", "zero": "3", "recompute": "full"}, LATENTS),
    ({"context": "2 all-to-all", "tensor": "2", "schedule": "1f1b in halves"}, LATENTS),
    ({"data": "2", "zero": "2", "offload": "activations", "tensor": "2"}, LATENTS),
    ({"data": "2", "zero": "1"}, {**LATENTS, "optimizer": {"name": "muon"}}),
    ({"data": "2", "tensor": "2", "zero": "3"}, {**LATENTS, "optimizer": {"name": "muon"}}),
    ({"pipeline": "2", "tensor": "2", "sequence": "on", "documents": "isolated"}, CHUNKS),
    ({"context": "2 all-to-all", "zero": "3", "data": "2", "recompute": "selective"}, CHUNKS),
    ({"schedule": "zb_h1", "pipeline": "2", "tensor": "2", "sequence": "on", "tied": "untied"}, FURTHER),
    ({"data": "2", "tensor": "2", "zero": "3", "recompute": "full"}, FURTHER),
    ({"pipeline": "2", "documents": "isolated", "recompute": "selective", "precision": "bf16"}, FURTHER),
    ({"schedule": "1f1b", "pipeline": "2", "data": "2", "zero": "2", "tied": "untied"}, FURTHER),
    ({"schedule": "gpipe", "pipeline": "2", "tied": "untied"}, FURTHER),
    ({"schedule": "zb_h1", "pipeline": "2", "recompute": "full"}, FURTHER),
    ({"schedule": "interleaved_1f1b", "pipeline": "2", "data": "2", "zero": "3", "offload": "activations"}, EXPERTS),
    (
        {"schedule": "seq1f1b", "pipeline": "2", "recompute": "full"},
        {**SLICES, "schedule": {**SLICES["schedule"], "chunks": 2}},
    ),
    ({"schedule": "seq1f1b", "data": "2", "zero": "3", "documents": "isolated"}, SLICES),
    (
        {"schedule": "seq1f1b", "model": "gpt2", "tensor": "2", "sequence": "on", "recompute": "selective"},
        {**SLICES, "model": {"max_positions": 64}, "batch": PAIRS_OF_SAMPLES},
    ),
    ({"schedule": "seq1f1b", "precision": "bf16", "recompute": "logits"}, SLICES),
]
"""Llamas whose blocks differ, and encoders."""
FORMS: dict[str, dict[str, dict[str, Any]]] = {
    "norms": {
        "pre": {},
        "sandwich": {"norm_position": "sandwich", "normalization": "rms_norm_unit_offset"},
        "output": {"norm_position": "output", "normalization": "rms_norm"},
        "stream": {"norm_position": "stream", "normalization": "layer_norm"},
        "parallel": {"parallel_residual": True, "normalization": "layer_norm_without_bias"},
    },
    "activation": {
        "swiglu": {},
        "swiglu_clamped": {"activation": "swiglu_clamped", "swiglu_alpha": 1.0, "swiglu_limit": 2.0},
        "geglu_tanh": {"activation": "geglu_tanh"},
        "reglu_squared": {"activation": "reglu_squared"},
        "silu": {"activation": "silu"},
    },
    "bias": {name: {} for name in ("all", "qkv", "mlp", "shared", "attention_shared", "none")},
    "positions": {
        "rotary": {},
        "partial": {"rotary_fraction": 0.5},
        "yarn": {"rope_scaling": RopeScaling(kind="yarn", factor=2.0, original_length=8)},
        "alibi": {"positions": "alibi"},
        "none": {"positions": "none"},
    },
    "attention": {
        "whole": {},
        "window": {"sliding_window": 5, "attention_scale": 0.3},
        "chunks": {"attention_chunk_size": 4},
        "sinks": {"attention_sinks": True},
        "softcap": {"attention_softcap": 2.0, "attention": "auto"},
        "latents": {**LATENTS["model"], "layer_kinds": {}, "layer_pattern": ()},
    },
    "heads": {
        "plain": {},
        "normalized": {"qk_norm": True},
        "normalized together": {"qk_norm": True, "qk_norm_over": "projection"},
        "one key": {"num_kv_heads": 1},
    },
    "mlp": {
        "dense": {},
        "softmax": {"num_experts": 4, "experts_per_token": 4, "router_bias": True},
        "sigmoid": {
            "num_experts": 4,
            "experts_per_token": 4,
            "router_scores": "sigmoid",
            "router_scale": 2.5,
            "router_groups": 2,
            "router_groups_chosen": 2,
            "shared_expert_size": 32,
        },
        "gated": {
            "num_experts": 4,
            "experts_per_token": 4,
            "normalize_expert_shares": False,
            "shared_expert_size": 32,
            "shared_expert_gate": True,
        },
    },
    "stream": {
        "plain": {},
        "scaled": {"embedding_scale": 2.5, "residual_scale": 0.6, "logit_scale": 0.5},
        "capped": {"logit_softcap": 3.0, "embedding_norm": True},
    },
    "further": {"0": {}, "1": {"mtp_layers": 1}},
}
"""Form of a model -> its kinds, and the fields of each."""
FORM_LAYOUTS: dict[str, Case] = {
    "one process": {"recompute": "selective"},
    "tensor": {"tensor": "2", "sequence": "on"},
    "context": {"context": "2 all-to-all", "precision": "bf16"},
    "halves": {"schedule": "zb_h1", "pipeline": "2", "tied": "untied"},
    "zero": {"data": "2", "zero": "3", "recompute": "full"},
    "offload": {"data": "2", "offload": "activations", "documents": "isolated"},
}
FORM_AXES = {"layout": tuple(FORM_LAYOUTS), **{form: tuple(kinds) for form, kinds in FORMS.items()}}
"""Axes of a second array, of forms of models on a few layouts."""
FORM_RULES = (
    {"attention": ("latents",), "positions": ("partial", "alibi", "none")},
    {"attention": ("latents",), "heads": ("normalized", "normalized together", "one key")},
    {"attention": ("latents",), "bias": ("qkv",)},
    {"attention": ("softcap",), "positions": ("alibi",)},
    {"norms": ("sandwich",), "heads": ("normalized together",)},
    {"stream": ("capped",), "further": ("1",)},
    {"layout": ("context",), "further": ("1",)},
    {"layout": ("tensor",), "heads": ("one key",)},
)
"""Kinds that do not go together; tests of the models name the reasons."""
FORM_CASES = covering_array(FORM_AXES, lambda case: not any(Rule(each, "").forbids(case) for each in FORM_RULES))
SCALARS = 4096
"""Bytes of tables and numbers that live between steps in addition to the buffers."""
NUMBERS = 512
"""Bytes of a step's own numbers: how many tokens count in each update, and the terms of a BERT's losses."""
TABLES = 1024
"""Bytes of the rotary tables of two blocks, of which activations that return from host memory bring copies."""

Oracles = Callable[[tuple[tuple[str, str], ...]], RankRun]


def name_of(case: Mapping[str, str]) -> str:
    """Values that are not the first of their feature."""
    return ", ".join(f"{axis} {value}" for axis, value in case.items() if value != BASE[axis]) or "nothing"


@pytest.fixture(scope="module")
def expected(small_corpora: Corpora) -> Oracles:
    """The run that a case has to equal, by the case of that run; each is run once."""
    return cache(lambda oracle: whole_run(config_of(dict(oracle), *small_corpora)))


def whole_run(config: PretrainConfig) -> RankRun:
    """Return the run of all ranks, which are threads, as that of one rank."""
    ranks: list[RankRun] = [each.run for each in run_threads(sizes_of(config), run_layout, config)]
    gradients = [shard for rank in ranks for shard in rank.gradients]
    return RankRun(ranks[0].results, gradients, [shard for rank in ranks for shard in rank.weights])


@pytest.mark.parametrize("case", EVERY_CASE, ids=name_of)
def test_feature_pairs_match_one_process_and_predicted_costs(
    small_corpora: Corpora, expected: Oracles, case: Case
) -> None:
    ranks = train_as_predicted(config_of(case, *small_corpora))
    check_equal(case, ranks, expected(tuple(oracle_of(case).items())))


@pytest.mark.slow
@pytest.mark.one_in(4)
@pytest.mark.parametrize(("case", "change"), OPTIONS, ids=lambda part: ", ".join(map(str, part.values())))
def test_options_of_a_feature_cost_what_is_predicted(small_corpora: Corpora, case: Case, change: Change) -> None:
    train_as_predicted(changed(config_of({**BASE, **case}, *small_corpora), change))


@pytest.mark.slow
@pytest.mark.one_in(8)
@pytest.mark.parametrize(("case", "change"), MIXED)
def test_unequal_blocks_match_one_process_and_predicted_costs(
    small_corpora: Corpora, monkeypatch: pytest.MonkeyPatch, case: Case, change: Change
) -> None:
    """Muon iterates in fp64: in bf16, last bits of gradients change updates by up to 5%."""
    monkeypatch.setattr(muon, "ITERATION_DTYPE", torch.float64)
    case = {**BASE, "model": "llama", **case}
    kept = {group: fields for group, fields in change.items() if group in ("model", "data", "batch", "optimizer")}
    oracle = whole_run(changed(config_of(oracle_of(case), *small_corpora), kept))
    ranks = train_as_predicted(changed(config_of(case, *small_corpora), change), run_layout_in_fp64)
    check_equal(case, ranks, oracle)


def run_layout_in_fp64(mesh: Mesh, config: PretrainConfig) -> LayoutRun:
    """Run a layout in a process of its own, whose Muon iterates in fp64."""
    muon.ITERATION_DTYPE = torch.float64
    return run_layout(mesh, config)


@pytest.mark.exhaustive
@pytest.mark.parametrize("case", FORM_CASES, ids=lambda case: ", ".join(case.values()))
def test_every_pair_of_forms_costs_what_is_predicted(small_corpora: Corpora, case: Case) -> None:
    config = config_of({**BASE, "model": "llama", **FORM_LAYOUTS[case["layout"]]}, *small_corpora)
    fields: dict[str, Any] = {"ffn_hidden_size": 48}
    for form, kinds in FORMS.items():
        fields |= kinds[case[form]]
    train_as_predicted(changed(config, {"model": {**fields, "bias": case["bias"]}}))


def changed(config: PretrainConfig, change: Change) -> PretrainConfig:
    for group, fields in change.items():
        setattr(config, group, replace(getattr(config, group), **fields))
    return config


Run = Callable[[Mesh, PretrainConfig], LayoutRun]


def train_as_predicted(config: PretrainConfig, run: Run = run_layout) -> list[RankRun]:
    """Train a configuration that is valid, at the predicted costs, and return the run of each rank."""
    validate(config, MeshShape(sizes_of(config)).world_size)
    ranks = predicted_and_counted(config, run)
    for each in ranks:
        check_costs(*each)
    return [rank.run for _, rank in ranks]


def predicted_and_counted(config: PretrainConfig, run: Run = run_layout) -> list[tuple[RankPrediction, LayoutRun]]:
    """Return the prediction and the run of each rank; on a busy machine gloo's threads may hold a tensor for longer
    than the wait, and then all is counted again."""

    def compared() -> list[tuple[RankPrediction, LayoutRun]]:
        ranks: list[LayoutRun] = run_mesh(sizes_of(config), run, config, timeout=120.0)
        predicted = (
            predict_rank(config, rank.schedule, number, predictions=rank.predictions)
            for number, rank in enumerate(ranks)
        )
        return list(zip(predicted, ranks, strict=True))

    return undisturbed(compared, lambda ranks: all(activations_fit(*each) for each in ranks))


def activations_fit(predicted: RankPrediction, rank: LayoutRun) -> bool:
    """Whether activations, and the peak of all bytes that are not state, are those predicted, except for the few
    numbers of a step that no op of a layer declares."""
    tables = TABLES if predicted.costs.config.offload.activations != "none" else 0
    together = float(np.sum(predicted.timeline[:-1], axis=0).max())
    counted = [rank.peak.activations, rank.together]
    return counted == pytest.approx([predicted.peak().activations, together], abs=NUMBERS + tables)


def check_costs(predicted: RankPrediction, rank: LayoutRun) -> None:
    """Everything is predicted, all but activations to the byte."""
    check_state_and_traffic(predicted, rank)
    peak = predicted.peak()
    assert activations_fit(predicted, rank), f"counted {rank.peak.activations} and {rank.together}, predicted {peak}"


def check_state_and_traffic(predicted: RankPrediction, rank: LayoutRun) -> None:
    """Traffic, state between steps, and the most of what comes and goes within one, to the byte."""
    assert counts_of(rank.traffic) == predicted.traffic()
    assert rank.state == predicted.state()
    assert rank.state.total <= rank.lasting - rank.host <= rank.state.total + SCALARS
    peak = predicted.peak()
    assert list(rank.peak[:-1]) == [peak.weights, peak.gradients, peak.summands, peak.reloaded]


def check_equal(case: Case, ranks: list[RankRun], oracle: RankRun) -> None:
    """Bit for bit where no sum is reordered; else within the tolerances of the design, which bf16's own are wider."""
    if adds_in_one_order(case):
        check_bits(ranks, oracle)
    elif case["precision"] == "fp32":
        check_close(ranks, oracle, first_loss=1e-5)
        check_weights(ranks, oracle, 1e-4)
    else:
        losses = [result.loss for result in ranks[0].results]
        assert losses == pytest.approx([result.loss for result in oracle.results], rel=1e-3)
        actual = assembled([rank.gradients for rank in ranks])
        check_gradients(actual, assembled([oracle.gradients]), own=2e-2, layer=2e-2)
        # pipedream updates after each micro-batch, and so moves weights further.
        check_weights(ranks, oracle, 0.2 if case["schedule"] == "pipedream" else 0.1)


def broken(case: Mapping[str, str]) -> list[Rule]:
    return [rule for rule in RULES if rule.forbids(case)]


def test_the_array_omits_forbidden_cases_and_wide_pipelines_alone() -> None:
    """The array's own construction is tested in tests/support/test_covering.py, four stages with two of something
    else, eight ranks, with the table of docs/parallelism.md."""
    assert len(CASES) <= MOST_CASES
    for pair in possible_pairs(AXES, lambda case: not broken(case)) - possible_pairs(AXES, allowed):
        assert ("pipeline", "4") in pair, f"{dict(pair)} is left out without a rule"


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: " with ".join(rule.values))
def test_what_is_left_out_is_refused_with_the_reason(small_corpora: Corpora, rule: Rule) -> None:
    for values in itertools.product(*rule.values.values()):
        chosen = dict(zip(rule.values, values, strict=True))
        case = completed(chosen, AXES, lambda case: broken(case) in ([], [rule]), lambda _, axis: AXES[axis])
        assert case is not None, f"{chosen} breaks other rules too"
        with pytest.raises(ConfigError, match=rule.reason):
            validate(config_of(case, *small_corpora), world_size(case))
