"""Operators that a compiler calls but does not rewrite, and constants that it does not trace."""

import functools
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor, nn

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")

_PLAIN = (Tensor, nn.Parameter)
_LIBRARY = torch.library.Library("megapipe", "FRAGMENT")


def opaque(
    schema: str,
    fake: Callable[..., Any],
    setup_context: Callable[..., None] | None = None,
    backward: Callable[..., Any] | None = None,
) -> Callable[[Callable[Arguments, Result]], Callable[Arguments, Result]]:
    """Decorate a pure function of tensors so that compiled graphs call it as one operator, `megapipe::<name>`.

    Compilers reorder sums when they fuse them. Functions that must give the same bits inside and outside of a compiled
    backward, such as the weight half of a split backward, are therefore opaque to them; so are kernels that compilers
    do not know. Eager calls go directly to the function, unless autograd needs its backward, or tensors have a
    subclass, such as those that tracing without the compiler passes through the backward.

    schema: `name(Tensor x, ...) -> ...` in torch's schema language. fake: computes only the shapes and dtypes of the
    results. setup_context, backward: as `torch.library.register_autograd` takes them; None for an operator without
    gradients.
    """

    def decorate(function: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
        name = schema.partition("(")[0]
        _LIBRARY.define(schema)
        _LIBRARY.impl(name, function, "CompositeExplicitAutograd")
        torch.library.register_fake(f"megapipe::{name}", fake, lib=_LIBRARY)
        if backward is not None:
            torch.library.register_autograd(f"megapipe::{name}", backward, setup_context=setup_context, lib=_LIBRARY)
        operator = getattr(torch.ops.megapipe, name).default

        @functools.wraps(function)
        def call(*arguments: Arguments.args, **named: Arguments.kwargs) -> Result:
            if torch.compiler.is_compiling() or (backward is not None and torch.is_grad_enabled()):
                return operator(*arguments, **named)
            if any(isinstance(value, Tensor) and type(value) not in _PLAIN for value in arguments):
                return operator(*arguments, **named)
            return function(*arguments, **named)

        return call

    return decorate


def constant_when_compiled(function: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """Decorate a pure function of constants, which a compiler then calls instead of tracing it.

    `torch.compiler.assume_constant_result` does the same, but imports the whole compiler, for a second.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function
