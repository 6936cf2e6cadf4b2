"""Every way to run a model, as one table: a feature's values and what each changes in the configuration.

A new feature is a line in `FEATURES`; what it cannot be combined with is a line in `RULES`, and the configuration has
to refuse that combination with the words in that line.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from megapipe.config.bert import BertDataConfig
from megapipe.config.parallel import DIMENSIONS
from megapipe.config.run import PretrainConfig
from tests.schedules.support import TRAINED
from tests.support.bert_runs import PRE_NORM, make_bert_config
from tests.support.gpt_runs import GPT2_SHAPE, LLAMA_SHAPE, make_config

Change = Mapping[str, Mapping[str, Any]]
"""Group of the configuration -> field -> value."""

MODELS = {
    "gpt2": replace(
        GPT2_SHAPE, num_layers=3, attention="unfused", embedding_dropout=0.1, hidden_dropout=0.1, attention_dropout=0.1
    ),
    "llama": replace(LLAMA_SHAPE, num_layers=3, attention="sdpa"),
    "bert": replace(PRE_NORM, num_layers=3, attention="unfused"),
}
MAXIMUM_RANKS = 4


def parallel(**sizes: Any) -> Change:
    """A change of the layout."""
    return {"parallel": sizes}


def _schedules() -> dict[str, Change]:
    changes: dict[str, Change] = {name: {"schedule": {"name": name}} for name in TRAINED}
    changes["pipedream"] = {**changes["pipedream"], "optimizer": {"clip_norm": None}}
    changes["seq1f1b"] = {"schedule": {"name": "seq1f1b", "slices": 2}}
    changes["1f1b in halves"] = {"schedule": {"name": "1f1b", "two_bp": True}}
    return changes


FEATURES: dict[str, dict[str, Change]] = {
    "schedule": _schedules(),
    "model": {name: {} for name in MODELS},
    "attention": {
        "plain": {},
        "partly rotated": {
            "model": {"positions": "rotary", "rotary_fraction": 0.5, "attention_scale": 0.3, "bias": "attention"}
        },
        "capped": {
            "model": {"attention": "auto", "attention_softcap": 2.0, "qk_norm": True, "qk_norm_over": "projection"}
        },
    },
    "block": {
        "pre": {},
        "sandwich": {"model": {"norm_position": "sandwich", "embedding_scale": 5.7, "logit_softcap": 3.0}},
        "output": {"model": {"norm_position": "output", "activation": "relu_squared", "residual_scale": 0.6}},
        "parallel": {"model": {"parallel_residual": True, "activation": "geglu", "embedding_scale": 2.5}},
    },
    "tied": {"tied": {"model": {"tie_embeddings": True}}, "untied": {"model": {"tie_embeddings": False}}},
    "tensor": {"1": parallel(tensor=1), "2": parallel(tensor=2)},
    "data": {"1": parallel(data=1), "2": parallel(data=2)},
    "pipeline": {"1": parallel(pipeline=1), "2": parallel(pipeline=2), "4": parallel(pipeline=4)},
    "recompute": {
        "none": {},
        "selective": {"recompute": {"method": "selective"}},
        "full": {"recompute": {"method": "full"}},
        "logits": {"recompute": {"logits": True}},
    },
    "precision": {
        "fp32": {},
        "bf16": {"training": {"precision": "bf16"}},
        "fp16": {"training": {"precision": "fp16"}, "loss_scale": {"initial": 256.0}},
    },
    "documents": {"joined": {}, "isolated": {"data": {"isolate_documents": True}}},
    "sequence": {"off": {}, "on": parallel(sequence=True)},
    "context": {
        "1": {},
        "2 ring": parallel(context=2, context_attention="ring"),
        "2 all-to-all": parallel(context=2, context_attention="all_to_all"),
    },
    "zero": {"0": {}, **{stage: {"zero": {"stage": int(stage)}} for stage in "123"}},
    "offload": {
        "nothing": {},
        "activations": {"offload": {"activations": "blocks"}},
        "optimizer": {"offload": {"optimizer": True}},
        "weights": {"offload": {"optimizer": True, "weights": True}},
    },
}


@dataclass(frozen=True)
class Rule:
    """Values of several features that do not go together, and what the configuration says of them (an expression)."""

    values: Mapping[str, Collection[str]]
    reason: str

    def forbids(self, case: Mapping[str, str]) -> bool:
        """Whether all of its features have one of its values."""
        for feature, values in self.values.items():  # noqa: SIM110 - covering arrays ask millions of times
            if case.get(feature) not in values:
                return False
        return True


OTHER_ORDERS = ("dualpipe_v", "gis", "gis_h", "v_auto", "v_half", "v_min")
"""Schedules whose actions and stages the others have too, in another order; a covering array leaves them out."""
HALVES = ("zb_h1", "zb_h2", "zb_v", "zb_auto", "1f1b in halves", *OTHER_ORDERS)
CHUNKED = ("interleaved_1f1b", "modular", "zb_v", *OTHER_ORDERS)
RULES = (
    Rule(
        {"model": ("bert",), "block": ("sandwich", "output")}, "model.norm_position is .*; it must be one of pre, post"
    ),
    Rule({"schedule": HALVES, "recompute": ("logits",)}, "recompute.logits is true, but this schedule splits the"),
    Rule({"schedule": CHUNKED, "pipeline": ("4",)}, "parallel.pipeline 4 x 2 stages per rank of .* exceeds"),
    Rule(
        {"schedule": ("pipedream",), "tied": ("tied",), "pipeline": ("2", "4")},
        "model.tie_embeddings is true, but the tied weight is on the first and the last rank",
    ),
    Rule(
        {"model": ("bert",), "documents": ("isolated",)},
        "data.isolate_documents is True; it is an option for GPT samples",
    ),
    Rule({"sequence": ("on",), "tensor": ("1",)}, "parallel.sequence"),
    Rule(
        {"zero": ("1", "2", "3"), "data": ("1",), "context": ("1",)}, "zero.stage is . but there is only one replica"
    ),
    Rule(
        {"recompute": ("selective",), "offload": ("activations",)},
        "recompute.method selective cannot be combined with offload",
    ),
    Rule(
        {"recompute": ("full",), "offload": ("activations",)},
        "recompute.method full recomputes every block, so offload.activations blocks",
    ),
    Rule({"offload": ("weights",), "zero": ("1", "2", "3")}, "offload.weights cannot be combined with zero.stage"),
    Rule({"offload": ("weights",), "schedule": ("2bw", "pipedream")}, "offload.weights is true, but .* never flushes"),
    Rule({"precision": ("fp16",), "schedule": ("pipedream",)}, "training.precision fp16 skips steps"),
)


LEFT_OUT = (*OTHER_ORDERS, "seq1f1b")
AXES = {feature: tuple(value for value in values if value not in LEFT_OUT) for feature, values in FEATURES.items()}
BASE = {feature: values[0] for feature, values in AXES.items()}
"""Every feature at its first value."""


@cache
def _ranks(value: str) -> int:
    return int(value.split()[0])


def world_size(case: Mapping[str, str]) -> int:
    """Ranks of a case, features that it leaves open at their first value."""
    size = 1
    for dimension in DIMENSIONS:
        size *= _ranks(case.get(dimension, "1"))
    return size


def allowed(case: Mapping[str, str]) -> bool:
    """Whether no rule forbids a case, and it takes no more ranks than tests start."""
    if world_size(case) > MAXIMUM_RANKS:
        return False
    for rule in RULES:  # noqa: SIM110 - covering arrays ask millions of times
        if rule.forbids(case):
            return False
    return True


def config_of(case: Mapping[str, str], prefix: str, bert: BertDataConfig) -> PretrainConfig:
    """The configuration of a case. prefix: GPT's corpus. bert: a BERT's.

    AdamW divides a gradient by its own size, so that noise in one that should be zero would move a weight as far as a
    real gradient does; the large epsilon keeps updates in proportion.
    """
    model = MODELS[case["model"]]
    config = make_bert_config(bert, model) if case["model"] == "bert" else make_config(prefix, model)  # type: ignore[arg-type]
    config.optimizer = replace(config.optimizer, epsilon=1e-3)
    for feature, value in case.items():
        for group, fields in FEATURES[feature][value].items():
            setattr(config, group, replace(getattr(config, group), **fields))
    return config


def sizes_of(config: PretrainConfig) -> dict[str, int]:
    """The mesh of a configuration."""
    return {name: getattr(config.parallel, name) for name in DIMENSIONS}


def adds_in_one_order(case: Mapping[str, str]) -> bool:
    """Whether no sum is reordered, so that all numbers are those of one process bit for bit.

    Sums are reordered where ranks share them (data, tensor, context), where samples come in slices, and where the
    gradient of the output projection is found chunk by chunk.
    """
    alone = all(case.get(dimension, "1").startswith("1") for dimension in ("data", "tensor", "context"))
    return alone and case["recompute"] != "logits" and case["schedule"] != "seq1f1b"


def oracle_of(case: Mapping[str, str]) -> dict[str, str]:
    """The case that this one has to equal: one process that keeps everything, with the simplest schedule.

    Schedules that never flush have a recursion of their own: 2bw on one process is its own oracle for every layout;
    pipedream's depends on the number of stages and, as it updates after each micro-batch, of replicas.
    """
    oracle = {**case, "schedule": "1f1b"}
    for feature in ("tensor", "data", "pipeline", "recompute", "sequence", "context", "zero", "offload"):
        if feature in case:
            oracle[feature] = BASE[feature]
    if case["schedule"] in ("2bw", "pipedream"):
        oracle["schedule"] = case["schedule"]
    if case["schedule"] == "pipedream":
        oracle |= {"pipeline": case["pipeline"], "data": case["data"]}
    return oracle
