"""Memory that checks who reads and writes it: alignment, bounds, unwritten bytes and races."""

from collections import Counter
from dataclasses import dataclass, field

import numpy as np

from tests.ptx.numbers import Array

GUARD = 1 << 12
"""Bytes on either side of a buffer that belong to no one."""

_SEVERAL_BLOCKS, _SEVERAL_WARPS = np.int64(-1), np.int64(255)
_BLOCK, _PHASE = 40, 8  # a tag is (block + 1) << 40 | phase << 8 | warp
_WARP_SIZE = 32
_SECTOR = 32


class AccessError(Exception):
    """An access that breaks a rule; the message says which and by whom."""


@dataclass(frozen=True)
class Access:
    """One instruction's accesses by the lanes that execute it.

    addresses: of the lanes, multiples of `size`, which they must be. lanes: their numbers over all running blocks.
    tags: of each, who it is (`tags_of`).
    """

    addresses: Array
    lanes: Array
    tags: Array
    size: int


def tags_of(blocks: Array, phases: Array, warps: Array) -> Array:
    """Numbers that say which block accessed, in which phase between its barriers, by which warp."""
    block, phase, warp = (value.astype(np.int64) for value in (blocks, phases, warps))
    return ((block + 1) << _BLOCK) | (phase << _PHASE) | warp


@dataclass
class Buffer:
    """A range of memory with an owner. counts: as in `Memory`, without sectors."""

    name: str
    first: int
    size: int
    counts: Counter[str] = field(default_factory=Counter)


