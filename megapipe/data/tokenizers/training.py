"""Learns a vocabulary from texts: SentencePiece (BPE, unigram) and byte-level BPE."""

import io
import re
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Literal

from megapipe.data.errors import DataError

END_OF_DOCUMENT = "<|endoftext|>"
"""Name of the end of a document in what is trained here as byte-level BPE (SentencePiece models: </s>)."""


def train_sentence_piece(texts: Iterable[str], vocabulary_size: int, model_type: Literal["bpe", "unigram"]) -> bytes:
    """A SentencePiece .model of exactly `vocabulary_size` pieces that gives every text back whole.

    The settings that matter: nothing is normalised, trimmed or prefixed; line ends are pieces of their own; runs of
    spaces may be pieces (without these two, source code takes over half as many tokens again); bytes stand in for
    characters without a piece. Raises DataError when the texts are too few for the vocabulary.
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
            max_sentence_length=2**30,
            bos_id=-1,
            pad_id=-1,
            num_threads=16,  # changes the sums of unigram training, and so the model: the same on every machine
            minloglevel=2,
        )
    except RuntimeError as error:
        raise _sentence_piece_error(error, vocabulary_size) from error
    return model.getvalue()


def train_byte_level_bpe(texts: Iterable[str], vocabulary_size: int) -> bytes:
    """A tokenizer.json of exactly `vocabulary_size` tokens, split as GPT-2's; id 0 is END_OF_DOCUMENT.

    Raises DataError when the texts are too few for the vocabulary.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary_size,
        special_tokens=[END_OF_DOCUMENT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    learned = tokenizer.get_vocab_size()
    if learned < vocabulary_size:
        raise _too_few_texts(vocabulary_size, learned)
    if learned > vocabulary_size:
        raise DataError(f"a vocabulary of {vocabulary_size} does not hold all bytes, which take {learned}; raise it")
    content: str = tokenizer.to_str(pretty=True)
    return content.encode()


TRAINERS: dict[str, tuple[str, Callable[[Iterable[str], int], bytes]]] = {
    "sentencepiece-bpe": (".model", partial(train_sentence_piece, model_type="bpe")),
    "sentencepiece-unigram": (".model", partial(train_sentence_piece, model_type="unigram")),
    "byte-level-bpe": (".json", train_byte_level_bpe),
}
"""Kinds of tokenizers that can be trained: the suffix of the file, and the function that gives its content."""


def _lines(texts: Iterable[str]) -> Iterator[str]:
    for text in texts:
        yield from filter(None, text.split("\n"))


def _sentence_piece_error(error: RuntimeError, vocabulary_size: int) -> DataError:
    """The library's errors about sizes in words, any other as it is."""
    if largest := re.search(r"value <= (\d+)", str(error)):
        return _too_few_texts(vocabulary_size, int(largest[1]))
    if smallest := re.search(r"required_chars. \d+ vs (\d+)", str(error)):
        return DataError(
            f"a vocabulary of {vocabulary_size} does not hold the single characters of the input, which take "
            f"{smallest[1]}; raise --vocabulary-size"
        )
    if "sentences_.empty()" in str(error):
        return DataError("the input holds no text to learn from: check --input")
    return DataError(f"SentencePiece cannot train on this input: {error}")


def _too_few_texts(vocabulary_size: int, largest: int) -> DataError:
    return DataError(
        f"the input is too small for a vocabulary of {vocabulary_size}: it gives at most {largest}; lower "
        "--vocabulary-size or give more text"
    )
