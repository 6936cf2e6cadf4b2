"""Tokenizers of the Hugging Face library: tokenizer.json, GPT-2's vocab.json with merges.txt, BERT's vocab.txt.

Byte-level BPE and WordPiece can also be learned from texts. A byte-level BPE can use a faster core to encode.
"""

import json
import os
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeGuard

import numpy as np

from megapipe.config.files import read_json
from megapipe.data import DataError
from megapipe.data.tokenizers.model_files import Tokenizer, fingerprint_of_files, too_few_texts

if TYPE_CHECKING:
    import tokenizers


END_OF_DOCUMENT_NAMES = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|endofdoc|>", "[SEP]")
"""Names of tokens that end documents, in order of preference, if no name is specified."""


class HuggingFaceTokenizer(Tokenizer):
    """A tokenizer of the tokenizers library, without truncation, padding, and its template (tokens at the beginning
    and end)."""

    def __init__(self, tokenizer: "tokenizers.Tokenizer", spec: str, fingerprint: str, end: str | None) -> None:
        """Wrap a tokenizer. end: name of the token that ends documents; None uses the first of END_OF_DOCUMENT_NAMES,
        if any.

        Raises DataError for a name that is not in the vocabulary.
        """
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self._tokenizer = tokenizer
        self.fingerprint = fingerprint
        self.spec = spec
        # The number of entries may be smaller, because ids may have gaps.
        self.vocabulary_size: int = max(tokenizer.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        self.end_of_document = self._find_end(end)
        self.special_tokens: dict[str, int] = {
            token.content: number
            for number, token in sorted(tokenizer.get_added_tokens_decoder().items())
            if token.special
        }
        self.fast_core: Callable[[str], np.ndarray] | None = None
        """Function that returns the ids of `encode` faster; see `FastCore`."""

    def read_special_tokens(self, as_tokens: bool) -> None:
        self._tokenizer.encode_special_tokens = not as_tokens

    def encode(self, text: str) -> list[int]:
        # The batch call does not compute character offsets, which take a third of the time.
        return self._tokenizer.encode_batch_fast([text], add_special_tokens=False)[0].ids

    def encode_array(self, text: str) -> np.ndarray:
        if self.fast_core is not None:
            return self.fast_core(text)
        return super().encode_array(text)

    def definition(self) -> str:
        """Return the tokenizer.json without unused parts, and without special tokens if their names are text."""
        content = json.loads(self._tokenizer.to_str())
        if self._tokenizer.encode_special_tokens:
            content["added_tokens"] = [token for token in content["added_tokens"] if not token["special"]]
        return json.dumps({**content, "post_processor": None, "truncation": None, "padding": None})

    def decode(self, ids: Sequence[int]) -> str:
        tokens = [int(token) for token in ids if token != self.end_of_document]
        return self._tokenizer.decode(tokens, skip_special_tokens=False)

    def _find_end(self, name: str | None) -> int | None:
        candidates = [name] if name is not None else END_OF_DOCUMENT_NAMES
        ids = map(self._tokenizer.token_to_id, candidates)
        end: int | None = next((token for token in ids if token is not None), None)
        if name is not None and end is None:
            raise DataError(f"{self.spec} has no token {name!r} to end documents with; name one that it has")
        return end


def open_tokenizer_json(path: Path, end: str | None) -> HuggingFaceTokenizer:
    """Open a tokenizer.json. The end of a document is `end`, or else the eos_token of the tokenizer_config.json in the
    same folder.

    Raises DataError for a file that the library cannot read.
    """
    import tokenizers

    try:
        tokenizer = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare Exception
        raise DataError(f"{path} is not a tokenizer.json that can be read: {error}") from error
    end = end if end is not None else _eos_token(path.with_name("tokenizer_config.json"))
    return HuggingFaceTokenizer(tokenizer, str(path), fingerprint_of_files(path), end)


def open_gpt2_files(vocabulary: Path, merges: Path, end: str | None) -> HuggingFaceTokenizer:
    """Open a byte-level BPE from the two files of GPT-2's publication.

    Raises DataError for files that do not belong together.
    """
    import tokenizers

    try:
        tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE.from_file(str(vocabulary), str(merges)))
    except Exception as error:  # the library raises bare Exception
        raise DataError(f"{vocabulary} and {merges} are not a vocabulary and its merges: {error}") from error
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    # The end is an ordinary entry of vocab.json; without this, its name in a text would be split.
    tokenizer.add_special_tokens([name for name in END_OF_DOCUMENT_NAMES if tokenizer.token_to_id(name) is not None])
    return HuggingFaceTokenizer(tokenizer, str(vocabulary), fingerprint_of_files(vocabulary, merges), end)


BERT_SPECIAL_TOKENS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")


