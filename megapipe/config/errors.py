"""The one exception that a wrong configuration raises."""

import difflib
from collections.abc import Iterable, Sequence


class ConfigError(ValueError):
    """A configuration that cannot run. The message names each wrong value, the rule it breaks and the way out."""

    def __init__(self, problems: str | Sequence[str]) -> None:
        self.problems = [problems] if isinstance(problems, str) else list(problems)
        super().__init__("\n".join(self.problems))


def nearest(name: str, known: Iterable[str]) -> str:
    """A suffix such as `; did you mean 'hidden_size'?`, empty when no known name is close."""
    matches = difflib.get_close_matches(name, list(known), n=1, cutoff=0.6)
    return f"; did you mean {matches[0]!r}?" if matches else ""
