"""The interpreter notices broken PTX: a barrier less, a mask less, a wider load."""

import re
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megapipe.kernels import triton_backend
from tests.kernels.cases import needs_triton
from tests.ptx import machine
from tests.ptx.memory import Access, Memory
from tests.ptx.numbers import Array
from tests.ptx.program import Instruction, PtxError

pytestmark = [needs_triton, pytest.mark.slow]

if triton_backend.installed():
    from tests.ptx.cases import CASES
    from tests.ptx.execution import Compiled, Outcome, compile_cases, problems, run

NAMES = [
    "odd: layer norm fp16 5 x 99",
    "odd: layer norm, backward, fp16 7 x 333",
    "odd: softmax, backward, fp32 5 x 77",
    "odd: sum of parts 3 x 77",
    "odd: statistics fp16 100",
    "odd: adamw with a bf16 copy 1001",
    "odd: dropout of attention weights fp16",
    "layer norm, backward, bf16 768",
]


@cache
def compiled() -> dict[str, "Compiled"]:
    return compile_cases(NAMES)


@cache
def unchanged(name: str) -> "Outcome":
    outcome = run(CASES[name], compiled()[name])
    assert not problems(CASES[name], outcome)
    return outcome


def lines_of(name: str) -> list[str]:
    return compiled()[name].ptx.split("\n")


def with_line(name: str, number: int, text: str) -> Callable[[str], str]:
    """The kernel's PTX with line `number`, counted from 1, replaced."""
    lines = lines_of(name)
    return lambda _: "\n".join([*lines[: number - 1], text, *lines[number:]])


def noticed(name: str, change: Callable[[str], str]) -> bool:
    """A rule is broken, a result is wrong, or other bytes are moved."""
    try:
        outcome = run(CASES[name], compiled()[name], change)
    except PtxError:
        return True
    return bool(problems(CASES[name], outcome)) or outcome.executed.moved != unchanged(name).executed.moved


def masked_accesses(name: str) -> list[int]:
    """Lines of loads and stores from which a mask keeps some thread."""
    access = re.compile(r"\s*@!?%p\d+ (ld|st)\.")
    guarded = unchanged(name).executed.guarded
    return [number for number, line in enumerate(lines_of(name), 1) if access.match(line) and guarded[number][1]]


@settings(max_examples=60)
@given(st.data())
def test_a_mask_less_is_noticed(data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(NAMES))
    number = data.draw(st.sampled_from(masked_accesses(name)))
    assert noticed(name, with_line(name, number, re.sub(r"@!?%p\d+ ", "", lines_of(name)[number - 1])))


@settings(max_examples=60)
@given(st.data())
def test_a_wider_load_is_noticed(data: st.DataObject) -> None:
    """Twice as many elements, the second half into registers that nothing reads."""
    name = data.draw(st.sampled_from(NAMES))
    load = re.compile(r"(ld\.global\.)(?:v(\d)\.)?(b16|b32|b64) +\{?([^}\[]*?)\}?, *\[")
    guarded = unchanged(name).executed.guarded
    loads = [number for number, line in enumerate(lines_of(name), 1) if load.search(line)]
    candidates = [number for number in loads if number not in guarded or guarded[number][0]]
    number = data.draw(st.sampled_from(candidates))

    def wider(match: re.Match[str]) -> str:
        count = int(match[2] or 1)
        registers = [part.strip() for part in match[4].strip(" {,").split(",")]
        return f"{match[1]}v{2 * count}.{match[3]} {{{', '.join([*registers, *['_'] * count])}}}, ["

    text, changes = load.subn(wider, lines_of(name)[number - 1])
    assert changes == 1
    assert noticed(name, with_line(name, number, text))


class Trace:
    """All accesses to shared memory and barriers of a run, to find by brute force whether a barrier is needed."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.events: list[tuple[Any, ...]] = []
        for name in ("load", "store", "forget"):
            self._follow(patch, name)
        barrier = machine._ACTIONS["bar"]

        def noted(batch: Any, instruction: Instruction, active: Array) -> None:
            barrier(batch, instruction, active)
            self.events.append(("barrier", instruction.line))

        patch.setitem(machine._ACTIONS, "bar", noted)

    def _follow(self, patch: pytest.MonkeyPatch, name: str) -> None:
        original = getattr(Memory, name)

        def followed(memory: Memory, access: Access, *rest: Any, **options: Any) -> Any:
            if memory.name == "shared memory":
                self.events.append((name, access, rest[0].copy() if name == "store" else None))
            return original(memory, access, *rest, **options)

        patch.setattr(Memory, name, followed)

    def needs(self, line: int) -> bool:
        """Whether two warps touch a byte, and one changes it, with no other barrier between than the one of `line`."""
        size = 1 << 17
        content = np.zeros(size, np.int16)
        readers, writers = (np.zeros((size, 32), np.bool_) for _ in range(2))
        for kind, *details in self.events:
            if kind == "barrier":
                if details[0] != line:
                    readers[:], writers[:] = False, False
                continue
            access, data = details
            places = access.addresses.astype(np.int64)[:, None] + np.arange(access.size)
            warp = (access.tags & 255)[:, None]
            others = np.ones((len(places), access.size, 32), np.bool_)
            np.put_along_axis(others, np.broadcast_to(warp, places.shape)[:, :, None], False, axis=2)
            written = (writers[places] & others).any(axis=2)
            if kind == "load":
                if written.any():
                    return True
                readers[places, warp] = True
                continue
            if kind == "store":
                written &= content[places] != data
                content[places] = data
            else:
                content[places] = -1
            if written.any() or (readers[places] & others).any():
                return True
            writers[places, warp] = True
        return False


def barriers(name: str) -> list[int]:
    return [number for number, line in enumerate(lines_of(name), 1) if "bar.sync" in line]


@cache
def trace(name: str) -> Trace:
    with pytest.MonkeyPatch.context() as patch:
        recorder = Trace(patch)
        run(CASES[name], compiled()[name])
    return recorder


@settings(max_examples=60)
@given(st.data())
def test_missing_barriers_are_noticed_exactly_where_needed(data: st.DataObject) -> None:
    name = data.draw(st.sampled_from([name for name in NAMES if barriers(name)]))
    number = data.draw(st.sampled_from(barriers(name)))
    assert noticed(name, with_line(name, number, "")) == trace(name).needs(number)
