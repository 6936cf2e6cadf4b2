"""The exception for data that cannot be used."""


class DataError(ValueError):
    """Input that cannot be used. The message names the file, the value, the rule that it breaks, and how to fix it."""
