"""The layers of a model in order, with every parameter declared once, and sums over a layer's ops."""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from megapipe.config.bert import BertModelConfig
from megapipe.config.model import BASE_KIND, ModelConfig
from megapipe.spec.heads import bert_head_ops, gpt_head_ops, last_norm_ops, shared_output_ops
from megapipe.spec.ops import Flops, MicrobatchShape, Op, total_flops
from megapipe.spec.parameters import LayerKind, LayerSpec
from megapipe.spec.transformer import block_ops, embedding_ops, position_ops, shared_word_ops


def model_layers(model: ModelConfig) -> tuple[LayerSpec, ...]:
    """Return the layers of a model in order: `embedding`, `blocks.0` to `blocks.{num_layers - 1}`, `head`.

    Shapes are the global canonical ones, in which every tensor-parallel shard is one box. With tied embeddings the
    head's `output.weight` is the spec of the embedding's `word.weight` itself. Shared blocks have the specs of the
    first one. Blocks that predict further tokens are a part of the head, and have the specs of embedding and output
    matrix; the head's variant is theirs.
    """
    shape = MicrobatchShape(model)
    embedding = _layer("embedding", "embedding", 0, embedding_ops(shape))
    ops = {name: tuple(block_ops(MicrobatchShape(each))) for name, each in model.kinds_of_layers.items()}
    kinds = map(model.kind_of_layer, range(model.num_layers))
    blocks = [_layer(f"blocks.{index}", "block", index, ops[kind], kind) for index, kind in enumerate(kinds)]
    if model.shares_blocks:
        shared = {path: replace(spec, one_accumulator=True) for path, spec in blocks[0].parameters.items()}
        blocks = [replace(block, parameters=shared) for block in blocks]
    kind = model.kind_of_head
    head = _layer("head", "head", 0, _head_ops(MicrobatchShape(model.of_kind(kind))), kind)
    if model.tie_embeddings:
        head.parameters["output.weight"] = embedding.parameters["word.weight"]
    for depth in range(model.mtp_layers):
        head.parameters[f"mtp.{depth}.word.weight"] = embedding.parameters["word.weight"]
        head.parameters[f"mtp.{depth}.output.weight"] = head.parameters["output.weight"]
    return (embedding, *blocks, head)


def sharded_vocabulary(layers: Sequence[LayerSpec], ranks: int) -> tuple[LayerSpec, ...]:
    """Return a GPT's layers with embedding and head cut in two. The last two layers are the output matrix and the
    table of word embeddings, which this number of pipeline ranks shard; if they are tied, each rank has the same rows
    of both."""
    embedding, *blocks, head = layers
    (positions, words), (norm, output) = (
        (
            {path: spec for path, spec in layer.parameters.items() if path != shared},
            {shared: replace(layer.parameters[shared], shards=ranks, one_accumulator=True)},
        )
        for layer, shared in ((embedding, "word.weight"), (head, "output.weight"))
    )
    return (
        LayerSpec("embedding.positions", "positions", 0, positions),
        *blocks,
        LayerSpec("head.norm", "norm", 0, norm),
        LayerSpec("head.output", "output", 0, output),
        LayerSpec("embedding.words", "words", 0, words),
    )


def layer_ops(kind: LayerKind, shape: MicrobatchShape) -> tuple[Op, ...]:
    """Return the ops of a kind of layer for a micro-batch on one rank. shape: its model is the layer's own, as
    `ModelConfig.of_kind` returns it for the layer's variant."""
    kinds = {
        "embedding": embedding_ops,
        "block": block_ops,
        "head": _head_ops,
        "norm": last_norm_ops,
        "output": shared_output_ops,
        "positions": position_ops,
        "words": shared_word_ops,
    }
    return tuple(kinds[kind](shape))


def _head_ops(shape: MicrobatchShape) -> Iterable[Op]:
    return bert_head_ops(shape) if isinstance(shape.model, BertModelConfig) else gpt_head_ops(shape)


def layer_flops(
    model: ModelConfig,
    layer: LayerSpec,
    micro_size: int,
    sequence_length: int,
    predictions: int | None = None,
    recompute_logits: bool = False,
) -> Flops:
    """Return the FLOPs of a micro-batch of `micro_size` samples of `sequence_length` tokens, padding not counted.

    predictions: tokens of a sample that the head predicts, by default all. recompute_logits: the backward recomputes
    the logits.
    """
    layer_model = model.of_kind(layer.variant)
    shape = MicrobatchShape(
        layer_model, micro_size, sequence_length, predictions=predictions, recompute_logits=recompute_logits
    )
    return total_flops(layer_ops(layer.kind, shape))


