"""Methods whose answers are kept with their instance."""

from collections.abc import Callable
from functools import cache, cached_property, partial
from typing import Any, TypeVar, cast

Method = TypeVar("Method", bound=Callable[..., Any])


def cached_method(method: Method) -> Method:
    """Return a method that finds each answer once per instance; arguments must be hashable and positional."""
    return cast(Method, cached_property(lambda instance: cache(partial(method, instance))))
