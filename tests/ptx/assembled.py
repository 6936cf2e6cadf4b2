"""Kernels written in PTX by hand, for tests of the interpreter itself."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tests.ptx.machine import GLOBAL_BASE, Machine, granule_of
from tests.ptx.memory import Memory
from tests.ptx.numbers import Array
from tests.ptx.program import parse

_HEADER = """.version 8.4
.target sm_90
.address_size 64
.extern .shared .align 16 .b8 smem[];
.visible .entry kernel({parameters})
.reqntid {threads}
{{
.reg .pred %p<32>;
.reg .b16 %h<32>;
.reg .b32 %r<64>;
.reg .b64 %d<64>;
"""
_WIDTHS = {"h": 2, "r": 4, "d": 8}


@dataclass(frozen=True)
class Result:
    """The buffers after a run, and the machine."""

    buffers: list[Array]
    machine: Machine


def run(
    body: str,
    buffers: Sequence[Array],
    *,
    threads: int = 32,
    blocks: int = 1,
    shared: int = 0,
    unwritten: Sequence[int] = (),
) -> Result:
    """Run a kernel whose 64-bit parameters are the addresses of the buffers, in %d0, %d1 and so on.

    %r0 holds the thread's number. unwritten: numbers of buffers without content. Line 1 of `body` is the line after
    these definitions.
    """
    parameters = ", ".join(f".param .u64 p{index}" for index in range(len(buffers)))
    loads = "".join(f"ld.param.b64 %d{index}, [p{index}];\n" for index in range(len(buffers)))
    text = (
        _HEADER.format(parameters=parameters, threads=threads)
        + loads
        + "mov.u32 %r0, %tid.x;\n"
        + body
        + "\nret;\n}\n"
    )
    program = parse(text)
    memory = Memory("global memory", GLOBAL_BASE, granule_of(program))
    addresses = []
    for index, buffer in enumerate(buffers):
        content = buffer.view(np.uint8)
        addresses.append(memory.add(f"p{index}", content, np.full(content.shape, index not in unwritten)))
    memory.freeze()
    machine = Machine(program, memory, addresses, shared)
    machine.run((blocks, 1))
    return Result([memory.content(i).copy().view(buffer.dtype) for i, buffer in enumerate(buffers)], machine)


def compute(instruction: str, operands: Sequence[Array], result: Array) -> Array:
    """Return the result of an instruction for each element of its operands.

    instruction: with `a`, `b`, `c`, `e` for the operands and `z` for the result. result: an empty array of its type.
    """
    threads = len(result)
    body, names = [], {}
    for index, operand in enumerate([*operands, result]):
        width = operand.dtype.itemsize
        kind = {1: "h", 2: "h", 4: "r", 8: "d"}[width]
        names["abce"[index] if index < len(operands) else "z"] = f"%{kind}{20 + index}"
        body.append(f"mul.wide.u32 %d{40 + index}, %r0, {width};")
        body.append(f"add.s64 %d{40 + index}, %d{index}, %d{40 + index};")
        if index < len(operands):
            body.append(f"ld.global.b{8 * width} %{kind}{20 + index}, [%d{40 + index}];")
    opcode, _, rest = instruction.partition(" ")
    body.append(f"{opcode} " + re.sub(r"\b[abcez]\b", lambda match: names[match[0]], rest) + ";")
    body.append(f"st.global.b{8 * result.dtype.itemsize} [%d{40 + len(operands)}], {names['z']};")
    return run("\n".join(body), [*operands, result], threads=threads, unwritten=[len(operands)]).buffers[-1]
