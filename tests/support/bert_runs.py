"""Small BERT runs for layout tests, the counterpart of gpt_runs.py: that module's `run_gpt` trains either."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from megapipe.config.bert import BertDataConfig, BertModelConfig, BertPretrainConfig
from tests.data.bert_shards import random_documents, write_sentences
from tests.support.gpt_runs import write_shard

VOCABULARY = 61

POST_NORM = BertModelConfig(vocabulary_size=VOCABULARY, num_layers=2, hidden_size=32, num_heads=4, max_positions=24)
PRE_NORM = replace(POST_NORM, norm_position="pre", embedding_dropout=0.1, hidden_dropout=0.1, attention_dropout=0.1)
"""With dropout too."""
MODERN = replace(
    POST_NORM,
    norm_position="pre",
    normalization="layer_norm_without_bias",
    embedding_norm=True,
    positions="rotary",
    activation="geglu",
    bias="none",
    token_types=0,
    transform_bias=False,
    sentence_head=False,
    layer_kinds={"first": {"attention_norm": False}, "local": {"sliding_window": 5, "rope_theta": 100.0}},
    layer_pattern=("first", "local"),
)
"""A small ModernBERT."""


def write_corpus(folder: Path, documents: int = 60) -> BertDataConfig:
    """Random sentences in the shape of a small corpus."""
    content = random_documents(np.random.default_rng(0), documents, VOCABULARY)
    return write_sentences(folder, content, VOCABULARY, sequence_length=24, split="80,20,0")


def write_corpora(folder: Path) -> tuple[str, BertDataConfig]:
    """Write a small corpus of a GPT and one of a BERT. Return the first one's prefix, and the second one."""
    (folder / "bert").mkdir()
    return write_shard(folder), write_corpus(folder / "bert")


def make_bert_config(
    data: BertDataConfig, model: BertModelConfig = POST_NORM, **groups: dict[str, Any]
) -> BertPretrainConfig:
    """A tiny run; groups override fields, e.g. schedule={"name": "gpipe"}."""
    config = BertPretrainConfig(model=model, data=data)
    config.batch = replace(config.batch, global_size=8, micro_size=1)
    config.optimizer = replace(config.optimizer, learning_rate=5e-3, warmup_steps=2, clip_norm=0.5)
    config.training = replace(config.training, steps=20)
    config.parallel = replace(config.parallel, device="cpu")
    return replace(config, **{name: replace(getattr(config, name), **values) for name, values in groups.items()})
