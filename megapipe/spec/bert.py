"""Every parameter of a BERT, declared once: the layers of a model from its configuration."""

from dataclasses import replace

from megapipe.config.bert import BertModelConfig
from megapipe.spec.gpt import ZEROS, by_name, matrix, named, norm_parameters, table, transformer_block, vector
from megapipe.spec.parameters import LayerSpec, ParameterSpec

TOKEN_TYPES = 2
"""First and second part of a sample."""
SENTENCE_CLASSES = 2
"""As in the text, or not."""


def bert_layers(model: BertModelConfig) -> tuple[LayerSpec, ...]:
    """The layers of a BERT in order: `embedding`, `blocks.0` to `blocks.{num_layers - 1}`, `head`.

    Shapes are the global canonical ones. With tied embeddings the `output.weight` of the masked-token head is the
    embedding's `word.weight` itself; its bias is the head's own. The head holds both heads: masked tokens' `transform`
    and `output`, sentences' `pooler` and `sentence`.
    """
    embedding = _embedding(model)
    blocks = [transformer_block(model, index) for index in range(model.num_layers)]
    return (embedding, *blocks, _head(model, embedding.parameters["word.weight"]))


def _embedding(model: BertModelConfig) -> LayerSpec:
    parameters = {"word.weight": table(model, "word.weight", model.vocabulary_size, padded=True)}
    if model.positions == "learned":
        parameters["position.weight"] = table(model, "position.weight", model.max_positions, padded=False)
    parameters["token_type.weight"] = table(model, "token_type.weight", TOKEN_TYPES, padded=False)
    if model.norm_position == "post":
        parameters |= norm_parameters(model, "norm")
    return LayerSpec("embedding", "embedding", 0, named("embedding", parameters))


def _head(model: BertModelConfig, word: ParameterSpec) -> LayerSpec:
    vocabulary = model.vocabulary_size
    bias = replace(vector("output.bias", (vocabulary,), 0, ZEROS), padded=True)
    parameters = norm_parameters(model, "norm") if model.norm_position == "pre" else {}
    parameters |= _replicated(model, "transform", model.hidden_size)
    parameters |= norm_parameters(model, "transform_norm")
    parameters |= by_name([bias])
    if not model.tie_embeddings:
        parameters["output.weight"] = table(model, "output.weight", vocabulary, padded=True)
    if model.sentence_head:
        parameters |= _replicated(model, "pooler", model.hidden_size)
        parameters |= _replicated(model, "sentence", SENTENCE_CLASSES)
    found = named("head", parameters)
    if model.tie_embeddings:
        found["output.weight"] = word
    return LayerSpec("head", "head", 0, found)


def _replicated(model: BertModelConfig, path: str, rows: int) -> dict[str, ParameterSpec]:
    """A linear layer that every tensor rank holds whole."""
    weight = matrix(f"{path}.weight", (rows, model.hidden_size), None, model.init_std)
    return by_name([weight, vector(f"{path}.bias", (rows,), None, ZEROS)])
