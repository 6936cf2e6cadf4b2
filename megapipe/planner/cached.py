"""Methods whose answers are kept with their instance."""

from collections.abc import Callable
from functools import cache, partial
from typing import Any, TypeVar, cast

Method = TypeVar("Method", bound=Callable[..., Any])


class _CachedMethod:
    def __init__(self, method: Callable[..., Any]) -> None:
        self._method = method

    def __get__(self, instance: Any, owner: type) -> Any:
        # The instance's own attribute takes the place of this one, so that later calls only look the answer up.
        found = instance.__dict__[self._method.__name__] = cache(partial(self._method, instance))
        return found


def cached_method(method: Method) -> Method:
    """Return a method that finds each answer once per instance; arguments must be hashable and positional."""
    return cast(Method, _CachedMethod(method))
