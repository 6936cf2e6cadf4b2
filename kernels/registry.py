"""The kernel registry: decides which backend runs an op on given tensors, and why.

An op has a name, functions, and backends in order of preference, with the torch reference last. A
backend is a module with those functions and a rule that says which tensors it refuses. In the module, the function
`apply` has the name of the op (`gelu`), and the name of every other function starts with it (`softmax_forward`), so
that one module may have several ops; or an `Implementation` has the op's name (`layer_norm`). Modules that need more
than torch are given by name and imported when they are first needed. The table of ops is `megapipe.kernels.ops.OPS`;
the choices of a registry never change after it was built.

Kernels of a backend, and other functions whose bits a compiler must not change, are operators for compiled graphs
(`opaque`).
"""

import functools
import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from types import ModuleType, SimpleNamespace
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor, nn

from megapipe.config import nearest
from megapipe.kernels.preferences import Preferences

REFERENCE = "reference"
FLOATS = (torch.float32, torch.bfloat16, torch.float16)
LOWEST_CAPABILITY = (8, 0)


def not_nvidia(device: str) -> str | None:
    """Return why kernels for NVIDIA's GPUs cannot run on this type of device; None on these GPUs."""
    if device == "cpu":
        return "needs a GPU"
    return None if device == "cuda" else f"runs on NVIDIA GPUs, not on {device}"


def too_old() -> str | None:
    """Return why the current GPU does not run megapipe's own kernels; None if it does."""
    major, minor = torch.cuda.get_device_capability()
    if (major, minor) < LOWEST_CAPABILITY:
        return f"needs compute capability 8.0 or above, not {major}.{minor}"
    return None


def refused_dtype(dtype: torch.dtype, *taken: torch.dtype, of: str = "") -> str | None:
    """Return why kernels for the dtypes `taken` refuse this dtype of a tensor described by `of`; None if it is one of
    them."""
    if dtype in taken:
        return None
    *first_names, last = (str(each).removeprefix("torch.") for each in taken)
    listed = f"{', '.join(first_names)} and {last}" if first_names else last
    return f"takes {f'a {listed} {of}' if of else listed}, not {str(dtype).removeprefix('torch.')}"


def refusal(device: str, dtype: torch.dtype, width: int) -> str | None:
    """Return why kernels that support all widths and the usual dtypes refuse a tensor."""
    return refused_dtype(dtype, *FLOATS) or ("the last axis is empty" if width == 0 else None)


def refused_master(device: str, dtype: torch.dtype, width: int) -> str | None:
    """Return why AdamW refuses a master of this dtype; the backend is chosen for the master."""
    return refused_dtype(dtype, torch.float32, of="master")


class KernelError(ValueError):
    """An op or backend does not exist, or a requested backend cannot run; the message says how to fix it."""


class Implementation(SimpleNamespace):
    """The functions of one op by one backend, under the names that `KernelOp.functions` lists."""


@dataclass(frozen=True, eq=False)
class Backend:
    """One implementation of an op: a module of functions, and a rule for the tensors that it supports.

    name: `reference`, `triton`, `cuda` or `apex`. source: the module or its full name, by which it is imported at its
    first use. unavailable: returns for a device type why the backend supports no tensors there, or None; called before
    that import. only_requested: chosen only if the configuration names it, because some calls have arguments that it
    refuses.
    """

    name: str
    source: ModuleType | str
    unavailable: Callable[[str], str | None] | None = None
    only_requested: bool = False

    @cached_property
    def module(self) -> ModuleType:
        """The module, which is imported at the first use. Raises ImportError."""
        return importlib.import_module(self.source) if isinstance(self.source, str) else self.source

    @property
    def at_hand(self) -> bool:
        """Whether the module is available without an import."""
        return not isinstance(self.source, str)

    def refusal(self, op: str, device: str, dtype: torch.dtype, width: int) -> str | None:
        """Return why an op's tensors of this device type, dtype and last axis are refused; None if they are supported.

        The rule is the op's entry in the module's table `REFUSALS` or, without one, the module's function `refusal`; a
        module with neither supports everything. A module that cannot be imported supports nothing.
        """
        reason = None if self.unavailable is None else self.unavailable(device)
        if reason is not None:
            return reason
        try:
            rules = getattr(self.module, "REFUSALS", {})
            rule = rules.get(op, getattr(self.module, "refusal", None))
        except ImportError as error:
            return f"cannot be imported: {error}"
        return None if rule is None else rule(device, dtype, width)


@dataclass(frozen=True)
class KernelOp:
    """An op: functions that every backend has, and backends in order of preference, with the reference last."""

    name: str
    functions: tuple[str, ...]
    backends: tuple[Backend, ...]

    def __post_init__(self) -> None:
        for backend in self.backends:
            if backend.at_hand:
                self.implementation(backend)
        if not self.backends or self.backends[-1].name != REFERENCE:
            raise KernelError(f"op {self.name!r}: the last backend must be {REFERENCE!r}, which takes every tensor")

    def implementation(self, backend: Backend) -> Implementation:
        """Return the backend's functions. Raises KernelError if its module lacks a function of the op."""
        implementation = getattr(backend.module, self.name, None)
        if isinstance(implementation, Implementation):
            return implementation
        names = {name: self.name if name == "apply" else f"{self.name}_{name}" for name in self.functions}
        missing = [name for name in names.values() if not hasattr(backend.module, name)]
        if missing:
            raise KernelError(f"backend {backend.name!r} of op {self.name!r} lacks {', '.join(missing)}")
        return Implementation(**{name: getattr(backend.module, attribute) for name, attribute in names.items()})