class Memory:
    """Bytes with a shadow: which were written, and who read and wrote each last.

    granule: the least width of any access in bytes; the shadow has one entry per granule. counts: traffic as `read
    bytes` and `written bytes`, requested by lanes, and `read sectors` and `written sectors` of 32 bytes, distinct ones
    of a warp's instruction.
    """

    def __init__(self, name: str, base: int, granule: int) -> None:
        self.name, self.base, self.granule = name, base, granule
        self.buffers: list[Buffer] = []
        self.counts = Counter[str]()
        self._top = GUARD
        self._initial: list[tuple[int, Array, Array, Array]] = []

    def add(self, name: str, content: Array, written: Array, owned: Array | None = None) -> int:
        """Register a buffer, aligned to 256 bytes, and return its address.

        content: uint8. written: bool of the same length, false where reading is an error. owned: bool, false in gaps
        that are out of bounds; none by default.
        """
        first = self._top
        self.buffers.append(Buffer(name, first, len(content)))
        self._initial.append((first, content, written, np.ones_like(written) if owned is None else owned))
        self._top = -(-(first + len(content) + GUARD) // 256) * 256
        return self.base + first

    def freeze(self) -> None:
        """Allocate; no buffer can be added afterwards."""
        entries = self._top // self.granule
        self.bytes = np.full(self._top, 0xFF, np.uint8)
        self._owner = np.full(entries, -1, np.int32)
        self._written = np.zeros(entries, np.bool_)
        self._writer = np.zeros(entries, np.int64)
        self._reader = np.zeros(entries, np.int64)
        for number, (first, content, written, owned) in enumerate(self._initial):
            size = len(content)
            self.bytes[first : first + size] = np.where(written, content, np.uint8(0xFF))
            whole = -(-size // self.granule) * self.granule
            place = slice(first // self.granule, (first + whole) // self.granule)
            # A granule that the buffer does not fill belongs to no one: no access fits it.
            full = [np.pad(mask, (0, whole - size)).reshape(-1, self.granule).all(axis=1) for mask in (written, owned)]
            self._written[place] = full[0]
            self._owner[place] = np.where(full[1], number, -1)
        self._initial = []

    def content(self, number: int) -> Array:
        """Bytes of a buffer."""
        buffer = self.buffers[number]
        return self.bytes[buffer.first : buffer.first + buffer.size]

    def touched(self, number: int) -> tuple[int, int]:
        """Distinct bytes of a buffer that were read, and that were written."""
        buffer = self.buffers[number]
        place = slice(buffer.first // self.granule, (buffer.first + buffer.size) // self.granule)
        sizes = [int(np.count_nonzero(shadow[place])) * self.granule for shadow in (self._reader, self._writer)]
        return sizes[0], sizes[1]

    def load(self, access: Access) -> Array:
        """Return the bytes [lanes, size]."""
        rows = self._rows(access)
        self._refuse(access, ~self._shadow(self._written, access.size)[rows], "reads bytes that nothing wrote")
        readers = self._shadow(self._reader, access.size)
        self._check_readers(access, self._shadow(self._writer, access.size)[rows])
        readers[rows] = self._merged(readers[rows], access.tags[:, None])
        # The tag is that of the last lane of this instruction that read the same bytes.
        for blocks in (False, True):
            merged = self._merged(readers[rows], access.tags[:, None])
            several = (merged == _SEVERAL_BLOCKS) if blocks else (merged & _SEVERAL_WARPS == _SEVERAL_WARPS)
            lane, column = np.nonzero(several)
            readers[rows[lane], column] = merged[several]
        self._count(access, rows, "read")
        return self.bytes.reshape(-1, access.size)[rows]

    def store(self, access: Access, data: Array) -> None:
        """Write data [lanes, size]."""
        rows = self._rows(access)
        view = self.bytes.reshape(-1, access.size)
        self._check_writers(access, rows, view, data)
        view[rows] = data
        self._refuse(access, view[rows] != data, "races: another lane of this instruction writes another value there")
        self._shadow(self._written, access.size)[rows] = True
        self._shadow(self._writer, access.size)[rows] = access.tags[:, None]
        self._count(access, rows, "written")

    def forget(self, access: Access) -> None:
        """Make bytes unwritten: a copy to them is under way."""
        rows = self._rows(access)
        self._check_writers(access, rows, self.bytes.reshape(-1, access.size), None)
        self._shadow(self._written, access.size)[rows] = False
        self._shadow(self._writer, access.size)[rows] = access.tags[:, None]

    def _shadow(self, shadow: Array, size: int) -> Array:
        return shadow.reshape(-1, size // self.granule)

    def _rows(self, access: Access) -> Array:
        """Index of each access in a view of memory by `size` bytes, if all are aligned and inside one buffer."""
        place = access.addresses.astype(np.int64) - self.base
        self._refuse(access, place % access.size != 0, f"is not aligned to {access.size} bytes")
        rows = place // access.size
        outside = (rows < 0) | (rows >= len(self.bytes) // access.size)
        owners = self._shadow(self._owner, access.size)[np.where(outside, 0, rows)]
        outside |= (owners < 0).any(axis=1) | (owners != owners[:, :1]).any(axis=1)
        if outside.any():
            self._refuse(access, outside, f"is out of bounds{self._nearest(place[outside][0])}")
        return rows

    def _nearest(self, place: int) -> str:
        if not self.buffers:
            return ""
        near = min(
            self.buffers, key=lambda buffer: min(abs(place - buffer.first), abs(place - buffer.first - buffer.size))
        )
        return f": byte {place - near.first} of {near.name}, which has {near.size}"

    def _check_readers(self, access: Access, writers: Array) -> None:
        tags = access.tags[:, None]
        other_block = (writers != 0) & (writers >> _BLOCK != tags >> _BLOCK)
        other_warp = (writers >> _PHASE == tags >> _PHASE) & (writers != tags)
        self._refuse(access, other_block, "races: reads what another block wrote, no barrier between")
        self._refuse(access, other_warp, "races: reads what another warp wrote, no barrier between")

    def _check_writers(self, access: Access, rows: Array, view: Array, data: Array | None) -> None:
        tags = access.tags[:, None]
        readers = self._shadow(self._reader, access.size)[rows]
        several = readers == _SEVERAL_BLOCKS
        read_by_block = several | ((readers != 0) & (readers >> _BLOCK != tags >> _BLOCK))
        read_by_warp = ~several & (readers >> _PHASE == tags >> _PHASE) & (readers != tags)
        writers = self._shadow(self._writer, access.size)[rows]
        written = (writers != 0) & (writers >> _BLOCK != tags >> _BLOCK)
        written |= (writers >> _PHASE == tags >> _PHASE) & (writers != tags)
        if data is not None and written.any():
            # The same value twice does no harm.
            same = (view[rows] == data).reshape(len(rows), -1, self.granule).all(axis=2)
            written &= ~same
        self._refuse(access, read_by_block, "races: overwrites what another block reads")
        self._refuse(access, read_by_warp, "races: overwrites what another warp reads, no barrier between")
        self._refuse(access, written, "races: overwrites what another warp or block wrote, no barrier between")

    @staticmethod
    def _merged(before: Array, tags: Array) -> Array:
        """Readers after a further one: its tag, or that several blocks or warps of one phase read."""
        several = (before == _SEVERAL_BLOCKS) | ((before != 0) & (before >> _BLOCK != tags >> _BLOCK))
        warps = (before >> _PHASE == tags >> _PHASE) & (before != tags)
        return np.where(several, _SEVERAL_BLOCKS, np.where(warps, tags | _SEVERAL_WARPS, tags))

    def _count(self, access: Access, rows: Array, kind: str) -> None:
        warps = access.lanes // _WARP_SIZE
        pairs = np.unique((warps.astype(np.int64) << 40) | (access.addresses.astype(np.int64) - self.base) // _SECTOR)
        self.counts[f"{kind} bytes"] += len(rows) * access.size
        self.counts[f"{kind} sectors"] += len(pairs)
        for number, lanes in _tally(self._shadow(self._owner, access.size)[rows, 0]):
            self.buffers[number].counts[f"{kind} bytes"] += lanes * access.size

    def _refuse(self, access: Access, wrong: Array, reason: str) -> None:
        """Raise AccessError if any access [lanes], or part of one [lanes, granules or bytes], is wrong."""
        if not wrong.any():
            return
        lanes = np.reshape(wrong, (len(access.lanes), -1)).any(axis=1)
        tag = int(access.tags[np.argmax(lanes)])
        raise AccessError(
            f"{self.name} access of {access.size} bytes by block {(tag >> _BLOCK) - 1}, warp {tag & 255} {reason} "
            f"({int(lanes.sum())} of {len(lanes)} lanes)"
        )


def _tally(owners: Array) -> list[tuple[int, int]]:
    if len(owners) and (owners == owners[0]).all():
        return [(int(owners[0]), len(owners))]
    numbers, counts = np.unique(owners, return_counts=True)
    return list(zip(numbers.tolist(), counts.tolist(), strict=True))
