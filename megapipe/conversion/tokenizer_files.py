"""The tokenizer of an exported model: files for transformers that give the same ids."""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megapipe.checkpoint.hugging_face import CONFIG
from megapipe.checkpoint.storage import CheckpointError, inside, read_json
from megapipe.config.bert import BertModelConfig
from megapipe.config.model import ModelConfig
from megapipe.data import DataError
from megapipe.data.tokenizers import FILES_IN_FOLDERS, FOLDER_FILES, Tokenizer, open_tokenizer
from megapipe.data.tokenizers.hugging_face import HuggingFaceTokenizer, token_of_role
from megapipe.data.tokenizers.model_files import ByteTokenizer, SentencePieceTokenizer, TiktokenTokenizer

if TYPE_CHECKING:
    import tokenizers


_SPACE = "▁"
_NORMAL, _CONTROL, _USER_DEFINED = 1, 3, 4
"""Kinds of pieces, numbered as in sentencepiece_model.proto."""


def from_sentence_piece(original: SentencePieceTokenizer) -> "tokenizers.Tokenizer":
    """Return a tokenizer of the tokenizers library with the same ids.

    Unigram models may differ if two ways to split a text have equal scores, because SentencePiece sums them in 32 bits
    and the tokenizers library in 64. Models that normalize may differ at separate accents after characters that they
    replace: the library replaces both. Raises ValueError for a model that the library cannot represent exactly.
    """
    import tokenizers
    from tokenizers import AddedToken, decoders, models

    proto, is_bpe = original.proto, original.is_bpe
    pieces = [(piece.piece, piece.score, piece.type) for piece in proto.pieces]
    unknown = proto.trainer_spec.unk_id
    fallback = proto.trainer_spec.byte_fallback
    user_defined = [piece for piece, _, kind in pieces if kind == _USER_DEFINED]
    if proto.trainer_spec.treat_whitespace_as_suffix:
        raise ValueError("it puts the mark of a space at the end of words")
    if is_bpe and any(len(piece) > 1 for piece in user_defined):
        raise ValueError("it has user-defined symbols of several characters")
    if is_bpe:
        model: Any = models.BPE(
            vocab={piece: number for number, (piece, _, _) in enumerate(pieces)},
            merges=_merges(pieces),
            unk_token=pieces[unknown][0],
            fuse_unk=True,
            byte_fallback=fallback,
        )
    elif proto.trainer_spec.model_type == proto.trainer_spec.UNIGRAM:
        model = models.Unigram([(piece, score) for piece, score, _ in pieces], unk_id=unknown, byte_fallback=fallback)
    else:
        raise ValueError("it is neither BPE nor unigram")
    tokenizer = tokenizers.Tokenizer(model)
    _prepare(tokenizer, proto.normalizer_spec, user_defined)
    last = [decoders.Strip(" ", 1, 0)] if proto.normalizer_spec.add_dummy_prefix else []
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *last]
    )
    tokenizer.add_special_tokens(
        [AddedToken(piece, normalized=False, special=True) for piece, _, kind in pieces if kind == _CONTROL]
    )
    return tokenizer


def _prepare(tokenizer: "tokenizers.Tokenizer", spec: Any, user_defined: list[str]) -> None:
    """Set the normalizer, and split the text at user-defined symbols."""
    from tokenizers import Regex, normalizers, pre_tokenizers

    steps: list[Any] = [normalizers.Precompiled(spec.precompiled_charsmap)] if spec.precompiled_charsmap else []
    if spec.remove_extra_whitespaces:
        # SentencePiece treats its own mark as a space only at the end of a text.
        steps += [normalizers.Replace(Regex(r"\A +|[ ▁]+\z"), ""), normalizers.Replace(Regex(" {2,}"), " ")]
    if spec.add_dummy_prefix:
        # Metaspace would add no prefix to a text that starts with a space.
        steps.append(normalizers.Prepend(_SPACE))
    tokenizer.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", _SPACE)])
    if user_defined:
        # Added tokens are not used, because each piece of text between them would get its own prefix.
        longest_first = sorted(user_defined, key=len, reverse=True)
        tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("|".join(map(re.escape, longest_first))), "isolated")


def _merges(pieces: list[tuple[str, float, int]]) -> list[tuple[str, str]]:
    """Return every pair of pieces that forms a third, by descending score of the third: SentencePiece tries the same
    pairs."""
    ranks = {piece: number for number, (piece, _, kind) in enumerate(pieces) if kind == _NORMAL}
    scored = []
    for piece, score, kind in pieces:
        if kind != _NORMAL:
            continue
        pairs = [
            (piece[:cut], piece[cut:]) for cut in range(1, len(piece)) if piece[:cut] in ranks and piece[cut:] in ranks
        ]
        pairs.sort(key=lambda pair: (ranks[pair[0]], ranks[pair[1]]))
        scored += [(score, pair) for pair in pairs]
    scored.sort(key=lambda entry: -entry[0])
    return [pair for _, pair in scored]


