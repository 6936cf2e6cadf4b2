"""From the name that a user gives to a tokenizer."""

from pathlib import Path

from megapipe.data.errors import DataError
from megapipe.data.tokenizers.byte_tokenizer import ByteTokenizer
from megapipe.data.tokenizers.hugging_face import open_tokenizer_json
from megapipe.data.tokenizers.protocol import Tokenizer


def open_tokenizer(spec: str, end_of_document: str | None = None) -> Tokenizer:
    """`bytes`, or the path of a tokenizer.json or of a folder that holds one.

    `end_of_document` names the token that ends documents where the tokenizer leaves it open. Raises DataError.
    """
    if spec == "bytes":
        if end_of_document is not None:
            raise DataError(f"the byte tokenizer has its own end of document (256), it cannot be {end_of_document!r}")
        return ByteTokenizer()
    path = Path(spec)
    if path.is_dir():
        path = path / "tokenizer.json"
    if not path.is_file():
        raise DataError(f"no tokenizer {spec!r}: write bytes, or the path of a tokenizer.json")
    return open_tokenizer_json(path, end_of_document)