def open_bert_vocabulary(path: Path, spec: str, lowercase: bool | None, end: str | None) -> HuggingFaceTokenizer:
    """Open a WordPiece tokenizer from the vocab.txt of BERT's publication, one token per line.

    lowercase: convert to lower case and strip accents; None reads do_lower_case from a tokenizer_config.json in the
    same folder. Raises DataError if that file does not set it, and if one of BERT_SPECIAL_TOKENS is missing.
    """
    import tokenizers

    configured = _configuration(path.with_name("tokenizer_config.json")).get("do_lower_case")
    lowercase = configured if lowercase is None and isinstance(configured, bool) else lowercase
    if lowercase is None:
        raise DataError(
            f"it is unknown whether {path} is for lower-case text; pass it as bert-uncased:{path} or bert-cased:{path}"
        )
    try:
        vocabulary = tokenizers.models.WordPiece.read_file(str(path))
    except Exception as error:  # the library raises bare Exception
        raise DataError(f"{path} is not a vocabulary of one token per line: {error}") from error
    if missing := [name for name in BERT_SPECIAL_TOKENS if name not in vocabulary]:
        raise DataError(f"{path} has no token {missing[0]}; a BERT vocabulary has {', '.join(BERT_SPECIAL_TOKENS)}")
    tokenizer = word_piece(vocabulary, BERT_SPECIAL_TOKENS, lowercase)
    fingerprint = fingerprint_of_files(path, extra=f"lowercase {lowercase}")
    return HuggingFaceTokenizer(tokenizer, spec, fingerprint, end)


def word_piece(vocabulary: dict[str, int], special_tokens: Sequence[str], lowercase: bool) -> "tokenizers.Tokenizer":
    """Return BERT's tokenizer for a vocabulary, which contains `special_tokens`."""
    import tokenizers

    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordPiece(vocabulary, unk_token="[UNK]"))
    tokenizer.normalizer = tokenizers.normalizers.BertNormalizer(lowercase=lowercase)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = tokenizers.decoders.WordPiece()
    tokenizer.add_special_tokens(list(special_tokens))
    return tokenizer


END_OF_DOCUMENT = "<|endoftext|>"
"""Name of the token that ends documents in byte-level BPE from this module (in SentencePiece models: </s>)."""