_PRINTABLE = (*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100))
_OTHERS = [byte for byte in range(256) if byte not in _PRINTABLE]
LETTERS = {byte: chr(byte) for byte in _PRINTABLE} | {byte: chr(0x100 + number) for number, byte in enumerate(_OTHERS)}
"""The character of each byte in byte-level vocabularies (GPT-2): the same character if it is printable."""


def from_tiktoken(
    ranks: Mapping[bytes, int], pattern: str, special_tokens: Mapping[str, int]
) -> "tokenizers.Tokenizer":
    """Return the tokenizer of a .tiktoken file. The caller must check that it gives the same ids.

    ranks: token -> its id, which is also the order of merging. pattern: splits a text before merging.
    """
    import tokenizers
    from tokenizers import Regex, decoders, models, pre_tokenizers

    vocabulary = {spelled(token): rank for token, rank in ranks.items()} | dict(special_tokens)
    merges = [
        pair for token in sorted(ranks, key=ranks.__getitem__) if len(token) > 1 for pair in _merge(token, ranks)
    ]
    model = models.BPE(
        vocab=vocabulary,
        merges=[(spelled(left), spelled(right)) for left, right in merges],
        # As in tiktoken, a piece that is itself a token is not merged from other tokens.
        ignore_merges=True,
    )
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_translate_pattern(pattern)), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(sorted(special_tokens, key=special_tokens.__getitem__))
    return tokenizer


def spelled(token: bytes) -> str:
    """Return a token's bytes in the spelling of byte-level vocabularies."""
    return "".join(LETTERS[byte] for byte in token)


def _merge(token: bytes, ranks: Mapping[bytes, int]) -> list[tuple[bytes, bytes]]:
    """Return a list with the pair of tokens that remains of `token` after all earlier merges; an empty list if more
    than two tokens remain."""
    parts = [bytes([byte]) for byte in token]
    while len(parts) > 2:
        joined = [ranks.get(parts[place] + parts[place + 1]) for place in range(len(parts) - 1)]
        best = min((rank for rank in joined if rank is not None and rank < ranks[token]), default=None)
        if best is None:
            return []
        place = joined.index(best)
        parts[place : place + 2] = [parts[place] + parts[place + 1]]
    return [(parts[0], parts[1])]


def _translate_pattern(pattern: str) -> str:
    """Translate a pattern to the library's regular expressions, in which `{1,3}+` repeats and `$` matches any line
    end.

    Possessive repetition only saves time in these patterns, because the rest of a pattern could not match after a
    shorter repetition.
    """
    return re.sub(r"([+*?]|\{\d+,\d+\})\+", r"\1", pattern).replace("$", r"\z")


_MAX_BYTES = 1 << 28
_NOT_NAMED = (
    "no tokenizer was written: neither the checkpoint nor a training shard that can be found "
    "from here has one; name it with --tokenizer"
)
_NOT_EXACT = (
    "tokenizer {spec} has no exact counterpart in transformers: {reason}; give --tokenizer none to write the model "
    "without a tokenizer, and use this one with the model"
)
_TIES = (
    "where two ways to split a text have equal scores, which happens in runs of spaces, "
    "transformers may choose the other one: it adds scores in 64 bits, SentencePiece in 32"
)
_ACCENTS = (
    "the tokenizer normalizes texts; where a separate accent follows a character that it "
    "replaces, such as a wide letter, transformers drops the accent"
)
_BERT = "BertTokenizerFast"
NONE = "none"
"""Value of --tokenizer with which no tokenizer is written."""
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
    "",
    " ",
    "    two\n\n  three    \u2581 four",
    "1234567 numbers, 12.5%, they'LL won't... \r\n \t  !!??\n\n x  ",
)


@dataclass(frozen=True)
class ExportedTokenizer:
    """Files of a tokenizer.

    files: name -> content. ids: special token -> its id in config.json, or a list of ids. note: a line for the user,
    or empty.
    """

    files: Mapping[str, bytes] = field(default_factory=dict)
    ids: Mapping[str, Any] = field(default_factory=lambda: dict.fromkeys(_IDS))
    note: str = ""


