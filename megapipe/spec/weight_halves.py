"""Bytes that a layer keeps on one rank between the two halves of a split backward."""

from collections.abc import Collection

from megapipe.config.bert import BertModelConfig
from megapipe.config.model import ModelConfig
from megapipe.config.recompute import RecomputedPart
from megapipe.spec.bert import SENTENCE_CLASSES
from megapipe.spec.experts import has_experts, waiting_expert_bytes
from megapipe.spec.memory import ELEMENT_BYTES, FULL_BYTES, Precision
from megapipe.spec.parameters import LayerSpec


def weight_half_bytes(
    model: ModelConfig,
    layer: LayerSpec,
    micro_size: int,
    sequence_length: int,
    precision: Precision,
    *,
    predictions: int | None = None,
    tensor_size: int = 1,
    alignment: int = 1,
    recompute: Collection[RecomputedPart] = (),
    sequence_parallel: bool = False,
) -> int:
    """What one layer keeps on one tensor rank from a micro-batch's input half to its weight half.

    Counted are the input and the gradient of the output of every matrix product and norm, with the norm's statistics.
    Of a GPT block's products that is the 32 s b h bytes in half precision of Qi et al. (2023, arXiv 2401.10241, table
    1), who leave the norms out; masks and the softmax are freed. What `recompute` names is made again from inputs that
    are counted elsewhere. Of the embedding the gradient of its sum.

    predictions: tokens of a sample that the head predicts, by default all. sequence_parallel: the tensor ranks share
    the tokens of what each would otherwise keep whole, but for the gradient of the word embeddings, which is gathered;
    other embeddings keep that of their shard.
    """
    tokens = micro_size * sequence_length
    size = ELEMENT_BYTES[precision]
    stream = tokens * model.hidden_size * size
    statistics = FULL_BYTES * (2 if model.normalization == "layer_norm" else 1)
    whole_stream, shards = stream, tensor_size if sequence_parallel else 1
    stream //= shards
    norm = 2 * stream + tokens // shards * statistics
    if layer.kind == "embedding":
        of_shard = sequence_parallel and any(spec.partition_axis is None for spec in layer.parameters.values())
        kept = whole_stream + (stream if of_shard else 0)
        return kept + (norm if isinstance(model, BertModelConfig) and model.norm_position == "post" else 0)
    if layer.kind == "head":
        columns = layer.parameters["output.weight"].local_shape(tensor_size, alignment)[0]
        if not isinstance(model, BertModelConfig):
            return norm + stream + tokens * columns * size
        rows = micro_size * (sequence_length if predictions is None else predictions)
        kept = rows * ((5 * model.hidden_size + columns) * size + statistics)  # transform, its norm, output
        if model.sentence_head:
            # Of one sample the pooled token is a view of all tokens.
            pooled = micro_size * model.hidden_size * size
            kept += (whole_stream if micro_size == 1 else pooled) + 2 * pooled + micro_size * SENTENCE_CLASSES * size
        return kept + (norm if model.norm_position == "pre" else 0)
    inner = model.num_heads * model.head_dim
    projected = inner + 2 * model.kv_heads * model.head_dim
    up = model.ffn_size * (2 if model.activation == "swiglu" else 1)
    kept = 2 * norm + 2 * stream  # both norms; gradients of what attention and MLP give
    kept += 0 if "norms" in recompute else 2 * stream
    if has_experts(layer):  # these leave gradients of their own rows in place of that of what an MLP gives
        ranks = {"tensor_size": tensor_size, "shards": shards}
        of_experts = waiting_expert_bytes(model, tokens, size, **ranks, again="mlp" in recompute)
        return kept - stream + tokens * (inner + projected) * size // tensor_size + of_experts
    # The tensor ranks share results of attention and activation (or what makes that again), gradients of qkv and up.
    shared = inner + projected + up + (up if "mlp" in recompute else model.ffn_size)
    return kept + tokens * shared * size // tensor_size
