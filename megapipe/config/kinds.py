"""The kind of run that a command line configures: GPT or BERT."""

import os
from collections.abc import Sequence
from dataclasses import fields
from itertools import pairwise
from pathlib import Path

import yaml

from megapipe.config.bert import BertDataConfig, BertModelConfig, BertPretrainConfig
from megapipe.config.data import DataConfig
from megapipe.config.errors import ConfigError
from megapipe.config.load import underscored
from megapipe.config.model import ModelConfig
from megapipe.config.packaged_files import with_packaged_files
from megapipe.config.run import PretrainConfig
from megapipe.config.untrusted import DECODING_ERRORS, MAX_YAML_CHARACTERS, decode_yaml

KINDS: dict[str, type[PretrainConfig]] = {each.kind: each for each in (PretrainConfig, BertPretrainConfig)}

_BERT_FIELDS = {
    f"{group}.{each.name}"
    for group, bert, gpt in (("model", BertModelConfig, ModelConfig), ("data", BertDataConfig, DataConfig))
    for each in fields(bert)
    if each.name not in {other.name for other in fields(gpt)}
}
"""Fields that only BERT runs have, such as `data.pairs`."""


def kind_of(arguments: Sequence[str]) -> type[PretrainConfig]:
    """Return BERT's kind if the flags or their files set a field that only BERT runs have, otherwise GPT's.

    Wrong flags and unreadable files count as not set; the parser reports them.
    """
    try:
        words = with_packaged_files(underscored(arguments))
    except ConfigError:
        return PretrainConfig
    for word, following in pairwise([*words, ""]):
        flag, _, value = word.removeprefix("--").partition("=")
        is_file = flag in ("config", "model", "data")
        if flag in _BERT_FIELDS or (is_file and _sets_bert_field(flag, value or following)):
            return BertPretrainConfig
    return PretrainConfig


def _sets_bert_field(flag: str, file: str) -> bool:
    try:
        if not os.path.isfile(file) or os.path.getsize(file) > MAX_YAML_CHARACTERS:
            return False
        content = decode_yaml(Path(file).read_text(encoding="utf-8"))
        groups = content if flag == "config" else {flag: content}
        return any(
            f"{group}.{name}" in _BERT_FIELDS for group in ("model", "data") for name in groups.get(group) or ()
        )
    except (OSError, yaml.YAMLError, *DECODING_ERRORS):
        return False
