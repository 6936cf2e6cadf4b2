"""The tokenizer of an exported model: files that transformers loads, where they give the ids that the model knows."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megapipe.checkpoint.errors import CheckpointError
from megapipe.checkpoint.hugging_face_files import CONFIG
from megapipe.checkpoint.untrusted import inside, read_json
from megapipe.config.bert import BertModelConfig
from megapipe.config.model import ModelConfig
from megapipe.conversion import sentence_piece, tiktoken_file
from megapipe.data.errors import DataError
from megapipe.data.tokenizers import Tokenizer, open_tokenizer
from megapipe.data.tokenizers.byte_tokenizer import ByteTokenizer
from megapipe.data.tokenizers.hugging_face import HuggingFaceTokenizer
from megapipe.data.tokenizers.sentence_piece import SentencePieceTokenizer
from megapipe.data.tokenizers.tiktoken_files import TiktokenTokenizer

if TYPE_CHECKING:
    import tokenizers

COPIED = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "tokenizer.model",
    "vocab.json",
    "merges.txt",
    "vocab.txt",
)
"""What a Hugging Face folder's tokenizer consists of, copied as it is."""
_MAX_BYTES = 1 << 28
_NOT_NAMED = (
    "no tokenizer was written: nothing here names it (the training shard's manifest does, seen from where training "
    "ran); name it with --tokenizer"
)
_ROLES = {
    "[PAD]": "pad_token",
    "[UNK]": "unk_token",
    "[CLS]": "cls_token",
    "[SEP]": "sep_token",
    "[MASK]": "mask_token",
}
_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")
_TEXTS = (
    "The quick brown fox, twice:  the quick brown fox.",
    "def main(self):\n    return [x**2 for x in range(10)]\n\n\tif a != b: # tabs\n",
    "Grüße aus Köln, 東京 и Москва; emoji \U0001f680\U0001f469\u200d\U0001f52c, zero\u200bwidth, \u00a0nbsp.",
    " leading and trailing spaces   \n\n\n",
    "1234567 numbers, 12.5%, they'LL won't... \r\n \t  !!??\n\n x  ",
)


@dataclass(frozen=True)
class ExportedTokenizer:
    """files: name -> content. ids: of tokens that config.json names. note: why there are no files, or empty."""

    files: Mapping[str, bytes] = field(default_factory=dict)
    ids: Mapping[str, int | None] = field(default_factory=lambda: dict.fromkeys(_IDS))
    note: str = ""


def exported_tokenizer(spec: str | None, model: ModelConfig) -> ExportedTokenizer:
    """What is written for the tokenizer `spec` (as `open_tokenizer` takes it) beside a model's weights."""
    if spec is None:
        return ExportedTokenizer(note=_NOT_NAMED)
    try:
        ours = open_tokenizer(spec)
    except DataError as error:
        return ExportedTokenizer(note=f"no tokenizer was written: {error}; name it with --tokenizer")
    if ours.vocabulary_size > model.vocabulary_size:
        raise CheckpointError(
            f"tokenizer {spec} has {ours.vocabulary_size} ids but the model knows {model.vocabulary_size}: name the "
            "one that it was trained with (--tokenizer)"
        )
    if Path(spec).is_dir():
        return _copied(Path(spec), ours, model.vocabulary_size)
    theirs, reason = _made(ours, isinstance(model, BertModelConfig))
    if theirs is None:
        return ExportedTokenizer(
            ids=_ids(ours), note=f"no tokenizer was written: {reason}; use {spec} itself beside the exported model"
        )
    config = _tokenizer_config(ours, theirs, model)
    files = {
        "tokenizer.json": theirs.to_str(pretty=True).encode(),
        "tokenizer_config.json": (json.dumps(config, indent=2) + "\n").encode(),
    }
    return ExportedTokenizer(files, _ids(ours))


def _copied(folder: Path, ours: Tokenizer, rows: int) -> ExportedTokenizer:
    """rows: of the model's embedding, which every id that config.json names must be one of."""
    files = {}
    for name in COPIED:
        path = inside(folder, name)
        if path.is_file():
            if path.stat().st_size > _MAX_BYTES:
                raise CheckpointError(f"{path} has {path.stat().st_size:,} bytes; at most {_MAX_BYTES:,} are copied")
            files[name] = path.read_bytes()
    ids = _ids(ours)
    if (folder / CONFIG).is_file():
        told = read_json(inside(folder, CONFIG))
        ids |= {name: told[name] for name in _IDS if isinstance(told.get(name), int) and 0 <= told[name] < rows}
    return ExportedTokenizer(files, ids)


