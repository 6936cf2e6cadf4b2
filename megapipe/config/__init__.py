"""Typed, documented configuration and its validation; and the error for an invalid one. Imports no torch."""

import difflib
from collections.abc import Iterable, Sequence


class InputError(Exception):
    """An error in the input of a command; its message is for the user."""


class ConfigError(InputError, ValueError):
    """An invalid configuration. The message names each wrong value, the rule that it breaks, and how to fix it."""

    def __init__(self, problems: str | Sequence[str]) -> None:
        self.problems = [problems] if isinstance(problems, str) else list(problems)
        super().__init__("\n".join(self.problems))


def nearest(name: str, names: Iterable[str]) -> str:
    """Return a suffix such as `; did you mean 'hidden_size'?`, or an empty string if none of the names is close."""
    matches = difflib.get_close_matches(name, list(names), n=1, cutoff=0.6)
    return f"; did you mean {matches[0]!r}?" if matches else ""