def exported_tokenizer(spec: str | None, model: ModelConfig) -> ExportedTokenizer:
    """Return the tokenizer files to write with a model's weights. spec: see `open_tokenizer`; None if unknown."""
    if spec is None or spec == NONE:
        return ExportedTokenizer(note=_NOT_NAMED if spec is None else "")
    folder = Path(spec)
    if folder.is_dir() and not any((folder / name).is_file() for name in FILES_IN_FOLDERS):
        return ExportedTokenizer(copied_files(folder), _config_ids(folder, model.vocabulary_size), _NOT_NAMED)
    try:
        tokenizer = open_tokenizer(spec)
    except DataError as error:
        return ExportedTokenizer(note=f"no tokenizer was written: {error}; name it with --tokenizer")
    if tokenizer.vocabulary_size > model.vocabulary_size:
        raise CheckpointError(
            f"tokenizer {spec} has {tokenizer.vocabulary_size} ids, but the model's vocabulary has "
            f"{model.vocabulary_size}: name the tokenizer that the model was trained with (--tokenizer)"
        )
    if folder.is_dir():
        ids = _named_ids(folder, tokenizer) | _config_ids(folder, model.vocabulary_size)
        return ExportedTokenizer(copied_files(folder), ids)
    exported = _equivalent_tokenizer(tokenizer, model.kind == "bert")
    config = _tokenizer_config(tokenizer, exported, model)
    files = {
        "tokenizer.json": exported.to_str(pretty=True).encode(),
        "tokenizer_config.json": (json.dumps(config, indent=2) + "\n").encode(),
    }
    note = ""
    if isinstance(tokenizer, SentencePieceTokenizer):
        files["tokenizer.model"] = Path(tokenizer.spec).read_bytes()
        note = "; ".join([_TIES] * (not tokenizer.is_bpe) + [_ACCENTS] * tokenizer.normalizes)
    if config["tokenizer_class"] == _BERT:
        names = sorted(exported.get_vocab().items(), key=lambda entry: entry[1])
        files["vocab.txt"] = "".join(f"{name}\n" for name, _ in names).encode()
    return ExportedTokenizer(files, _ids(tokenizer), note)


def _config_ids(folder: Path, rows: int) -> dict[str, Any]:
    """Return the ids in a folder's config.json that are rows of the model's embedding."""
    return {name: value for name, value in token_ids(folder).items() if _are_ids(value, rows)}


def _named_ids(folder: Path, tokenizer: Tokenizer) -> dict[str, Any]:
    """Return the ids of the tokens that a folder's tokenizer_config.json names. Without the file, return `_ids`."""
    if not (folder / "tokenizer_config.json").is_file():
        return _ids(tokenizer)
    config = read_json(inside(folder, "tokenizer_config.json"))
    return {name: tokenizer.special_tokens.get(str(token_of_role(config, name.removesuffix("_id")))) for name in _IDS}


def copied_files(folder: Path) -> dict[str, bytes]:
    """Return the contents, by file name, of a Hugging Face folder's files for its tokenizer and for generation."""
    files = {}
    for name in FOLDER_FILES:
        path = inside(folder, name)
        if path.is_file():
            if path.stat().st_size > _MAX_BYTES:
                raise CheckpointError(f"{path} has {path.stat().st_size:,} bytes; at most {_MAX_BYTES:,} are copied")
            files[name] = path.read_bytes()
    return files


def token_ids(folder: Path) -> dict[str, Any]:
    """Return the ids of special tokens in a folder's config.json; none if the file does not exist."""
    if not (folder / CONFIG).is_file():
        return {}
    config = read_json(inside(folder, CONFIG))
    return {name: config[name] for name in _IDS if config.get(name) is not None}


def _are_ids(value: object, rows: int) -> bool:
    """Return whether a value is an id or a list of ids, because some models end a text by several tokens."""
    ids = value if isinstance(value, list) and value else [value]
    return all(isinstance(each, int) and not isinstance(each, bool) and 0 <= each < rows for each in ids)


def _equivalent_tokenizer(tokenizer: Tokenizer, is_bert: bool) -> "tokenizers.Tokenizer":
    """Return a tokenizer of the tokenizers library with the same ids. Raises CheckpointError if this is not
    possible."""
    import tokenizers

    if isinstance(tokenizer, HuggingFaceTokenizer):
        path = Path(tokenizer.spec)
        has_definition = path.suffix == ".json" and path.name != "vocab.json"
        text = path.read_text("utf-8") if has_definition else tokenizer.definition()
        exported = tokenizers.Tokenizer.from_str(text)
        if is_bert and exported.post_processor is None:
            _add_template(exported)
    elif isinstance(tokenizer, SentencePieceTokenizer):
        try:
            exported = from_sentence_piece(tokenizer)
        except ValueError as error:
            raise CheckpointError(_NOT_EXACT.format(spec=tokenizer.spec, reason=error)) from error
    elif isinstance(tokenizer, ByteTokenizer):
        exported = _byte_tokenizer()
    else:
        assert isinstance(tokenizer, TiktokenTokenizer)
        exported = from_tiktoken(tokenizer.ranks, tokenizer.pattern, tokenizer.special_tokens)
    different = next((text for text in _samples(tokenizer) if not _agree(tokenizer, exported, text)), None)
    if different is not None:
        reason = f"it splits {different[:40]!r} differently from its counterpart in transformers"
        raise CheckpointError(_NOT_EXACT.format(spec=tokenizer.spec, reason=reason))
    return exported


