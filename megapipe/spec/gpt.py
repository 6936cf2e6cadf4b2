"""Every parameter of a GPT, declared once: the layers of a model from its configuration."""

import math
from dataclasses import replace

from megapipe.config.model import ModelConfig
from megapipe.spec.parameters import Init, LayerSpec, ParameterSpec

ZEROS = Init("zeros")
ONES = Init("ones")
ROUTER = "mlp.router.weight"
"""Path of what chooses a token's experts, in blocks that have some."""


def gpt_layers(model: ModelConfig) -> tuple[LayerSpec, ...]:
    """The layers of a GPT in order: `embedding`, `blocks.0` to `blocks.{num_layers - 1}`, `head`.

    Shapes are the global canonical ones, in which every tensor-parallel shard is one box.
    With tied embeddings the head's `output.weight` is the spec of the embedding's `word.weight` itself.
    """
    embedding = _embedding(model)
    blocks = [transformer_block(model, index) for index in range(model.num_layers)]
    return (embedding, *blocks, _head(model, embedding.parameters["word.weight"]))


def tensor_problems(model: ModelConfig, tensor_size: int) -> list[str]:
    """Why `tensor_size` ranks cannot share the matrices of this model, one message per rule; empty when they can.

    The vocabulary is padded and never in the way.
    """
    if tensor_size < 1:
        return [f"parallel.tensor is {tensor_size}; it must be at least 1"]
    lengths = {"model.num_heads": model.num_heads}
    if model.num_experts is None:
        lengths["model.ffn_hidden_size"] = model.ffn_size
    else:
        lengths["model.num_experts"] = model.num_experts
    if model.num_kv_heads is not None:
        lengths["model.num_kv_heads"] = model.num_kv_heads
    common = math.gcd(*lengths.values())
    working = ", ".join(str(size) for size in range(1, common + 1) if common % size == 0)
    return [
        f"{name} {length} is not divisible by parallel.tensor {tensor_size}; "
        f"tensor sizes that divide this model: {working}"
        for name, length in lengths.items()
        if length % tensor_size
    ]


def _embedding(model: ModelConfig) -> LayerSpec:
    parameters = {"word.weight": table(model, "embedding.word.weight", model.vocabulary_size, padded=True)}
    if model.positions == "learned":
        parameters["position.weight"] = table(model, "embedding.position.weight", model.max_positions, padded=False)
    return LayerSpec("embedding", "embedding", 0, parameters)


def transformer_block(model: ModelConfig, index: int) -> LayerSpec:
    """One block: attention and MLP, or experts, with their norms."""
    parameters = {
        **norm_parameters(model, "attention_norm"),
        **_attention(model),
        **norm_parameters(model, "mlp_norm"),
        **(_mlp(model) if model.num_experts is None else _experts(model, model.num_experts)),
    }
    return LayerSpec(f"blocks.{index}", "block", index, named(f"blocks.{index}", parameters))


def _head(model: ModelConfig, word: ParameterSpec) -> LayerSpec:
    parameters = named("head", norm_parameters(model, "norm"))
    if model.tie_embeddings:
        parameters["output.weight"] = word
    else:
        parameters["output.weight"] = table(model, "head.output.weight", model.vocabulary_size, padded=True)
    return LayerSpec("head", "head", 0, parameters)


