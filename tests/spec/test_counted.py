"""Counted bytes, FLOPs and traffic of every kind of layer are exactly those that its ops declare."""

import random
from dataclasses import replace
from itertools import combinations, product
from math import prod
from typing import Any

import pytest
from torch import Tensor

from megapipe.config.bert import BertModelConfig
from megapipe.config.memory import Part
from megapipe.config.model import ModelConfig
from megapipe.parallel import collectives
from megapipe.parallel.groups import Group, Work
from megapipe.parallel.mesh import Mesh
from megapipe.spec.layers import layer_flops, layer_ops, model_layers, tensor_problems
from megapipe.spec.ops import ContextAttention, MicrobatchShape
from tests.spec.counting import DTYPES, PREDICTIONS, SEQUENCE, Subject
from tests.spec.sizes import predicted_bytes, sent_bytes
from tests.support.meshes import run_threads

SIZES: dict[str, Any] = {"vocabulary_size": 104, "num_layers": 1, "hidden_size": 64, "num_heads": 4}
LLAMA: dict[str, Any] = {
    "num_kv_heads": 2, "normalization": "rms_norm", "activation": "swiglu", "positions": "rotary",
    "bias": "none", "tie_embeddings": False,
}  # fmt: skip
DROPOUT = {"hidden_dropout": 0.1, "embedding_dropout": 0.1}
GEMMA: dict[str, Any] = {
    **LLAMA, "norm_position": "sandwich", "normalization": "rms_norm_unit_offset", "activation": "geglu_tanh",
}  # fmt: skip
EXPERTS: dict[str, Any] = {"num_experts": 4, "ffn_hidden_size": 96, "expert_balance_rate": 0.0}
SHARED = {"shared_expert_size": 80}
SIGMOIDS: dict[str, Any] = {
    "router_scores": "sigmoid", "router_groups": 2, "router_groups_chosen": 1, "router_scale": 2.5,
}  # fmt: skip
LATENTS: dict[str, Any] = {
    **LLAMA, "num_kv_heads": None, "kv_latent_size": 24, "query_latent_size": 40, "head_size": 16,
    "rotary_head_size": 8, "value_head_size": 12,
}  # fmt: skip
GPT: dict[str, dict[str, Any]] = {
    "gpt2": {},
    "gpt2 with dropout": DROPOUT,
    "llama": LLAMA,
    "grouped heads": {"num_kv_heads": 2, "bias": "none"},
    "one key head": {"num_kv_heads": 1},
    "llama with one key head": {**LLAMA, "num_kv_heads": 1},
    "qwen3": {**LLAMA, "qk_norm": True, "head_size": 24},
    "llama with a partial rotation": {**LLAMA, "bias": "attention", "rotary_fraction": 0.5},
    "olmo 2's norms": {**LLAMA, "bias": "mlp", "qk_norm": True, "qk_norm_over": "projection"},
    "latents": {**LATENTS, "bias": "attention"},
    "latents of keys and values alone": {**LATENTS, "query_latent_size": None, "value_head_size": 24},
    "capped scores": {**LLAMA, "attention_softcap": 5.0, "qk_norm": True, "qk_norm_over": "projection"},
    "further tokens": {**LLAMA, "mtp_layers": 2, "logit_scale": 0.25, "embedding_scale": 3.0},
    "a further token": {"positions": "none", "mtp_layers": 1, "hidden_dropout": 0.1, "normalization": "rms_norm"},
    "sinks": {**LLAMA, "attention_sinks": True, **DROPOUT},
    "chunks": {**LLAMA, "attention_chunk_size": SEQUENCE // 2},
    "alibi": {"positions": "alibi", "num_kv_heads": 2, "qk_norm": True, **DROPOUT},
    "alibi with one key head": {"positions": "alibi", "num_kv_heads": 1, "qk_norm": True, "bias": "none"},
    "normalized embeddings": {"embedding_norm": True},
    "gpt-oss experts": {**LLAMA, **EXPERTS, "bias": "all", "router_bias": True, "activation": "swiglu_clamped"},
    "experts": {**EXPERTS, "normalize_expert_shares": False},
    "llama with experts": {**LLAMA, **EXPERTS},
    "gemma": {**GEMMA, "embedding_scale": 8.0},
    "gemma with dropout": {**GEMMA, **DROPOUT, "normalization": "layer_norm"},
    "experts between norms": {**GEMMA, **EXPERTS},
    "olmo2": {**LLAMA, "norm_position": "output", "qk_norm": True},
    "residuals of norms": {"norm_position": "stream", "embedding_norm": True},
    "residuals of norms with dropout": {**LLAMA, "norm_position": "stream", **DROPOUT},
    "gpt-neox": {"parallel_residual": True, "tie_embeddings": False},
    "gpt-neox with dropout": {"parallel_residual": True, **DROPOUT},
    "granite": {**LLAMA, "residual_scale": 0.5, "logit_scale": 0.25, "embedding_scale": 3.0},
    "qwen2 experts": {**LLAMA, **EXPERTS, **SHARED, "shared_expert_gate": True, "normalize_expert_shares": False},
    "deepseek experts": {**LLAMA, **EXPERTS, **SHARED, **SIGMOIDS},
    "biases of shared experts": {**LLAMA, **EXPERTS, **SHARED, "bias": "attention_shared"},
    "sigmoid experts": {**EXPERTS, **SIGMOIDS, "normalize_expert_shares": False, "router_bias": True},
    "dropout with shared experts": {**EXPERTS, **SHARED, **DROPOUT},
}
MODERN: dict[str, Any] = {
    "norm_position": "pre", "normalization": "layer_norm_without_bias", "embedding_norm": True,
    "positions": "rotary", "activation": "geglu", "bias": "none", "sliding_window": 5, "token_types": 0,
    "transform_bias": False, "transform_activation": "relu_squared", "sentence_head": False,
}  # fmt: skip
BERT: dict[str, dict[str, Any]] = {
    "post-norm bert": {"norm_position": "post"},
    "post-norm bert with dropout": {"norm_position": "post", **DROPOUT},
    "pre-norm bert": {"norm_position": "pre"},
    "pre-norm bert with dropout": {"norm_position": "pre", **DROPOUT},
    "pre-norm bert without sentence head": {"norm_position": "pre", "sentence_head": False, **DROPOUT},
    "roberta": {"sentence_head": False, "token_types": 1, "first_position": 2},
    "albert": {"embedding_size": 16, "shared_blocks": True, **DROPOUT},
    "modernbert": MODERN,
    "modernbert's first block": {**MODERN, "attention_norm": False, "sliding_window": None},
    "modernbert with dropout": {**MODERN, **DROPOUT, "attention_norm": False, "normalization": "layer_norm"},
}
RARE = (
    "a further token", "gemma with dropout", "experts between norms", "gpt-neox", "granite", "roberta",
    "modernbert with dropout",
)  # fmt: skip
NAMES = [pytest.param(name, marks=pytest.mark.exhaustive) if name in RARE else name for name in (*GPT, *BERT)]
LAYOUTS: dict[str, tuple[dict[str, int], ContextAttention]] = {
    "one rank": ({}, "ring"),
    "2 tensor ranks": ({"tensor": 2}, "ring"),
    "4 tensor ranks": ({"tensor": 4}, "ring"),
    "ring": ({"context": 2}, "ring"),
    "all-to-all": ({"context": 2}, "all_to_all"),
}
PARTS: tuple[Part, ...] = ("attention", "mlp", "norms")
SUBSETS: list[list[Part]] = [list(chosen) for count in range(4) for chosen in combinations(PARTS, count)] + [["block"]]
CHOICES = list(product(("sdpa", "unfused"), ("fp32", "bf16"), (1, 3), SUBSETS, (False, True), (False, True)))
"""Attention, precision, size of a micro-batch, recomputed parts, recomputed logits, isolated documents."""
FAST, EXHAUSTIVE = {"one rank": 5}, 32
"""Choices that a tier draws for a model in a layout, the fast tier 2 where nothing is written."""


def model_of(name: str, attention: Any) -> ModelConfig:
    kind, fields = (BertModelConfig, BERT[name]) if name in BERT else (ModelConfig, GPT[name])
    dropout = {"attention_dropout": 0.1} if "hidden_dropout" in fields and attention == "unfused" else {}
    return kind(**SIZES, attention=attention, **fields, **dropout)


def counted(mesh: Mesh, model: ModelConfig, kind: ContextAttention, choice: Any) -> dict[str, tuple[int, int]]:
    """Return bytes saved for the backward, and handed over to the weight half, by kind of layer."""
    _, precision, micro_size, parts, logits, documents = choice
    counts = {}
    for layer in model_layers(model):
        how: dict[str, Any] = {"mesh": mesh, "kind": kind, "documents": documents, "recompute": parts}
        sizes = model, layer, micro_size, DTYPES[precision]
        saved = Subject(*sizes, **how, recompute_logits=logits and layer.kind == "head").saved()
        counts[layer.kind] = saved, Subject(*sizes, **how).handed_over()
    return counts


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("tier", ["some", pytest.param("many", marks=pytest.mark.exhaustive)])
def test_counted_bytes_are_declared_ones(name: str, layout: str, tier: str) -> None:
    sizes, kind = LAYOUTS[layout]
    tensor, context = sizes.get("tensor", 1), sizes.get("context", 1)
    if tensor_problems(model_of(name, "sdpa"), tensor):
        pytest.skip("the model does not divide")
    if tier == "some" and tensor == 2 and not tensor_problems(model_of(name, "sdpa"), 4):
        pytest.skip("four tensor ranks show more than two")
    if layout == "ring" and name == "chunks":
        pytest.skip("a ring does not attend in chunks")
    if context > 1 and GPT.get(name, {}).get("mtp_layers"):
        pytest.skip("further tokens need whole samples")
    possible = [each for each in CHOICES if not each[-1] or (layout == "one rank" and name in GPT)]
    if "attention_softcap" in GPT.get(name, {}):
        possible = [each for each in possible if each[0] == "unfused"]
    draw = random.Random(name + layout)
    for choice in draw.sample(possible, EXHAUSTIVE if tier == "many" else FAST.get(layout, 2)):
        attention, precision, micro_size, parts, logits, documents = choice
        model = model_of(name, attention)
        ranks: list[dict[str, tuple[int, int]]] = run_threads(sizes, counted, model, kind, choice)
        for layer in model_layers(model):
            actual = tuple(sum(column) for column in zip(*(each[layer.kind] for each in ranks), strict=True))
            fields: dict[str, Any] = {
                "recompute": parts,
                "isolate_documents": documents,
                "tensor": tensor,
                "sequence_parallel": tensor > 1,
                "context": context,
                "context_attention": kind,
                "predictions": PREDICTIONS if name in BERT else None,
            }
            predicted = [
                len(ranks)
                * predicted_bytes(model, layer, micro_size, SEQUENCE, precision, attention, **fields, **each)
                for each in ({"recompute_logits": logits}, {"halves": True})
            ]
            # Which expert gets how many rows the data decides, so numbers of rows differ between ranks.
            saves_differ = model.num_experts is not None and tensor > 1
            checked = slice(int(saves_differ), 2)
            assert actual[checked] == tuple(predicted)[checked], (layer.kind, choice)


@pytest.mark.parametrize("name", NAMES)
def test_counted_flops_are_declared_ones(name: str) -> None:
    # Under a window, the unfused products compute what the mask hides; declared are visible pairs.
    model = replace(model_of(name, "unfused"), sliding_window=None)
    predictions = PREDICTIONS if name in BERT else None
    layers = model_layers(model)
    for layer, recompute_logits in [*((layer, False) for layer in layers), (layers[-1], True)]:
        counted_flops = Subject(model, layer, recompute_logits=recompute_logits).flops()
        declared = layer_flops(model, layer, 3, SEQUENCE, predictions, recompute_logits)
        # The backward of attention in pieces computes scores again, as fused attention does.
        in_pieces = layer.kind == "block" and model.why_pieces is not None
        again = 2 * 3 * SEQUENCE**2 * model.num_heads * model.head_dim * in_pieces
        assert sum(counted_flops) == declared.executed + again, layer.kind
        assert counted_flops[0] == declared.forward or (recompute_logits and name in GPT)


@pytest.mark.parametrize("name", NAMES)
def test_counted_products_of_recomputed_parts_are_declared_ones(name: str) -> None:
    model = replace(model_of(name, "unfused"), sliding_window=None)
    _, block, *_, head = model_layers(model)
    without = {layer.kind: sum(Subject(model, layer).flops()) for layer in (block, head)}
    for layer, part in [*product((block, head) if model.mtp_layers else (block,), PARTS), (head, "block")]:
        shape = MicrobatchShape(model, 3, SEQUENCE, "fp32", "unfused", recompute=frozenset({part}))
        ops = layer_ops(layer.kind, shape)
        kernels = [kernel for op in ops for kernel in op.kernels() if kernel.phase == "recompute"]
        declared = sum(2 * prod(each.product) * each.compute * each.times for each in kernels if each.product)
        assert sum(Subject(model, layer, recompute=[part]).flops()) - without[layer.kind] == declared, part


def traffic(mesh: Mesh, model: ModelConfig, kind: ContextAttention, precision: str) -> tuple[int, int]:
    """Return the bytes that one rank of a ring sends forward and backward."""
    sent = []
    group = mesh.group("context")
    shift = group.shift

    def counting(tensor: Tensor, into: Tensor) -> Work:
        sent.append(tensor.nbytes)
        return shift(tensor, into)

    group.shift = counting  # type: ignore[method-assign]
    subject = Subject(model, model_layers(model)[1], dtype=DTYPES[precision], mesh=mesh, kind=kind)
    output = subject.run()
    forward = sum(sent)
    output.sum().backward()
    return forward, sum(sent) - forward


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_a_ring_sends_what_is_declared(name: str, size: int, precision: Any) -> None:
    model = model_of(name, "sdpa")
    expected = sent_bytes(model, 3, SEQUENCE, precision, "ring", size)
    assert run_threads({"context": size}, traffic, model, "ring", precision) == [expected] * size


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("name", ["gpt2", "llama", "one key head"])
def test_an_all_to_all_sends_what_is_declared(name: str, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of(name, "sdpa")
    sent: list[int] = []
    exchange = collectives._exchanged

    def counting(x: Tensor, group: Group) -> Tensor:
        sent.append(sum(part.nbytes for rank, part in enumerate(x) if rank != group.rank))
        return exchange(x, group)

    monkeypatch.setattr(collectives, "_exchanged", counting)
    run_threads({"context": size}, traffic, model, "all_to_all", "fp32")
    assert len(sent) == 4 * size
    assert sum(sent) == size * sum(sent_bytes(model, 3, SEQUENCE, "fp32", "all_to_all", size))
