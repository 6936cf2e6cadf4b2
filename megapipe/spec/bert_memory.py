"""Bytes that a BERT's layer keeps on one rank from a micro-batch's forward to its backward."""

from collections.abc import Collection

from megapipe.config.bert import BertModelConfig
from megapipe.config.recompute import RecomputedPart
from megapipe.spec.bert import SENTENCE_CLASSES
from megapipe.spec.memory import ELEMENT_BYTES, FULL_BYTES, AttentionPath, Precision, activation_bytes
from megapipe.spec.parameters import LayerSpec


def bert_activation_bytes(
    model: BertModelConfig,
    layer: LayerSpec,
    micro_size: int,
    sequence_length: int,
    predictions: int,
    precision: Precision,
    attention: AttentionPath,
    *,
    tensor_size: int = 1,
    alignment: int = 1,
    sequence_parallel: bool = False,
    mask_bytes: int = 1,
    recompute_logits: bool = False,
    recompute: Collection[RecomputedPart] = (),
) -> int:
    """As `activation_bytes`, for a layer of spec.bert.bert_layers. predictions: hidden tokens of a sample at most.

    A block keeps what GPT's does, wherever its norms stand, and sdpa's mask, an element a token. The heads keep
    hidden states of all tokens once (twice with a norm before the heads), those of the hidden tokens four times, and
    their logits, or under recompute_logits their log-sums alone; of the pair the pooled token, its tanh and the two
    probabilities.
    """
    tokens = micro_size * sequence_length
    size = ELEMENT_BYTES[precision]
    stream = tokens * model.hidden_size * size
    statistics = FULL_BYTES * (2 if model.normalization == "layer_norm" else 1)
    kept = 0
    if layer.kind != "head":
        kept = activation_bytes(
            model,
            layer,
            micro_size,
            sequence_length,
            precision,
            attention,
            tensor_size=tensor_size,
            alignment=alignment,
            sequence_parallel=sequence_parallel,
            mask_bytes=mask_bytes,
            recompute=recompute,
        )
    norm = (stream + tokens * statistics) // (tensor_size if sequence_parallel else 1)
    if layer.kind == "embedding":
        return kept + (norm if model.norm_position == "post" else 0)
    if layer.kind == "block":
        # Behind the norm after the MLP comes the next block's attention, which keeps its input.
        kept += stream if "norms" in recompute and model.norm_position == "post" else 0
        return kept + padding_mask_bytes(micro_size, sequence_length, precision, attention)
    rows = micro_size * predictions
    columns = min(layer.parameters["output.weight"].local_shape(tensor_size, alignment)[0], model.vocabulary_size)
    logits = 0 if recompute_logits else columns * size
    kept = stream + 4 * rows * model.hidden_size * size + rows * (statistics + logits + FULL_BYTES)
    if model.norm_position == "pre":
        kept += norm
    return kept + (_sentence_bytes(model, micro_size, size) if model.sentence_head else 0)


def padding_mask_bytes(micro_size: int, sequence_length: int, precision: Precision, attention: AttentionPath) -> int:
    """What sdpa keeps to leave padding out."""
    return micro_size * sequence_length * ELEMENT_BYTES[precision] if attention == "sdpa" else 0


def _sentence_bytes(model: BertModelConfig, micro_size: int, size: int) -> int:
    """The first tokens (of one sample a view of its hidden states), their tanh, log-probabilities and their weight."""
    pooled = micro_size * model.hidden_size * size
    return pooled * (1 if micro_size == 1 else 2) + (micro_size * SENTENCE_CLASSES + 1) * FULL_BYTES
