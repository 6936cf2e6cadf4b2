"""The one exception that unusable data raises."""


class DataError(ValueError):
    """Input that cannot be used. The message names the file and the value, the rule it breaks and the way out."""