def _agree(tokenizer: Tokenizer, exported: "tokenizers.Tokenizer", text: str) -> bool:
    ids = tokenizer.encode(text)
    exported_ids = exported.encode(text, add_special_tokens=False).ids
    pieces = tokenizer if isinstance(tokenizer, SentencePieceTokenizer) else None
    if ids != exported_ids and not (pieces and pieces.scores_equal(ids, exported_ids)):
        return False
    if pieces and pieces.unknown in ids:
        # SentencePiece decodes an unknown piece as two question marks, transformers as its name.
        return True
    return tokenizer.decode(ids) == exported.decode(exported_ids, skip_special_tokens=False)


def _samples(tokenizer: Tokenizer) -> Iterator[str]:
    """Yield texts that both tokenizers must split equally: fixed texts, and the vocabulary in two different orders."""
    yield from _TEXTS
    special = {*tokenizer.special_tokens.values(), tokenizer.end_of_document}
    # A tiktoken vocabulary has gaps, which the library does not decode.
    ranks = tokenizer.ranks if isinstance(tokenizer, TiktokenTokenizer) else None
    decodable = range(tokenizer.vocabulary_size) if ranks is None else sorted(ranks.values())
    ids = [token for token in decodable if token not in special]
    step = max(1, len(ids) // 32)
    for start in range(0, len(ids), step):
        yield tokenizer.decode(ids[start : start + 24])
        yield tokenizer.decode(ids[start :: step * 7][:24])


def _byte_tokenizer() -> "tokenizers.Tokenizer":
    from tokenizers import Tokenizer as LibraryTokenizer
    from tokenizers import decoders, models, pre_tokenizers

    exported = LibraryTokenizer(models.BPE(vocab={LETTERS[byte]: byte for byte in range(256)}, merges=[]))
    exported.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    exported.decoder = decoders.ByteLevel()
    exported.add_special_tokens(["<|endoftext|>"])
    return exported


def _add_template(exported: "tokenizers.Tokenizer") -> None:
    """Add [CLS] and [SEP] around a text, as in the samples of training."""
    from tokenizers.processors import TemplateProcessing

    ends = [(name, exported.token_to_id(name)) for name in ("[CLS]", "[SEP]")]
    if all(token is not None for _, token in ends):
        exported.post_processor = TemplateProcessing(
            single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=ends
        )


def _ids(tokenizer: Tokenizer) -> dict[str, Any]:
    end, padding = tokenizer.end_of_document, tokenizer.special_tokens.get("[PAD]")
    return {"bos_token_id": end, "eos_token_id": end, "pad_token_id": padding}


def _tokenizer_config(tokenizer: Tokenizer, exported: "tokenizers.Tokenizer", model: ModelConfig) -> dict[str, Any]:
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": model.max_positions,
        "clean_up_tokenization_spaces": False,
    }
    config |= {role: name for name, role in _ROLES.items() if exported.token_to_id(name) is not None}
    if isinstance(model, BertModelConfig):
        # transformers returns token types only if they are listed here.
        types = ["token_type_ids"] if model.token_types > 1 else []
        config["model_input_names"] = ["input_ids", *types, "attention_mask"]
        content = json.loads(exported.to_str())
        normalizer = content["normalizer"] or {}
        if _is_bert_tokenizer(content, exported.get_vocab()):
            config |= {
                "tokenizer_class": _BERT,
                "do_lower_case": normalizer["lowercase"],
                "strip_accents": normalizer["strip_accents"],
                "tokenize_chinese_chars": normalizer["handle_chinese_chars"],
            }
    elif tokenizer.end_of_document is not None:
        end = exported.id_to_token(tokenizer.end_of_document)
        config |= {"bos_token": end, "eos_token": end}
    return config


def _is_bert_tokenizer(content: Mapping[str, Any], ids: Mapping[str, int]) -> bool:
    """Return whether BertTokenizerFast, which is built only from vocab.txt, is the tokenizer with this
    tokenizer.json."""
    normalizer = content["normalizer"] or {}
    return (
        content["model"]["type"] == "WordPiece"
        and content["model"]["continuing_subword_prefix"] == "##"
        and normalizer.get("type") == "BertNormalizer"
        and normalizer["clean_text"]
        and content["pre_tokenizer"] == {"type": "BertPreTokenizer"}
        and set(_ROLES) <= ids.keys()
        and sorted(ids.values()) == list(range(len(ids)))
    )
