"""Execute a kernel's launch from PTX, on the tensors of its arguments: its results are exact up to rounding, and it
moves the bytes that it must.

`python -m tests.ptx.execution NAME...` compiles cases for sm_90 and prints them as JSON.
"""

import json
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from megapipe.kernels.triton_backend.launch import Launch
from tests.kernels.launches import arguments, signature
from tests.ptx.cases import CASES, Case
from tests.ptx.machine import GLOBAL_BASE, Machine, granule_of
from tests.ptx.memory import Memory
from tests.ptx.program import parse

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Compiled:
    """PTX of a launch. arguments: names of those that are parameters, in order. shared: bytes of dynamic memory."""

    ptx: str
    arguments: list[str]
    shared: int


@dataclass(frozen=True)
class Moved:
    """Bytes of one argument. requested: every time that a lane asked. distinct: each once."""

    requested_read: int
    requested_written: int
    distinct_read: int
    distinct_written: int


@dataclass(frozen=True)
class Executed:
    """The outcome of a launch.

    moved: by tensor argument; tensors of one storage share their numbers. counts: as in `Memory`. opcodes: how often
    each ran. guarded: line of a guarded instruction -> threads that executed it, and that did not.
    """

    moved: Mapping[str, Moved]
    counts: Mapping[str, int]
    opcodes: Mapping[str, int]
    guarded: Mapping[int, tuple[int, int]]


def compile_cases(names: Iterable[str]) -> dict[str, Compiled]:
    """PTX for sm_90 of cases, by name. Another process compiles: kernels of this one may be interpreted."""
    command = [sys.executable, "-m", "tests.ptx.execution", *names]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    return {name: Compiled(**fields) for name, fields in json.loads(done.stdout).items()}


def execute(
    compiled: Compiled, launch: Launch, outputs: Iterable[str], change: Callable[[str], str] = str
) -> Executed:
    """Run a launch; its tensors, on the CPU, get the results.

    outputs: arguments whose content is undefined before. change: applied to the PTX. Raises PtxError where a rule is
    broken.
    """
    program = parse(change(compiled.ptx))
    memory = Memory("global memory", GLOBAL_BASE, granule_of(program))
    values = arguments(launch)
    tensors = {name: value for name, value in values.items() if isinstance(value, Tensor)}
    places, numbers = _registered(memory, tensors, set(outputs))
    parameters: list[float] = []
    for name in compiled.arguments:
        value = values[name]
        if isinstance(value, Tensor):
            parameters.append(places[name] + value.storage_offset() * value.itemsize)
        else:
            parameters.append(value)
    # The compiler adds pointers to scratch memory, which no kernel here uses.
    parameters += [0] * (len(program.parameters) - len(parameters))
    machine = Machine(program, memory, parameters, compiled.shared)
    x, y = launch.grid if len(launch.grid) == 2 else (*launch.grid, 1)
    machine.run((x, y))
    for name, tensor in tensors.items():
        result = torch.from_numpy(memory.content(numbers[name]).copy())
        torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage()).copy_(result)  # type: ignore[call-overload]
    moved = {name: _moved(memory, number) for name, number in numbers.items()}
    return Executed(moved, memory.counts, machine.opcodes, machine.guarded)


def _registered(
    memory: Memory, tensors: Mapping[str, Tensor], outputs: set[str]
) -> tuple[dict[str, int], dict[str, int]]:
    """(address of the storage, number of the buffer) of each tensor. Elements that no tensor shows are out of bounds,
    those that no input shows are unwritten."""
    storages: dict[int, list[str]] = {}
    for name, tensor in tensors.items():
        storages.setdefault(tensor.untyped_storage().data_ptr(), []).append(name)
    places, numbers = {}, {}
    for number, names in enumerate(storages.values()):
        storage = tensors[names[0]].untyped_storage()
        written, owned = (torch.zeros(storage.nbytes(), dtype=torch.uint8) for _ in range(2))
        for name in names:
            _mark(owned, tensors[name])
            if name not in outputs:
                _mark(written, tensors[name])
        content = torch.empty(0, dtype=torch.uint8).set_(storage)  # type: ignore[call-overload]
        masks = (mask.numpy() != 0 for mask in (written, owned))
        address = memory.add(" and ".join(names), content.numpy().copy(), *masks)
        places |= dict.fromkeys(names, address)
        numbers |= dict.fromkeys(names, number)
    memory.freeze()
    return places, numbers


