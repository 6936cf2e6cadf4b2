"""From the name that a user gives to a tokenizer."""

from pathlib import Path

from megapipe.data.errors import DataError
from megapipe.data.tokenizers.byte_tokenizer import ByteTokenizer
from megapipe.data.tokenizers.hugging_face import open_gpt2_files, open_tokenizer_json
from megapipe.data.tokenizers.protocol import Tokenizer
from megapipe.data.tokenizers.sentence_piece import SentencePieceTokenizer

_FILES_IN_FOLDERS = ("tokenizer.json", "tokenizer.model", "vocab.json")


def open_tokenizer(spec: str, end_of_document: str | None = None) -> Tokenizer:
    """Opens what `spec` names:

    - `bytes`
    - a tokenizer.json of Hugging Face (any name that ends in .json)
    - a SentencePiece model (any name that ends in .model)
    - GPT-2's vocab.json or merges.txt, the other one beside it
    - a folder that holds one of these by its usual name, as Hugging Face models do

    `end_of_document` names the token that ends documents where the tokenizer leaves it open. Raises DataError.
    """
    if spec == "bytes":
        if end_of_document is not None:
            raise DataError(f"the byte tokenizer has its own end of document (256), it cannot be {end_of_document!r}")
        return ByteTokenizer()
    path = Path(spec)
    if path.is_dir():
        path = next((path / name for name in _FILES_IN_FOLDERS if (path / name).is_file()), path)
    if not path.is_file():
        raise DataError(
            f"no tokenizer {spec!r}: write bytes, or the path of a tokenizer.json, a SentencePiece .model, "
            f"a vocab.json with merges.txt, or a folder with one of {', '.join(_FILES_IN_FOLDERS)}"
        )
    if path.name in ("vocab.json", "merges.txt"):
        return open_gpt2_files(path.with_name("vocab.json"), path.with_name("merges.txt"), end_of_document)
    if path.suffix == ".model":
        return SentencePieceTokenizer(path, end_of_document)
    return open_tokenizer_json(path, end_of_document)