def _made(ours: Tokenizer, is_bert: bool) -> tuple["tokenizers.Tokenizer | None", str]:
    """A tokenizer of the tokenizers library with the same ids, or why there is none."""
    import tokenizers

    if isinstance(ours, HuggingFaceTokenizer):
        path = Path(ours.spec)
        text = path.read_text("utf-8") if path.suffix == ".json" and path.name != "vocab.json" else ours.definition()
        theirs = tokenizers.Tokenizer.from_str(text)
        if is_bert and theirs.post_processor is None:
            _add_template(theirs)
    elif isinstance(ours, SentencePieceTokenizer):
        try:
            theirs = sentence_piece.as_tokenizer(Path(ours.spec).read_bytes())
        except ValueError as error:
            return None, f"{ours.spec} has no counterpart in transformers: {error}"
    elif isinstance(ours, ByteTokenizer):
        theirs = _byte_tokenizer()
    elif isinstance(ours, TiktokenTokenizer):
        theirs = tiktoken_file.as_tokenizer(ours.ranks, ours.pattern, ours.special_tokens)
    else:
        return None, f"no tokenizer.json is made for {ours.spec}"
    different = next((text for text in _samples(ours) if not _agree(ours, theirs, text)), None)
    if different is not None:
        return None, f"{ours.spec} cuts {different[:40]!r} in another way than its counterpart in transformers would"
    return theirs, ""


def _agree(ours: Tokenizer, theirs: "tokenizers.Tokenizer", text: str) -> bool:
    ids = ours.encode(text)
    found = theirs.encode(text, add_special_tokens=False).ids
    return ids == found and ours.decode(ids) == theirs.decode(found, skip_special_tokens=False)


def _samples(ours: Tokenizer) -> Iterator[str]:
    """Texts that both must cut alike: fixed ones, and the vocabulary in its order and in another."""
    yield from _TEXTS
    special = {*ours.special_tokens.values(), ours.end_of_document}
    # A tiktoken vocabulary has gaps, which the library does not decode.
    known = sorted(ours.ranks.values()) if isinstance(ours, TiktokenTokenizer) else range(ours.vocabulary_size)
    ids = [token for token in known if token not in special]
    step = max(1, len(ids) // 32)
    for start in range(0, len(ids), step):
        yield ours.decode(ids[start : start + 24])
        yield ours.decode(ids[start :: step * 7][:24])


def _byte_tokenizer() -> "tokenizers.Tokenizer":
    from tokenizers import Tokenizer as Theirs
    from tokenizers import decoders, models, pre_tokenizers

    letters = tiktoken_file.LETTERS
    theirs = Theirs(models.BPE(vocab={letters[byte]: byte for byte in range(256)}, merges=[]))
    theirs.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    theirs.decoder = decoders.ByteLevel()
    theirs.add_special_tokens(["<|endoftext|>"])
    return theirs


def _add_template(theirs: "tokenizers.Tokenizer") -> None:
    """[CLS] and [SEP] around a text, as samples had them in training."""
    from tokenizers.processors import TemplateProcessing

    ends = [(name, theirs.token_to_id(name)) for name in ("[CLS]", "[SEP]")]
    if all(token is not None for _, token in ends):
        theirs.post_processor = TemplateProcessing(
            single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=ends
        )


def _ids(ours: Tokenizer) -> dict[str, int | None]:
    end, padding = ours.end_of_document, ours.special_tokens.get("[PAD]")
    return {"bos_token_id": end, "eos_token_id": end, "pad_token_id": padding}


def _tokenizer_config(ours: Tokenizer, theirs: "tokenizers.Tokenizer", model: ModelConfig) -> dict[str, Any]:
    found: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": model.max_positions,
        "clean_up_tokenization_spaces": False,
    }
    found |= {role: name for name, role in _ROLES.items() if theirs.token_to_id(name) is not None}
    if ours.end_of_document is not None and not isinstance(model, BertModelConfig):
        end = theirs.id_to_token(ours.end_of_document)
        found |= {"bos_token": end, "eos_token": end}
    return found
