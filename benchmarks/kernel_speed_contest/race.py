"""A race of one op at one size: all contestants take turns with the same inputs."""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import cast

import torch
from torch import Tensor

from megapipe.kernels.ops import OPS
from megapipe.kernels.registry import REFERENCE, KernelError

from .case import Case, Draw, Entry, Size, Work
from .clock import Ceiling, Clock

FORWARD, BOTH = "forward", "forward+backward"
BACKENDS = ("triton", "cuda", "apex")
TORCH, COMPILED, LIGER = "torch", "torch.compile", "Liger"
CONTESTANTS = (*BACKENDS, REFERENCE, TORCH, COMPILED, LIGER)


NoArguments = Callable[[], object]
Calls = Callable[[], list[NoArguments]]
"""Returns a list with one call for each set of inputs."""


@dataclass(frozen=True)
class Figure:
    """One measurement.

    bytes, flops: bytes that the op must move, and its FLOPs. seconds, share: None if the contestant failed. share: the
    least time at the device's measured speed, divided by the time taken. picked: dtype and last axis of the tensor
    that the registry picks a backend by.
    """

    case: str
    op: str
    rows: int
    width: int
    direction: str
    contestant: str
    bytes: float
    flops: float
    seconds: float | None
    share: float | None
    failure: str | None = None
    picked: tuple[str, int] = ("", 0)


@dataclass(frozen=True)
class Field:
    """Contestants by name, and the reasons why others are missing."""

    entries: dict[str, Entry]
    absent: dict[str, str]


def field(case: Case, size: Size, inputs: Sequence[Tensor]) -> Field:
    """Return the contestants that can run the case on this device. On a CPU, the reference is also a contestant."""
    device, dtype, width = inputs[0].device.type, inputs[0].dtype, inputs[0].shape[-1]
    entries, absent = {}, {}
    for backend in BACKENDS if device == "cuda" else (*BACKENDS, REFERENCE):
        try:
            ops = OPS.with_overrides({case.op: backend})
        except KernelError:
            continue  # the op has no such backend
        try:
            ops.choice(case.op, device, dtype, width)
        except KernelError as error:
            absent[backend] = str(error).partition(f"{backend}: ")[2].partition("; remove that request")[0]
            continue
        entries[backend] = case.entry(ops.pick(case.op, inputs[0]))
    entries[TORCH] = case.torch
    if device == "cuda":
        entries[COMPILED] = _compiled(case.compiled or case.torch)
        if case.liger is not None:
            try:
                entries[LIGER] = case.liger()
            except Exception as error:  # it may not support this version of Triton or this GPU
                absent[LIGER] = failure_of(error)
    return Field(entries, absent)


def run(case: Case, size: Size, clock: Clock, ceiling: Ceiling, repeats: int) -> tuple[list[Figure], dict[str, str]]:
    """Return the figures of all contestants, and the reasons why others are missing."""
    torch.compiler.reset()  # without this, torch stops compiling after a few sizes
    if clock.device.type == "cuda":
        torch.cuda.empty_cache()  # sizes differ by a factor of a hundred
    dtype = torch.bfloat16
    forward, both = case.work(size, dtype.itemsize)
    sets = [case.draw(size, Draw(clock.device, dtype, seed)) for seed in range(clock.copies(forward.bytes))]
    contestants = field(case, size, sets[0])
    figures = _measured(case, size, FORWARD, forward, _forward_calls(contestants.entries, sets), clock, repeats)
    if both is not None:
        try:
            calls = _both_calls(contestants.entries, sets)
        except Exception as error:  # torch's results, from which gradients are made, may not fit in memory
            calls = dict.fromkeys(contestants.entries, partial(_raise, error))
        figures += _measured(case, size, BOTH, both, calls, clock, repeats)
    picked = (str(sets[0][0].dtype).removeprefix("torch."), sets[0][0].shape[-1])
    return [replace(_with_share(figure, ceiling), picked=picked) for figure in figures], contestants.absent


