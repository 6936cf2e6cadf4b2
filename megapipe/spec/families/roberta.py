"""RoBERTa (Liu et al. 2019, arXiv 1907.11692) and XLM-RoBERTa (Conneau et al. 2019, arXiv 1911.02116): BERT without
sentence pairs. Positions count from the row after the row for padding."""

from collections.abc import Mapping
from typing import Any

from megapipe.spec.encoder_family import POST_NORMS, encoder, token_types
from megapipe.spec.family import FamilyError, keys

_HEAD = {
    "head.transform": "lm_head.dense",
    "head.transform_norm": "lm_head.layer_norm",
    "head.output.weight": "lm_head.decoder.weight",
    "head.output.bias": "lm_head.bias",
}


def _positions(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of the position table. Raises FamilyError if padding has no row in it."""
    padding, rows = config["pad_token_id"], config["max_position_embeddings"]
    if type(padding) is not int or type(rows) is not int or not 0 <= padding < rows - 1:
        raise FamilyError(
            f"pad_token_id is {padding!r}, but positions count from the row after it in a "
            f"table of max_position_embeddings {rows!r} rows; it must be a smaller number"
        )
    return {"first_position": padding + 1, "max_positions": rows - padding - 1}


for _model_type, _name in (("roberta", "Roberta"), ("xlm-roberta", "XLMRoberta")):
    encoder(
        _model_type,
        _name,
        body="roberta.",
        heads=("lm_head.",),
        norms=POST_NORMS,
        head=_HEAD,
        # The masked-token head has the exact GELU, whatever the blocks have.
        needs={"sentence_head": False, "transform_activation": "gelu"},
        reads=keys("pad_token_id max_position_embeddings"),
        more=(token_types, _positions),
        writes={
            "pad_token_id": lambda model: vars(model)["first_position"] - 1,
            "max_position_embeddings": lambda model: vars(model)["first_position"] + model.max_positions,
        },
        ignored=keys("output_past"),
        defaults={"pad_token_id": 1},
        # The published files have a pooler, which the masked-token head does not read.
        buffers=("embeddings.position_ids", "pooler.dense.weight", "pooler.dense.bias"),
        repeats={"lm_head.decoder.bias": "lm_head.bias"},
    )
