"""Text to tokens to micro-batches: tokenizers, .bin/.idx shards, sample order, loading; and the error for bad data."""

from megapipe.config import InputError


class DataError(InputError, ValueError):
    """Input that cannot be used. The message names the file, the value, the rule that it breaks, and how to fix it."""
