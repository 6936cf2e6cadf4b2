"""Tokenizers behind one protocol, opened by the name a user gives them."""

from megapipe.data.tokenizers.opening import open_tokenizer
from megapipe.data.tokenizers.protocol import Tokenizer

__all__ = ["Tokenizer", "open_tokenizer"]
