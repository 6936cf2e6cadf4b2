"""Training of vocabularies on texts: SentencePiece (BPE, unigram), byte-level BPE and WordPiece."""

import io
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Literal

from megapipe.data import DataError
from megapipe.data.tokenizers.hugging_face import BERT_SPECIAL_TOKENS, word_piece

if TYPE_CHECKING:
    import tokenizers

END_OF_DOCUMENT = "<|endoftext|>"
"""Name of the token that ends documents in byte-level BPE from this module (in SentencePiece models: </s>)."""
RESERVED_TOKENS = (END_OF_DOCUMENT, *BERT_SPECIAL_TOKENS, "<unk>", "</s>")


def train_sentence_piece(
    texts: Iterable[str], vocabulary_size: int, special_tokens: Sequence[str], model_type: Literal["bpe", "unigram"]
) -> bytes:
    """Return a SentencePiece .model of exactly `vocabulary_size` pieces, from which decoding restores every text.

    Important settings: texts are not normalized, trimmed or prefixed; line ends are separate pieces, and sequences of
    spaces may be pieces (without these two settings, source code has over 50% more tokens); characters without a piece
    are split into bytes. Raises DataError if there is too little text for the vocabulary.
    """
    import sentencepiece

    model = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=_lines(texts),
            model_writer=model,
            model_type=model_type,
            vocab_size=vocabulary_size,
            byte_fallback=True,
            normalization_rule_name="identity",
            add_dummy_prefix=False,
            remove_extra_whitespaces=False,
            allow_whitespace_only_pieces=True,
            user_defined_symbols=["\n"],
            control_symbols=list(special_tokens),
            max_sentence_length=2**30,
            bos_id=-1,
            pad_id=-1,
            num_threads=16,  # fixed, because the number changes the sums of unigram training, and so the model
            minloglevel=2,
        )
    except RuntimeError as error:
        raise _sentence_piece_error(error, vocabulary_size) from error
    return model.getvalue()


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
    vocabulary: dict[str, int] = tokenizer.get_vocab()
    return vocabulary


def _checked(tokenizer: "tokenizers.Tokenizer", vocabulary_size: int, smallest: str) -> bytes:
    learned = tokenizer.get_vocab_size()
    if learned < vocabulary_size:
        raise _too_few_texts(vocabulary_size, learned)
    if learned > vocabulary_size:
        raise DataError(
            f"a vocabulary of {vocabulary_size} is too small for {smallest}, which need {learned}; raise "
            "--vocabulary-size"
        )
    content: str = tokenizer.to_str(pretty=True)
    return content.encode()


Trainer = Callable[[Iterable[str], int, Sequence[str]], bytes]

TRAINERS: dict[str, tuple[str, Trainer]] = {
    "sentencepiece-bpe": (".model", partial(train_sentence_piece, model_type="bpe")),
    "sentencepiece-unigram": (".model", partial(train_sentence_piece, model_type="unigram")),
    "byte-level-bpe": (".json", train_byte_level_bpe),
    "wordpiece-uncased": (".json", partial(train_word_piece, lowercase=True)),
    "wordpiece-cased": (".json", partial(train_word_piece, lowercase=False)),
}
"""For each kind of tokenizer: the suffix of its file, and the function that trains it and returns the content."""


def _lines(texts: Iterable[str]) -> Iterator[str]:
    for text in texts:
        yield from filter(None, text.split("\n"))


def _sentence_piece_error(error: RuntimeError, vocabulary_size: int) -> DataError:
    """Return a clear error for the library's errors about sizes, and any other error unchanged."""
    if largest := re.search(r"value <= (\d+)", str(error)):
        return _too_few_texts(vocabulary_size, int(largest[1]))
    if smallest := re.search(r"required_chars. \d+ vs (\d+)", str(error)):
        return DataError(
            f"a vocabulary of {vocabulary_size} is too small for the single characters of the input, which need "
            f"{smallest[1]}; raise --vocabulary-size"
        )
    if "sentences_.empty()" in str(error):
        return DataError("the input contains no text to learn from: check --input")
    return DataError(f"SentencePiece cannot train on this input: {error}")


def _too_few_texts(vocabulary_size: int, largest: int) -> DataError:
    return DataError(
        f"the input is too small for a vocabulary of {vocabulary_size}: it allows at most {largest}; lower "
        "--vocabulary-size or add more text"
    )
