"""Runs a PTX kernel on numpy arrays that have one element per thread.

All threads of several blocks execute an instruction together. Branches on which they differ run one path after the
other, each under a mask, up to where the paths meet again (the immediate post-dominator), as on a GPU before Volta.
A value that all threads share is an array of one element.
"""

import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from tests.ptx.arithmetic import operation_of
from tests.ptx.memory import Access, AccessError, Memory, tags_of
from tests.ptx.numbers import TYPES, UNSIGNED, Array, bits_of
from tests.ptx.program import Instruction, Program, PtxError

WARP = 32
GLOBAL_BASE = 0x7F_0000_0000
"""Address of global memory: above 4 GiB, so that an address cut to 32 bits is out of bounds."""
_MOST_LANES = 16384
_MOST_STEPS = 4_000_000

Block = tuple[int, int]


@dataclass
class _Path:
    """Threads that execute together: from `index` up to `meeting`, where the path below goes on."""

    index: int
    meeting: int
    mask: Array


@dataclass
class _Copy:
    """An asynchronous copy under way, by thread. waiting: whether it is. group: number of the group it belongs to."""

    waiting: Array
    addresses: Array
    data: Array
    group: Array


@dataclass
class Machine:
    """A kernel and the memory that it runs on.

    arguments: one number per parameter. dynamic_shared: bytes of the extern array. opcodes: how often each ran.
    guarded: line of a guarded instruction -> threads that executed it, and that did not.
    """

    program: Program
    memory: Memory
    arguments: Sequence[float]
    dynamic_shared: int
    opcodes: Counter[str] = field(default_factory=Counter)
    guarded: dict[int, tuple[int, int]] = field(default_factory=dict)

    def run(self, grid: Block) -> None:
        """Execute a grid. Raises PtxError for an unknown opcode and for every broken rule."""
        blocks = [(x, y) for y in range(grid[1]) for x in range(grid[0])]
        step = max(1, _MOST_LANES // self.program.threads)
        for first in range(0, len(blocks), step):
            with np.errstate(all="ignore"):
                _Batch(self, grid, blocks[first : first + step]).run()


class _Batch:
    """Blocks that run at the same time."""

    def __init__(self, machine: Machine, grid: Block, blocks: Sequence[Block]) -> None:
        self.machine, self.program = machine, machine.program
        threads, count = self.program.threads, len(blocks)
        self.threads, self.count = threads, threads * count
        self.lanes = np.arange(self.count)
        self.block, self.thread = np.divmod(self.lanes, threads)
        numbers = np.array([x + grid[0] * y for x, y in blocks])
        self.block_numbers = numbers[self.block]
        self.phase = np.zeros(count, np.int64)
        self.registers: dict[str, Array] = {}
        self.alive = np.ones(self.count, np.bool_)
        self.mask, self.full = self.alive, True
        self.paths = [_Path(0, len(self.program.instructions), self.alive)]
        self.copies: list[_Copy] = []
        self.groups = np.zeros(self.count, np.int64)
        x, y = np.array(blocks, np.uint32).T
        self.specials = {
            "%tid.x": self.thread.astype(np.uint32),
            "%ctaid.x": x[self.block],
            "%ctaid.y": y[self.block],
        }
        self.shared = Memory("shared memory", 0, _granule(self.program, "shared"))
        nothing = np.zeros(machine.dynamic_shared, np.uint8)
        self.shared_bases = np.array(
            [self.shared.add(f"block {number}", nothing, nothing.astype(np.bool_)) for number in numbers]
        )
        self.shared.freeze()

    def run(self) -> None:
        instructions, end = self.program.instructions, len(self.program.instructions)
        for _ in range(_MOST_STEPS):
            while self.paths and (
                self.paths[-1].index in (self.paths[-1].meeting, end) or not self.paths[-1].mask.any()
            ):
                self.paths.pop()
            if not self.paths:
                return
            path = self.paths[-1]
            if path.mask is not self.mask:
                self.mask, self.full = path.mask, bool(path.mask.all())
            instruction = instructions[path.index]
            path.index += 1
            self.machine.opcodes[instruction.opcode] += 1
            try:
                action = _ACTIONS.get(instruction.parts[0], _Batch.compute)
                action(self, instruction, self._active(instruction))
            except AccessError as error:
                raise instruction.error(str(error)) from None
        raise PtxError(f"the kernel runs for more than {_MOST_STEPS} instructions")

    def _active(self, instruction: Instruction) -> Array:
        """Threads that execute it."""
        if not instruction.guard:
            return self.mask
        guard = self.register(instruction, instruction.guard)
        active = self.mask & (~guard if instruction.inverted else guard)
        passed, blocked = (np.count_nonzero(self.whole(mask)) for mask in (active, self.mask & ~active))
        before = self.machine.guarded.get(instruction.line, (0, 0))
        self.machine.guarded[instruction.line] = before[0] + passed, before[1] + blocked
        return active

    def leave(self, instruction: Instruction, gone: Array) -> None:
        self.alive = self.alive & ~gone
        for path in self.paths:
            path.mask = path.mask & self.alive

    def branch(self, instruction: Instruction, taken: Array) -> None:
        path, target = self.paths[-1], self.program.labels[instruction.operands[0]]
        if not taken.any():
            return
        rest = path.mask & ~taken
        if not rest.any():
            path.index = target
            return
        following, meeting = path.index, self.program.reconvergence[path.index - 1]
        if meeting == path.meeting:
            self.paths.pop()
        else:
            path.index = meeting
        for index, mask in ((following, rest), (target, taken)):
            if index != meeting:
                self.paths.append(_Path(index, meeting, mask))

    # Registers and operands

    def register(self, instruction: Instruction, name: str) -> Array:
        try:
            return self.registers[name]
        except KeyError:
            raise instruction.error(f"reads {name}, which nothing wrote") from None

    def read(self, instruction: Instruction, operand: str, kind: str) -> Array:
        """An operand as an array of a PTX type."""
        dtype = np.dtype(TYPES[kind])
        if operand in self.specials:
            return self.specials[operand].astype(UNSIGNED[dtype.itemsize]).view(dtype)
        if operand[0] != "%":
            return _constant(operand, kind, self.program, instruction)
        value = self.register(instruction, operand)
        if dtype == np.bool_ or value.dtype.itemsize == dtype.itemsize:
            return value if dtype == value.dtype else value.view(dtype)
        if value.dtype.itemsize < dtype.itemsize:
            raise instruction.error(f"{operand} is narrower than {kind}")
        return value.astype(UNSIGNED[dtype.itemsize]).view(dtype)

    def write(self, instruction: Instruction, name: str, value: Array, active: Array) -> None:
        """Set a register of the active threads."""
        if name == "_":
            return
        value = bits_of(value)
        if not (active is self.mask and self.full):
            before = self.registers.get(name)
            if before is None:
                before = ~np.zeros(1, value.dtype)  # threads that did not write it find all bits set: a NaN, or -1
            value = np.where(active, value, before)
        self.registers[name] = value

    def extended(self, instruction: Instruction, name: str, value: Array) -> Array:
        """A value as wide as its register."""
        if name == "_":
            return value
        try:
            bits = self.program.bits_of(name)
        except KeyError:
            raise instruction.error(f"{name} is not declared") from None
        if bits < 8 * value.dtype.itemsize:
            raise instruction.error(f"{name} has {bits} bits, too few for the result")
        return bits_of(value).astype(UNSIGNED[bits // 8])

    def whole(self, value: Array) -> Array:
        """One element per thread."""
        return np.broadcast_to(value, self.count)

    def compute(self, instruction: Instruction, active: Array) -> None:
        operation = operation_of(instruction.opcode)
        if operation is None:
            raise instruction.unknown()
        destination, *operands = instruction.operands
        if len(operands) != len(operation.operands):
            raise instruction.error(f"{len(operands)} operands, not {len(operation.operands)}")
        values = [self.read(instruction, *pair) for pair in zip(operands, operation.operands, strict=True)]
        result = operation.function(*values)
        if operation.result != "pred":
            result = self.extended(instruction, destination, result)
        self.write(instruction, destination, result, active)

    # Addresses and memory

    def address(self, instruction: Instruction, operand: str) -> Array:
        """uint64 addresses of `[register + offset]` or `[symbol + offset]`."""
        match = re.fullmatch(r"\[\s*([%$\w]+)\s*(?:\+\s*(-?\w+))?\s*\]", operand)
        if match is None:
            raise instruction.error(f"{operand} is not an address")
        base, offset = match.groups()
        if base[0] == "%":
            value = self.register(instruction, base)
        else:
            value = _constant(base, "b64", self.program, instruction)
        return value.astype(np.uint64) + np.uint64(int(offset or "0", 0) & (2**64 - 1))

    def accessed(self, space: str, addresses: Array, size: int, active: Array) -> tuple[Memory, Access]:
        """The memory of a space, and the accesses of the active threads to it."""
        addresses, active = self.whole(addresses), self.whole(active)
        lanes, places = self.lanes[active], addresses[active].astype(np.int64)
        block = self.block[lanes]
        if space == "shared":
            # Offsets outside of the block's own range must not reach another block's.
            inside = (places >= 0) & (places < self.machine.dynamic_shared)
            places = np.where(inside, places + self.shared_bases[block], len(self.shared.bytes))
        tags = tags_of(self.block_numbers[lanes], self.phase[block], self.thread[lanes] // WARP)
        memory = self.shared if space == "shared" else self.machine.memory
        return memory, Access(places, lanes, tags, size)

    def loaded(self, space: str, addresses: Array, size: int, active: Array) -> Array:
        """Bytes [threads, size]: 0 of threads that are not active."""
        data = np.zeros((self.count, size), np.uint8)
        memory, access = self.accessed(space, addresses, size, active)
        data[access.lanes] = memory.load(access)
        return data

    def load(self, instruction: Instruction, active: Array) -> None:
        space, kind, count = _form(instruction)
        names = _names(instruction.operands[0])
        if len(names) != count:
            raise instruction.error(f"{len(names)} registers for {count} elements")
        if space == "param":
            columns = self._parameter(instruction, kind)
        else:
            address = self.address(instruction, instruction.operands[1])
            columns = self.loaded(space, address, np.dtype(TYPES[kind]).itemsize * count, active).view(TYPES[kind])
        for index, name in enumerate(names):
            value = self.extended(instruction, name, np.ascontiguousarray(columns[:, index]))
            self.write(instruction, name, value, active)

    def _parameter(self, instruction: Instruction, kind: str) -> Array:
        """The value as [1, 1]."""
        for (declared, name), value in zip(self.program.parameters, self.machine.arguments, strict=True):
            if name == instruction.operands[1].strip("[ ]"):
                size, wanted = (np.dtype(TYPES[each]).itemsize for each in (declared, kind))
                if wanted > size:
                    raise instruction.error(f"the parameter has {size} bytes")
                if isinstance(value, float):
                    stored = np.array([value], f"f{size}")
                else:
                    stored = np.array([value & (2 ** (8 * size) - 1)], f"u{size}")
                return np.frombuffer(stored.tobytes()[:wanted], TYPES[kind]).reshape(1, 1)
        raise instruction.error("not a parameter of this kernel")

    def store(self, instruction: Instruction, active: Array) -> None:
        space, kind, count = _form(instruction)
        names = _names(instruction.operands[1])
        if len(names) != count:
            raise instruction.error(f"{len(names)} registers for {count} elements")
        columns = [self.whole(self.read(instruction, name, kind)) for name in names]
        data = np.stack(columns, axis=1).view(np.uint8)
        address = self.address(instruction, instruction.operands[0])
        memory, access = self.accessed(space, address, data.shape[1], active)
        memory.store(access, data[access.lanes])

    def move(self, instruction: Instruction, active: Array) -> None:
        """Also of a register to parts of it, or of parts to one register."""
        kind = instruction.parts[-1]
        target, source = instruction.operands
        if kind not in TYPES:
            raise instruction.unknown()
        dtype = np.dtype(TYPES[kind])
        if target[0] == "{":
            value, names = self.read(instruction, source, kind), _names(target)
            bits = 8 * dtype.itemsize // len(names)
            for index, name in enumerate(names):
                part = (value >> dtype.type(bits * index)).astype(UNSIGNED[bits // 8])
                self.write(instruction, name, part, active)
            return
        if source[0] == "{":
            value, names = np.zeros(1, dtype), _names(source)
            bits = 8 * dtype.itemsize // len(names)
            for index, name in enumerate(names):
                value = value | (self.read(instruction, name, f"b{bits}").astype(dtype) << dtype.type(bits * index))
        else:
            value = self.read(instruction, source, kind)
        self.write(instruction, target, value, active)

    # Asynchronous copies

    def copy(self, instruction: Instruction, active: Array) -> None:
        opcode, operands = instruction.opcode, instruction.operands
        if opcode == "cp.async.commit_group":
            self.groups = self.groups + self.whole(active)
        elif opcode == "cp.async.wait_group":
            self._finish(active, self.groups - int(operands[0], 0))
        elif opcode in ("cp.async.ca.shared.global", "cp.async.cg.shared.global"):
            self._start(instruction, active)
        else:
            raise instruction.unknown()

    def _start(self, instruction: Instruction, active: Array) -> None:
        target, source, length, copied = instruction.operands
        size, active = int(length, 0), self.whole(active)
        given = self.whole(self.read(instruction, copied, "u32"))
        if not np.isin(given[active], (0, size)).all():
            raise instruction.error(f"copies of fewer than {size} bytes, but not 0, are not known")
        data = self.loaded("global", self.address(instruction, source), size, active & (given > 0))
        goal = self.whole(self.address(instruction, target))
        memory, access = self.accessed("shared", goal, size, active)
        memory.forget(access)
        self.copies.append(_Copy(active, goal, data, self.groups))

    def _finish(self, active: Array, first_left: Array) -> None:
        """Write what the active threads copied in groups before `first_left` of each."""
        for copy in self.copies:
            done = self.whole(active) & copy.waiting & (copy.group < first_left)
            memory, access = self.accessed("shared", copy.addresses, copy.data.shape[1], done)
            memory.store(access, copy.data[access.lanes])
            copy.waiting = copy.waiting & ~done
        self.copies = [copy for copy in self.copies if copy.waiting.any()]

    # Threads among themselves

    def barrier(self, instruction: Instruction, active: Array) -> None:
        if (instruction.opcode, instruction.operands) != ("bar.sync", ("0",)):
            raise instruction.error("only barrier 0 of all threads is known")
        arrived, expected = (self.whole(mask).reshape(-1, self.threads) for mask in (active, self.alive))
        some = arrived.any(axis=1)
        if (arrived != expected)[some].any():
            block = int(self.block_numbers[np.flatnonzero((arrived != expected) & some[:, None])[0]])
            raise instruction.error(f"divergent barrier: not all threads of block {block} reach it together")
        self.phase = self.phase + some

    def _members(self, instruction: Instruction, active: Array) -> Array:
        """Return `active` as [warps, 32] if all lanes of each warp execute; lanes that left are not waited for."""
        active, alive = (self.whole(mask).reshape(-1, WARP) for mask in (active, self.alive))
        if (active.any(axis=1, keepdims=True) & alive & ~active).any():
            raise instruction.error("the member mask names lanes that do not execute this")
        return active

    def shuffle(self, instruction: Instruction, active: Array) -> None:
        if instruction.opcode != "shfl.sync.bfly.b32" or instruction.operands[3:] != ("31", "-1"):
            raise instruction.unknown()
        target, source, distance, *_ = instruction.operands
        lanes = self._members(instruction, active)
        wanted = np.arange(WARP) ^ int(distance)
        if (lanes & ~lanes[:, wanted]).any():
            raise instruction.error("shuffles from a lane that does not execute this")
        values = self.whole(self.read(instruction, source, "u32")).reshape(-1, WARP)
        self.write(instruction, target, values[:, wanted].reshape(-1), active)

    def matrix_load(self, instruction: Instruction, active: Array) -> None:
        """ldmatrix: 8 lanes give the rows of each 8 x 8 matrix of 16-bit elements; each lane gets two of them."""
        match = re.fullmatch(r"ldmatrix\.sync\.aligned\.m8n8\.x([14])\.shared\.b16", instruction.opcode)
        if match is None:
            raise instruction.unknown()
        self._members(instruction, active)
        giving = self.whole(active) & (self.thread % WARP < 8 * int(match[1]))
        data = self.loaded("shared", self.address(instruction, instruction.operands[1]), 16, giving)
        words = data.view(np.uint32).reshape(-1, 4, 32)
        for index, name in enumerate(_names(instruction.operands[0])):
            self.write(instruction, name, words[:, index].reshape(-1), active)

    def policy(self, instruction: Instruction, active: Array) -> None:
        """createpolicy: a hint for the cache, without a meaning here."""
        self.write(instruction, instruction.operands[0], np.zeros(1, np.uint64), active)


_ACTIONS: dict[str, Callable[[_Batch, Instruction, Array], None]] = {
    "bra": _Batch.branch,
    "ret": _Batch.leave,
    "ld": _Batch.load,
    "st": _Batch.store,
    "mov": _Batch.move,
    "cp": _Batch.copy,
    "bar": _Batch.barrier,
    "shfl": _Batch.shuffle,
    "ldmatrix": _Batch.matrix_load,
    "createpolicy": _Batch.policy,
}

_HINT = re.compile(r"L[12]::(evict_first|evict_last|cache_hint)")


def _names(operand: str) -> list[str]:
    """Registers of a vector, or the only one."""
    return [name.strip() for name in operand.strip("{} ").split(",")]


def _form(instruction: Instruction) -> tuple[str, str, int]:
    """(space, type of an element, elements) of a load or store. Hints to caches change nothing."""
    _, space, *modifiers, kind = instruction.parts
    count = 1
    for part in modifiers:
        if re.fullmatch(r"v[248]", part):
            count = int(part[1])
        elif not _HINT.fullmatch(part):
            raise instruction.unknown()
    if space not in ("global", "shared", "param") or kind not in TYPES:
        raise instruction.unknown()
    return space, kind, count


def _granule(program: Program, space: str) -> int:
    """The least width of an access to a space, in bytes."""
    widths = [16]
    for instruction in program.instructions:
        if instruction.parts[0] in ("ld", "st"):
            state_space, kind, count = _form(instruction)
            if state_space == space:
                widths.append(np.dtype(TYPES[kind]).itemsize * count)
        elif instruction.parts[:2] == ("cp", "async") and len(instruction.operands) > 2:
            widths.append(int(instruction.operands[2], 0))
    return min(widths)


def granule_of(program: Program) -> int:
    """The least width of an access to global memory, in bytes: what `Memory` needs to know."""
    return _granule(program, "global")


def _constant(operand: str, kind: str, program: Program, instruction: Instruction) -> Array:
    dtype = np.dtype(TYPES[kind])
    if operand in program.shared:
        return np.zeros(1, dtype)
    if re.fullmatch(r"0f[0-9a-fA-F]{8}|0d[0-9a-fA-F]{16}", operand):
        number = np.array([int(operand[2:], 16)], np.uint32 if operand[1] == "f" else np.uint64)
        return number.view(dtype if dtype.itemsize == number.itemsize else np.float32)
    try:
        value = int(operand.removesuffix("U"), 0)
    except ValueError:
        raise instruction.error(f"{operand} is not known") from None
    if dtype == np.bool_:
        return np.array([value != 0])
    return np.array([value & (2 ** (8 * dtype.itemsize) - 1)], UNSIGNED[dtype.itemsize]).view(dtype)