def train_byte_level_bpe(texts: Iterable[str], vocabulary_size: int, special_tokens: Sequence[str]) -> bytes:
    """Return a tokenizer.json of exactly `vocabulary_size` tokens, which splits texts like GPT-2.

    Id 0 is END_OF_DOCUMENT; the special tokens follow. Raises DataError if there is too little text for the
    vocabulary.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary_size,
        special_tokens=[END_OF_DOCUMENT, *special_tokens],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return _checked(tokenizer, vocabulary_size, "all bytes")


def train_word_piece(
    texts: Iterable[str], vocabulary_size: int, special_tokens: Sequence[str], lowercase: bool
) -> bytes:
    """Return BERT's WordPiece as a tokenizer.json of exactly `vocabulary_size` tokens, BERT's special tokens first.

    Without `lowercase`, case and accents are kept. Raises DataError if there is too little text for the vocabulary.
    """
    names = [*BERT_SPECIAL_TOKENS, *special_tokens]
    # The library numbers continuing characters in the order of its hash table, which differs in every run, and breaks
    # ties by number. The numbers are fixed if the characters are passed to it as the first tokens.
    alphabet = _train_word_piece(texts, 0, names, lowercase)
    characters = sorted(token for token in alphabet if len(token) == 3 and token.startswith("##"))
    vocabulary = _train_word_piece(texts, vocabulary_size, [*names, *characters], lowercase)
    tokenizer = word_piece(vocabulary, names, lowercase)
    return _checked(tokenizer, vocabulary_size, "the single characters of the input")


def _train_word_piece(
    texts: Iterable[str], vocabulary_size: int, first_tokens: Sequence[str], lowercase: bool
) -> dict[str, int]:
    from tokenizers import trainers

    tokenizer = word_piece({}, [], lowercase)
    trainer = trainers.WordPieceTrainer(
        vocab_size=vocabulary_size, special_tokens=list(first_tokens), show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer.get_vocab()


def _checked(tokenizer: "tokenizers.Tokenizer", vocabulary_size: int, smallest: str) -> bytes:
    learned = tokenizer.get_vocab_size()
    if learned < vocabulary_size:
        raise too_few_texts(vocabulary_size, learned)
    if learned > vocabulary_size:
        raise DataError(
            f"a vocabulary of {vocabulary_size} is too small for {smallest}, which need "
            f"{learned}; raise --vocabulary-size"
        )
    content: str = tokenizer.to_str(pretty=True)
    return content.encode()


def _eos_token(config: Path) -> str | None:
    """Return the eos_token of a tokenizer_config.json."""
    token = token_of_role(_configuration(config), "eos_token")
    return token if isinstance(token, str) else None


def token_of_role(config: Mapping[str, Any], role: str) -> Any:
    """Return the token that a tokenizer_config.json names for a role, as a string or as an object."""
    token = config.get(role)
    return token.get("content") if isinstance(token, dict) else token


def _configuration(path: Path) -> dict[str, object]:
    if not path.is_file():
        return {}
    content = read_json(path, DataError)
    if not isinstance(content, dict):
        raise DataError(f"{path} does not contain a JSON object; repair or remove it")
    return content


CHECKED_BYTES = 1_000_000
"""Number of characters of input text that are compared; the library needs about 0.3 s for them."""
_RENEWAL_CHARACTERS = 64_000_000
"""Number of characters of text after which the core is recreated, because it caches every word."""
_CHARACTERS_PER_TEXT = 500


class FastCore:
    """Returns the ids of a text by the gigatoken library, with memory that does not grow with the corpus."""

    def __init__(self, definition: str) -> None:
        """Read `definition`, the content of a tokenizer.json. Raises an error of the library if it is not
        supported."""
        self._definition = definition.encode()
        self._remaining = 0
        self._core: Any = None
        self._renew()

    def __call__(self, text: str) -> np.ndarray:
        if self._remaining <= 0:
            self._renew()
        self._remaining -= len(text)
        return self._core.encode(text)

    def _renew(self) -> None:
        # Use one thread, because several workers run in parallel.
        os.environ.setdefault("RAYON_NUM_THREADS", "1")
        import gigatoken

        self._core = None  # free its cache before the next one is created
        self._core = gigatoken.Tokenizer.from_json(self._definition).backend
        self._remaining = _RENEWAL_CHARACTERS


def use_fast_core(tokenizer: Tokenizer) -> None:
    """Make `encode_array` use the fast core, after `why_no_fast_core` has returned None."""
    if isinstance(tokenizer, HuggingFaceTokenizer):
        tokenizer.fast_core = FastCore(tokenizer.definition())


def why_no_fast_core(tokenizer: HuggingFaceTokenizer, texts: Iterable[str]) -> str | None:
    """Return the reason not to use the fast core; None if it returns the library's ids.

    The comparison covers all assigned Unicode characters (a sample of ideographs and Hangul), special tokens within
    text, and about CHECKED_BYTES of `texts`.
    """
    try:
        core = FastCore(tokenizer.definition())
    except Exception as error:  # the library raises various errors
        return f"it does not support this tokenizer ({error})"
    for text in (*_tricky_texts(tokenizer), *_limited(texts)):
        if core(text).tolist() != tokenizer.encode(text):
            shown = text if len(text) <= 60 else text[:57] + "..."
            return f"its ids differ from those of the tokenizers library for {shown!r}"
    return None


def is_byte_level_bpe(tokenizer: Tokenizer) -> TypeGuard[HuggingFaceTokenizer]:
    """Return whether a tokenizer is a byte-level BPE of the tokenizers library; the fast core encodes only this
    kind."""
    if not isinstance(tokenizer, HuggingFaceTokenizer):
        return False
    content = json.loads(tokenizer.definition())
    return content["model"]["type"] == "BPE" and '"ByteLevel"' in json.dumps(content["pre_tokenizer"])


def _tricky_texts(tokenizer: HuggingFaceTokenizer) -> Iterator[str]:
    for name in tokenizer.special_tokens:
        yield f"before{name}after {name} {name}\n{name}{name}"
    for space in (" ", "\n", "\t", "\r\n", "\u00a0", " \n "):
        yield f"x{space * 1000}y{space * 7}"
    yield from ("", "\x00", "it's I'M we'Ll don't 'tis 1234567 a1b2", "x" * 10_000)
    characters = [chr(code) for code in (*range(0x32400), *range(0xE0000, 0xE0200)) if _is_tested(code)]
    for start in range(0, len(characters), _CHARACTERS_PER_TEXT):
        chunk = characters[start : start + _CHARACTERS_PER_TEXT]
        yield "".join(f"a{character}1 {character}{character}\n{character}b" for character in chunk)


def _is_tested(code: int) -> bool:
    category = unicodedata.category(chr(code))
    is_large_block = 0x3400 <= code < 0xD7A4 or 0x17000 <= code < 0x18D00 or 0x20000 <= code < 0x32400
    return category not in ("Cn", "Co", "Cs") and (not is_large_block or code % 97 == 0)


def _limited(texts: Iterable[str]) -> Iterator[str]:
    remaining = CHECKED_BYTES
    for text in texts:
        yield text[:remaining]
        remaining -= len(text)
        if remaining <= 0:
            return