@dataclass(frozen=True)
class Choice:
    """The backend for one kind of tensor, and why each preferred backend was refused."""

    op: str
    device: str
    dtype: torch.dtype
    width: int
    backend: str
    reasons: tuple[str, ...]

    def __str__(self) -> str:
        why = f" ({'; '.join(self.reasons)})" if self.reasons else ""
        dtype = str(self.dtype).removeprefix("torch.")
        return f"{self.op} on {self.device} {dtype} [..., {self.width}]: {self.backend}{why}"


class Registry:
    """A table of ops with the backends that the configuration requests.

    overrides: op name -> backend name. A requested backend runs or fails; there is no silent fallback. preferences:
    returns the measurements on the current GPU, or None; called when an op is first chosen for a GPU. Raises
    KernelError for an unknown op or backend, naming the nearest.
    """

    def __init__(
        self,
        ops: Sequence[KernelOp],
        overrides: Mapping[str, str] | None = None,
        preferences: Callable[[], Preferences | None] = lambda: None,
    ) -> None:
        self._preferences = preferences
        self._ops = {op.name: op for op in ops}
        self._implementations = {
            (op.name, backend.name): op.implementation(backend)
            for op in self._ops.values()
            for backend in op.backends
            if backend.at_hand
        }
        self._overrides = dict(overrides or {})
        self._choices: dict[tuple[str, str, torch.dtype, int], Choice] = {}

        # A constant for a compiler, which guards its graphs on device, dtype and shape anyway. Not a method, because
        # torch 2.11 needs constants for arguments.
        @constant_when_compiled
        def name_picked(op: str, device: str, dtype: torch.dtype, width: int) -> str:
            return self.choice(op, device, dtype, width).backend

        self._name_picked = name_picked
        for op, backend in self._overrides.items():
            names = [each.name for each in self._op(op).backends]
            if backend not in names:
                raise KernelError(
                    f"op {op!r} has no backend {backend!r}{nearest(backend, names)}; it has {', '.join(names)}"
                )

    @property
    def ops(self) -> tuple[KernelOp, ...]:
        """Return every op, each with its backends in order of preference."""
        return tuple(self._ops.values())

    def with_overrides(self, overrides: Mapping[str, str]) -> "Registry":
        """Return a registry of the same ops with other requested backends."""
        return Registry(self.ops, overrides, self._preferences)

    def is_requested(self, op: str) -> bool:
        """Return whether the configuration names a backend for this op."""
        return op in self._overrides

    def pick(self, op: str, tensor: Tensor) -> Implementation:
        """Return the functions that run `op` on such a tensor, by its device type, dtype and length of the last axis.

        Raises KernelError for an unknown op, and if a requested backend refuses the tensor.
        """
        backend = self._name_picked(op, tensor.device.type, tensor.dtype, tensor.shape[-1])
        return self._implementations[op, backend]

    def reference(self, op: str) -> Implementation:
        """Return the functions of the op's reference, which supports every tensor."""
        return self._implementations[op, REFERENCE]

    def choice(self, op: str, device: str, dtype: torch.dtype, width: int) -> Choice:
        """Return the decision that `pick` makes for such tensors."""
        key = (op, device, dtype, width)
        choice = self._choices.get(key)
        if choice is None:
            choice = self._choices[key] = self._decide(*key)
        return choice

    def report(self) -> str:
        """Return one line per kind of tensor used so far: the backend, and why each preferred one was refused."""
        return "\n".join(sorted(str(choice) for choice in self._choices.values()))

    def _decide(self, op: str, device: str, dtype: torch.dtype, width: int) -> Choice:
        requested = self._overrides.get(op)
        reasons = []
        for backend in self._in_order(op, device, dtype, width):
            if requested is not None and backend.name != requested:
                continue
            refusal = backend.refusal(op, device, dtype, width)
            if refusal is None and backend.only_requested and requested is None:
                refusal = "runs only where kernels.backends names it"
            if refusal is None:
                if requested is not None:
                    reasons = ["requested by the configuration"]
                elif backend.name not in (self._op(op).backends[0].name, REFERENCE) and not reasons:
                    reasons = ["the fastest measured on this GPU"]
                if (op, backend.name) not in self._implementations:
                    self._implementations[op, backend.name] = self._op(op).implementation(backend)
                return Choice(op, device, dtype, width, backend.name, tuple(reasons))
            reasons.append(f"{backend.name}: {refusal}")
        raise KernelError(
            f"op {op!r} is requested from backend {requested!r}, "
            f"which does not support {device} {dtype} tensors with a last axis of {width}: "
            f"{'; '.join(reasons)}; remove that request, or request {REFERENCE!r}"
        )

    def _in_order(self, op: str, device: str, dtype: torch.dtype, width: int) -> list[Backend]:
        """Return the op's backends: those that were measured at a similar size, then the others."""
        preferences = self._preferences() if device == "cuda" else None
        measured = () if preferences is None else preferences.order(op, dtype, width)
        places = {name: place for place, name in enumerate(measured) if name != REFERENCE}
        return sorted(self._op(op).backends, key=lambda backend: places.get(backend.name, len(measured)))

    def _op(self, name: str) -> KernelOp:
        if name not in self._ops:
            raise KernelError(f"there is no op {name!r}{nearest(name, self._ops)}; ops are {', '.join(self._ops)}")
        return self._ops[name]


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