def _attention(model: ModelConfig) -> dict[str, ParameterSpec]:
    """Projections of one attention. qkv holds, per kv group, the group's query heads, then its key, then its value."""
    hidden, head_dim = model.hidden_size, model.head_dim
    rows = (model.kv_heads, model.num_heads // model.kv_heads + 2, head_dim)
    found = [matrix("attention.qkv.weight", (*rows, hidden), 0, model.init_std)]
    if model.bias != "none":
        found.append(vector("attention.qkv.bias", rows, 0, ZEROS))
    if model.qk_norm:
        found.append(vector("attention.query_norm.weight", (head_dim,), None, ONES))
        found.append(vector("attention.key_norm.weight", (head_dim,), None, ONES))
    found.append(matrix("attention.output.weight", (hidden, model.num_heads * head_dim), 1, _residual_std(model)))
    if model.bias == "all":
        found.append(vector("attention.output.bias", (hidden,), None, ZEROS))
    return by_name(found)


def _mlp(model: ModelConfig) -> dict[str, ParameterSpec]:
    """Matrices of one MLP. Under swiglu axis 0 of `up` is (gate, up)."""
    hidden, ffn = model.hidden_size, model.ffn_size
    rows, axis = ((2, ffn), 1) if model.activation == "swiglu" else ((ffn,), 0)
    found = [matrix("mlp.up.weight", (*rows, hidden), axis, model.init_std)]
    if model.bias == "all":
        found.append(vector("mlp.up.bias", rows, axis, ZEROS))
    found.append(matrix("mlp.down.weight", (hidden, ffn), 1, _residual_std(model)))
    if model.bias == "all":
        found.append(vector("mlp.down.bias", (hidden,), None, ZEROS))
    return by_name(found)


def _experts(model: ModelConfig, number: int) -> dict[str, ParameterSpec]:
    """A router and the stacked matrices of the experts, which tensor ranks share whole. Under swiglu axis 1 of `up` is
    (gate, up)."""
    hidden, ffn = model.hidden_size, model.ffn_size
    rows = (number, 2, ffn) if model.activation == "swiglu" else (number, ffn)
    found = [
        matrix(ROUTER, (number, hidden), None, model.init_std),
        matrix("mlp.up.weight", (*rows, hidden), 0, model.init_std),
        matrix("mlp.down.weight", (number, hidden, ffn), 0, _residual_std(model)),
    ]
    if model.bias == "all":
        found += [vector("mlp.up.bias", rows, 0, ZEROS), vector("mlp.down.bias", (number, hidden), 0, ZEROS)]
    if model.balances_experts:
        found.append(
            replace(vector("mlp.router.bias", (number,), None, ZEROS), balance_rate=model.expert_balance_rate)
        )
    return by_name(found)


def norm_parameters(model: ModelConfig, path: str) -> dict[str, ParameterSpec]:
    """Weight and, for layer norm, bias of the norm at `path`."""
    found = [vector(f"{path}.weight", (model.hidden_size,), None, ONES)]
    if model.normalization == "layer_norm":
        found.append(vector(f"{path}.bias", (model.hidden_size,), None, ZEROS))
    return by_name(found)


def _residual_std(model: ModelConfig) -> float:
    """Matrices that write to the residual stream start smaller (GPT-2 report, section 2.3)."""
    return model.init_std / math.sqrt(2 * model.num_layers) if model.scale_residual_init else model.init_std


def table(model: ModelConfig, name: str, rows: int, *, padded: bool) -> ParameterSpec:
    """A lookup table or the output projection: decayed, yet no matrix for optimizers that orthogonalise matrices."""
    return ParameterSpec(
        name=name,
        shape=(rows, model.hidden_size),
        partition_axis=0 if padded else None,
        init=Init("normal", model.init_std),
        decay=True,
        matrix=False,
        padded=padded,
    )


def matrix(path: str, shape: tuple[int, ...], axis: int | None, std: float) -> ParameterSpec:
    """A matrix of a linear layer; axis: the one that tensor ranks share."""
    return ParameterSpec(path, shape, axis, Init("normal", std), decay=True, matrix=True)


def vector(path: str, shape: tuple[int, ...], axis: int | None, init: Init) -> ParameterSpec:
    """A bias or a norm's weight: never decayed."""
    return ParameterSpec(path, shape, axis, init, decay=False, matrix=False)


def by_name(specs: list[ParameterSpec]) -> dict[str, ParameterSpec]:
    """The parameters of one layer by their path in it."""
    return {spec.name: spec for spec in specs}


def named(layer: str, parameters: dict[str, ParameterSpec]) -> dict[str, ParameterSpec]:
    """The same parameters with the layer's name in front of each global name."""
    return {path: replace(spec, name=f"{layer}.{path}") for path, spec in parameters.items()}