def _mark(written: Tensor, tensor: Tensor) -> None:
    """Set the bytes of a storage that a view of it shows."""
    kind = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.itemsize]
    view = written[: written.numel() // tensor.itemsize * tensor.itemsize].view(kind)
    view.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset()).fill_(-1)


def _moved(memory: Memory, number: int) -> Moved:
    counts = memory.buffers[number].counts
    return Moved(counts["read bytes"], counts["written bytes"], *memory.touched(number))


@dataclass(frozen=True)
class Outcome:
    """The outcome of a case.

    error: the largest of any result, relative to the result's largest number. excess: the same beyond half a unit in
    the last place of each number. distinct, requested: bytes of the large tensors.
    """

    executed: Executed
    error: float
    excess: float
    distinct: int
    requested: int


def errors(case: Case, launch: Launch) -> tuple[float, float]:
    """(error, excess) of a launch that ran, as `Outcome` has them."""
    before = SimpleNamespace(**{name: _exact(value) for name, value in arguments(case.launch()).items()})
    after = SimpleNamespace(**arguments(launch))
    error = excess = 0.0
    for actual, exact in case.results(before, after).values():
        assert actual.shape == exact.shape
        wrong = (actual.double() - exact).abs()
        beyond = wrong - torch.finfo(actual.dtype).eps / 2 * exact.abs()
        largest = exact.abs().max().item()
        # A NaN is infinitely wrong.
        error = max(error, wrong.nan_to_num(torch.inf).max().item() / largest)
        excess = max(excess, beyond.nan_to_num(torch.inf).max().item() / largest)
    return error, excess


def _exact(value: object) -> object:
    return value.double() if isinstance(value, Tensor) and value.is_floating_point() else value


def run(case: Case, compiled: Compiled, change: Callable[[str], str] = str) -> Outcome:
    """Execute a case. Raises PtxError where it breaks a rule."""
    launch = case.launch()
    executed = execute(compiled, launch, case.outputs, change=change)
    moved = [executed.moved[name] for name in case.large if name in executed.moved]
    return Outcome(
        executed,
        *errors(case, launch),
        sum(each.distinct_read + each.distinct_written for each in moved),
        sum(each.requested_read + each.requested_written for each in moved),
    )


def problems(case: Case, outcome: Outcome) -> list[str]:
    """Return the problems, in words."""
    faults = []
    if not outcome.excess <= case.slack:
        faults.append(f"error {outcome.excess:.1e} beyond rounding, above {case.slack:.1e}")
    expected = case.moved
    for what, counted, wanted in (
        ("distinct", outcome.distinct, expected.distinct),
        ("requested", outcome.requested, expected.requested),
        ("declared", outcome.distinct - expected.beyond, expected.declared),
    ):
        if wanted is not None and counted != wanted:
            faults.append(f"{counted} bytes {what}, not {wanted}")
    for name, moved in outcome.executed.moved.items():
        if moved.requested_written != moved.distinct_written:
            faults.append(f"{moved.requested_written} bytes written to {name}, which gets {moved.distinct_written}")
    return [f"{case.name}: {problem}" for problem in faults]


def compiled(launch: Launch) -> dict[str, Any]:
    """Return the fields of `Compiled`."""
    from tests.kernels.ahead_of_time import compile_for

    kernel = compile_for(launch, 90)
    names = [name for name, kind in signature(launch).items() if kind != "constexpr"]
    return {"ptx": kernel.asm["ptx"], "arguments": names, "shared": kernel.metadata.shared}


if __name__ == "__main__":
    print(json.dumps({name: compiled(CASES[name].launch()) for name in sys.argv[1:]}))