def gradients_of(entry: Entry, inputs: Sequence[Tensor], results: Sequence[Tensor] = ()) -> tuple[object, object]:
    """Run forward and backward with autograd, and return the results and the gradients of the inputs that need them.

    results: gradients of the results.
    """
    outputs = entry.forward(*inputs)
    leaves = [tensor for tensor in inputs if tensor.requires_grad]
    return outputs, torch.autograd.grad(_as_tuple(outputs), leaves, results or None)


def result_gradients(entry: Entry, inputs: Sequence[Tensor], seed: int) -> list[Tensor]:
    """Return normally distributed gradients for the results of an entry; 1 for a loss."""
    with torch.no_grad():
        outputs = _as_tuple(entry.forward(*inputs))
    generator = torch.Generator(outputs[0].device).manual_seed(seed)
    return [
        torch.empty_like(output).normal_(generator=generator) if output.dim() else torch.ones_like(output)
        for output in outputs
    ]


def _raise(error: Exception) -> list[NoArguments]:
    raise error


def failure_of(error: Exception) -> str:
    """Return the class of an error and the first line of its message."""
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"


def _compiled(entry: Entry) -> Entry:
    return Entry(torch.compile(entry.forward, dynamic=False), prepare=entry.prepare)


def _as_tuple(outputs: object) -> tuple[Tensor, ...]:
    return outputs if isinstance(outputs, tuple) else (cast(Tensor, outputs),)


@torch.no_grad()
def _run_forward(entry: Entry, inputs: Sequence[Tensor]) -> object:
    return entry.forward(*inputs)


def _forward_calls(entries: dict[str, Entry], sets: Sequence[Sequence[Tensor]]) -> dict[str, Calls]:
    def calls(entry: Entry) -> list[NoArguments]:
        return [partial(_run_forward, entry, entry.prepare(inputs)) for inputs in sets]

    return {name: partial(calls, entry) for name, entry in entries.items()}


def _both_calls(entries: dict[str, Entry], sets: Sequence[Sequence[Tensor]]) -> dict[str, Calls]:
    gradients = [result_gradients(entries[TORCH], inputs, seed) for seed, inputs in enumerate(sets)]

    def calls(entry: Entry) -> list[NoArguments]:
        prepared = [entry.prepare(inputs) for inputs in sets]
        if entry.both is not None:
            return [partial(entry.both, *inputs) for inputs in prepared]
        pairs = zip(prepared, gradients, strict=True)
        return [partial(gradients_of, entry, inputs, output_gradients) for inputs, output_gradients in pairs]

    return {name: partial(calls, entry) for name, entry in entries.items()}


def _measured(
    case: Case, size: Size, direction: str, work: Work, makers: dict[str, Calls], clock: Clock, repeats: int
) -> list[Figure]:
    calls: dict[str, tuple[list[NoArguments], int]] = {}
    seconds: dict[str, list[float]] = {}
    failures: dict[str, str] = {}
    for key, (name, make) in enumerate(makers.items()):
        try:
            round_calls = make()
            clock.warm_up(round_calls, key)
        except Exception as error:  # the other contestants continue, and the table reports it
            failures[name] = failure_of(error)
            continue
        calls[name], seconds[name] = (round_calls, key), []
    for _ in range(repeats):
        for name, (round_calls, key) in calls.items():
            if name in failures:
                continue
            try:
                seconds[name].append(clock.seconds(round_calls, key))
            except Exception as error:  # for example, another contestant has taken the memory
                failures[name] = failure_of(error)
    return [
        Figure(
            case.name,
            case.op,
            size.rows,
            size.width,
            direction,
            name,
            work.bytes,
            work.flops,
            None if name in failures else statistics.median(seconds[name]),
            None,
            failures.get(name),
        )
        for name in makers
    ]


def _with_share(figure: Figure, ceiling: Ceiling) -> Figure:
    if figure.seconds is None:
        return figure
    least = ceiling.seconds(Work(figure.bytes, figure.flops))
    return replace(figure, share=least / figure.seconds)
