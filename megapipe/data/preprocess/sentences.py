"""Sentences of a text, as BERT's samples need them."""

import importlib.metadata

_SPACES = {code: " " for code in range(0x80, 0x3001) if chr(code).isspace()}


def sentence_splitter_name(language: str) -> str:
    """For manifests: another version may split otherwise."""
    return f"sentencex {importlib.metadata.version('sentencex')}, {language}"


def split_sentences(text: str, language: str = "en") -> list[str]:
    """Sentences in order, each with the white space around it; together they are the text, nothing lost.

    A blank line ends a sentence, a line end does not. Pieces of white space alone belong to the sentence before.
    """
    sentences: list[str] = []
    for paragraph in _paragraphs(text):
        for sentence in _split_paragraph(paragraph, language):
            if sentences and not sentence.strip():
                sentences[-1] += sentence
            else:
                sentences.append(sentence)
    return sentences


def _paragraphs(text: str) -> list[str]:
    """Runs of lines up to a blank one."""
    paragraphs: list[str] = []
    begin = position = 0
    for line in text.splitlines(keepends=True):
        position += len(line)
        if not line.strip():
            paragraphs.append(text[begin:position])
            begin = position
    return [*paragraphs, text[begin:]] if begin < len(text) else paragraphs


def _split_paragraph(paragraph: str, language: str) -> list[str]:
    import sentencex

    # The library fails on white space of several bytes, so it sees plain spaces; only lengths are taken from it.
    plain = paragraph.translate(_SPACES)
    pieces = sentencex.segment(language, plain)
    if "".join(pieces) != plain:
        return [paragraph]
    sentences, position = [], 0
    for piece in pieces:
        sentences.append(paragraph[position : position + len(piece)])
        position += len(piece)
    return sentences