def model_flops_per_token(
    model: ModelConfig, layers: tuple[LayerSpec, ...], sequence_length: int, predictions: int | None = None
) -> int:
    """Return the FLOPs of forward and backward per trained token. MFU is this number times the tokens per second,
    divided by the devices' peak."""
    per_sample = sum(layer_flops(model, layer, 1, sequence_length, predictions).total for layer in layers)
    return per_sample // sequence_length


def one_of_each(layers: Iterable[LayerSpec]) -> list[LayerSpec]:
    """Return the first layer of every kind and variant, in order."""
    first_layers: dict[tuple[str, str], LayerSpec] = {}
    for layer in layers:
        first_layers.setdefault((layer.kind, layer.variant), layer)
    return list(first_layers.values())


def active_parameters(model: ModelConfig, layers: Sequence[LayerSpec]) -> int:
    """Return the number of parameters that one token uses, without experts that it does not choose; tied ones count
    once."""
    used = {}
    for layer in layers:
        own = model.of_kind(layer.variant)
        for spec in layer.parameters.values():
            of_experts = spec.state_unit == "experts"
            active = spec.num_elements // (own.num_experts or 1) * own.experts_per_token
            used[spec.name] = active if of_experts else spec.num_elements
    return sum(used.values())


def load_variations(model: ModelConfig, squared_loads: Sequence[float], tokens: int) -> list[float]:
    """Return, for each block with balanced experts, the standard deviation of their token counts over the mean.

    It is 0 if all experts got the same number of tokens; the expert with the most got at most 1 + variation x
    sqrt(experts - 1) times the mean. squared_loads: for each block, the sum of its experts' squared loads. A load is
    the number of tokens that an expert got beyond the mean, times the number of experts. tokens: number of tokens that
    the experts processed.
    """
    kinds = model.kinds_of_layers
    blocks = [kinds[model.kind_of_layer(index)] for index in range(model.num_layers)]
    blocks += blocks[-1:] * model.mtp_layers
    balanced = (block for block in blocks if block.balances_experts)
    return [
        math.sqrt(squares / (block.num_experts or 1)) / (tokens * block.experts_per_token)
        for squares, block in zip(squared_loads, balanced, strict=False)
    ]


def tensor_problems(model: ModelConfig, tensor_size: int) -> list[str]:
    """Return why `tensor_size` ranks cannot shard the matrices of this model, one message per rule; empty if they can.

    The vocabulary is padded, so that any number of ranks can shard it.
    """
    if tensor_size < 1:
        return [f"parallel.tensor is {tensor_size}; it must be at least 1"]
    lengths = dict.fromkeys(each for kind in model.kinds_of_layers.values() for each in _sharded_lengths(kind))
    common = math.gcd(*(length for _, length in lengths))
    working = ", ".join(str(size) for size in range(1, common + 1) if common % size == 0)
    return [
        f"{name} {length} is not divisible by parallel.tensor {tensor_size}; "
        f"tensor sizes that divide this model: {working}"
        for name, length in lengths
        if length % tensor_size
    ]


def _sharded_lengths(model: ModelConfig) -> Iterator[tuple[str, int]]:
    """Yield the name and length of each axis of a block that tensor ranks shard."""
    yield "model.num_heads", model.num_heads
    if model.num_experts is None:
        yield "model.ffn_hidden_size", model.ffn_size
    else:
        yield "model.num_experts", model.num_experts
        if model.shared_expert_size is not None:
            yield "model.shared_expert_size", model.shared_expert_size
    if model.num_kv_heads is not None:
        yield "model.num_kv_heads", model.num_kv_heads


def _layer(name: str, kind: LayerKind, index: int, ops: Iterable[Op], variant: str = BASE_KIND) -> LayerSpec:
    """Return a layer with the parameters of its ops, whose global names start with the layer's name."""
    parameters = {spec.name: replace(spec, name=f"{name}.{spec.name}") for op in ops for spec in op.weights}
    return LayerSpec(name, kind, index, parameters, variant)
