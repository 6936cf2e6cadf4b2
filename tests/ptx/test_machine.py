"""Divergence, barriers, shuffles and memory of the interpreter. A broken rule is reported with its line."""

import random
from collections.abc import Callable, Iterator
from itertools import count

import numpy as np
import pytest

from tests.ptx.assembled import compute, run
from tests.ptx.numbers import Array
from tests.ptx.program import PtxError

PLACE = "mul.wide.u32 %d40, %r0, 4;\nadd.s64 %d41, %d0, %d40;\n"
"""%d41: address of this thread's element of the first buffer."""


def zeros(count: int) -> Array:
    return np.zeros(count, np.uint32)


class Returned(Exception):
    """A thread left the kernel."""


def structured(generator: random.Random, depth: int, labels: Iterator[int]) -> tuple[list[str], Callable[[int], int]]:
    """(PTX, the same in Python) of random nested branches, loops and returns on %r1, which differs between threads."""
    if depth == 0:
        factor, added = generator.randrange(3, 99, 2), generator.randrange(1, 1000)
        return [f"mad.lo.s32 %r1, %r1, {factor}, {added};"], lambda x: (x * factor + added) % 2**32
    kind = generator.choice(["both", "if", "loop", "return"])
    first, run_first = structured(generator, depth - 1, labels)
    second, run_second = structured(generator, depth - 1, labels)
    name, bit = next(labels), generator.randrange(3)
    test = [f"shr.u32 %r3, %r1, {bit};", "and.b32 %r3, %r3, 1;", f"setp.eq.b32 %p{name}, %r3, 0;"]
    if kind == "both":
        return [*first, *second], lambda x: run_second(run_first(x))
    if kind == "if":
        lines = [*test, f"@%p{name} bra ELSE{name};", *first, f"bra.uni END{name};"]
        lines += [f"ELSE{name}:", *second, f"END{name}:"]
        return lines, lambda x: run_second(x) if x >> bit & 1 == 0 else run_first(x)
    if kind == "return":
        lines = [*first, f"setp.gt.u32 %p{name}, %r1, {2**30};", f"@%p{name} bra END{name};"]
        lines += ["st.global.b32 [%d41], 77;", "ret;", f"END{name}:", *second]

        def returning(x: int) -> int:
            x = run_first(x)
            if x <= 2**30:
                raise Returned
            return run_second(x)

        return lines, returning
    counter = f"%r{10 + name}"
    lines = [f"and.b32 {counter}, %r1, 3;", f"HEAD{name}:", f"setp.eq.b32 %p{name}, {counter}, 0;"]
    lines += [f"@%p{name} bra OUT{name};", *first, f"sub.s32 {counter}, {counter}, 1;"]
    lines += [f"bra.uni HEAD{name};", f"OUT{name}:"]

    def loop(x: int) -> int:
        for _ in range(x & 3):
            x = run_first(x)
        return x

    return lines, loop


@pytest.mark.parametrize("seed", range(12))
def test_random_nested_branches_give_what_each_thread_alone_gives(seed: int) -> None:
    lines, alone = structured(random.Random(seed), 4, count(1))
    body = PLACE + "ld.global.b32 %r1, [%d41];\n" + "\n".join(lines) + "\nst.global.b32 [%d41], %r1;"
    starts = np.random.default_rng(seed).integers(0, 2**32, 64, dtype=np.uint32)
    expected = []
    for start in starts.tolist():
        try:
            expected.append(alone(start))
        except Returned:
            expected.append(77)
    assert run(body, [starts], threads=64).buffers[0].tolist() == expected


def test_threads_meet_again_where_paths_join() -> None:
    """A shuffle of all lanes after a branch is legal only if the paths have joined."""
    body = PLACE + (
        "setp.lt.u32 %p1, %r0, 7;\n@%p1 bra FEW;\nmov.b32 %r1, 5;\nbra.uni JOIN;\nFEW:\nmov.b32 %r1, 9;\nJOIN:\n"
        "shfl.sync.bfly.b32 %r2, %r1, 31, 31, -1;\nst.global.b32 [%d41], %r2;"
    )
    assert run(body, [zeros(32)]).buffers[0].tolist() == [5] * 25 + [9] * 7
    inside = body.replace(
        "JOIN:\nshfl.sync.bfly.b32 %r2, %r1, 31, 31, -1;", "shfl.sync.bfly.b32 %r2, %r1, 1, 31, -1;\nJOIN:"
    )
    with pytest.raises(PtxError, match=r"shfl.*member mask"):
        run(inside, [zeros(32)])


@pytest.mark.parametrize("offset", [1, 6, 31])
def test_shuffles(offset: int) -> None:
    values = np.random.default_rng(0).integers(0, 2**32, 64, dtype=np.uint32)
    body = PLACE + (
        f"ld.global.b32 %r1, [%d41];\nshfl.sync.bfly.b32 %r2, %r1, {offset}, 31, -1;\nst.global.b32 [%d41], %r2;"
    )
    results = run(body, [values.copy()], threads=64).buffers[0]
    assert (results == values[np.arange(64) ^ offset]).all()


def test_vectors() -> None:
    """Each thread passes 16 bytes on to its neighbor through shared memory."""
    body = (
        "mul.wide.u32 %d40, %r0, 16;\nadd.s64 %d41, %d0, %d40;\n"
        "ld.global.L1::evict_last.v4.b32 {%r1, %r2, %r3, %r4}, [%d41];\n"
        "mov.b32 %r7, smem;\nmul.lo.s32 %r8, %r0, 16;\nadd.s32 %r8, %r8, %r7;\n"
        "st.shared.v4.b32 [%r8], {%r1, %r2, %r3, %r4};\nbar.sync 0;\n"
        "xor.b32 %r5, %r0, 33;\nmul.lo.s32 %r6, %r5, 16;\nadd.s32 %r6, %r6, %r7;\n"
        "ld.shared.v2.b64 {%d1, %d2}, [%r6];\nst.global.v2.b64 [%d41], {%d1, %d2};"
    )
    rows = np.arange(256, dtype=np.uint32).reshape(64, 4)
    results = run(body, [rows.reshape(-1).copy()], threads=64, shared=1024).buffers[0].reshape(64, 4)
    assert (results == rows[np.arange(64) ^ 33]).all()


def test_matrix_loads() -> None:
    """ldmatrix: lane l gets elements 2 (l mod 4) and the next of row l / 4 of each matrix."""
    matrix = np.arange(4 * 64, dtype=np.uint16)
    body = (
        "mul.wide.u32 %d40, %r0, 16;\nadd.s64 %d41, %d0, %d40;\nld.global.v4.b32 {%r1, %r2, %r3, %r4}, [%d41];\n"
        "mul.lo.s32 %r5, %r0, 16;\nmov.b32 %r6, smem;\nadd.s32 %r6, %r6, %r5;\n"
        "st.shared.v4.b32 [%r6], {%r1, %r2, %r3, %r4};\nbar.sync 0;\n"
        "ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%r1, %r2, %r3, %r4}, [%r6];\n"
        "st.global.v4.b32 [%d41], {%r1, %r2, %r3, %r4};"
    )
    results = run(body, [matrix.copy()], shared=512).buffers[0].reshape(32, 4, 2)
    for number, tile in enumerate(matrix.reshape(4, 8, 8)):
        for lane in range(32):
            column = 2 * (lane % 4)
            assert results[lane, number].tolist() == tile[lane // 4, column : column + 2].tolist()


COPY = (
    "mul.wide.u32 %d40, %r0, 16;\nadd.s64 %d41, %d0, %d40;\ncvt.u32.u64 %r1, %d40;\nmov.b32 %r2, smem;\n"
    "add.s32 %r1, %r1, %r2;\nsetp.lt.u32 %p1, %r0, 60;\nselp.b32 %r9, 16, 0, %p1;\n"
    "cp.async.cg.shared.global [%r1], [%d41], 16, %r9;\ncp.async.commit_group;\n"
    "cp.async.wait_group 0;\nbar.sync 0;\n"
    "xor.b32 %r3, %r1, 16;\nld.shared.v4.b32 {%r4, %r5, %r6, %r7}, [%r3];\n"
    "st.global.v4.b32 [%d41], {%r4, %r5, %r6, %r7};"
)


def test_asynchronous_copies() -> None:
    """Threads 60 to 63 copy no bytes, so that theirs are 0."""
    rows = np.arange(256, dtype=np.uint32).reshape(64, 4)
    results = run(COPY, [rows.reshape(-1).copy()], threads=64, shared=1024).buffers[0].reshape(64, 4)
    assert (results == np.where(np.arange(64)[:, None] < 60, rows, 0)[np.arange(64) ^ 1]).all()


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("wait_group 0", "wait_group 1", "reads bytes that nothing wrote"),
        ("bar.sync 0;\nxor.b32 %r3, %r1, 16", "xor.b32 %r3, %r1, 512", "reads what another warp wrote"),
        ("selp.b32 %r9, 16, 0", "selp.b32 %r9, 16, 4", "copies of fewer than 16 bytes, but not 0, are not known"),
    ],
)
def test_asynchronous_copies_are_waited_for(old: str, new: str, message: str) -> None:
    assert old in COPY
    with pytest.raises(PtxError, match=message):
        run(COPY.replace(old, new), [zeros(256)], threads=64, shared=1024)


EXCHANGE = PLACE + (
    "mov.b32 %r2, smem;\nshl.b32 %r3, %r0, 2;\nadd.s32 %r4, %r2, %r3;\n"
    "xor.b32 %r5, %r3, 128;\nadd.s32 %r5, %r5, %r2;\n"
    "st.shared.b32 [%r4], %r0;\nbar.sync 0;\nld.shared.b32 %r6, [%r5];\n{between}st.shared.b32 [%r4], %r6;\n"
    "st.global.b32 [%d41], %r6;"
)

FAULTS = [
    ("mov.b32 %r1, %r2;", "line 15: mov.b32 %r1, %r2: reads %r2, which nothing wrote"),
    ("wgmma.fence.sync.aligned;", "line 15: wgmma.fence.sync.aligned: opcode wgmma.fence.sync.aligned is not known"),
    *(
        (f"{opcode} %r1, %r0, %r0;", f"opcode {opcode} is not known")
        for opcode in ("add.rz.f32", "min.relu.s32", "add.sat.s32", "add.sat.f16x2", "add.cc.u32", "add.ftz.bf16x2")
    ),
    ("ld.global.nc.foo.b32 %r1, [%d0];", "opcode ld.global.nc.foo.b32 is not known"),
    (PLACE + "add.s64 %d41, %d41, 2;\nst.global.b32 [%d41], 1;", "is not aligned to 4 bytes"),
    (PLACE + "add.s64 %d41, %d41, 4;\nst.global.b32 [%d41], 1;", "out of bounds: byte 256 of p0, which has 256"),
    (PLACE + "cvt.u32.u64 %r1, %d41;\nld.global.b32 %r2, [%r1];", "out of bounds"),
    ("mul.wide.u32 %d40, %r0, 16;\nadd.s64 %d41, %d0, %d40;\nld.global.v2.b64 {%d1, %d2}, [%d41];", "out of bounds"),
    ("mul.wide.u32 %d40, %r0, 4;\nadd.s64 %d41, %d1, %d40;\nld.global.b32 %r1, [%d41];", "bytes that nothing wrote"),
    ("mov.b32 %r1, smem;\nld.shared.b32 %r2, [%r1];", "shared memory .* reads bytes that nothing wrote"),
    ("mov.b32 %r1, smem;\nst.shared.b32 [%r1+1024], %r0;", "shared memory .* out of bounds"),
    ("st.global.b32 [%d0], %r0;", "another lane of this instruction writes another value"),
    (EXCHANGE.format(between="").replace("bar.sync 0;\n", "", 1), "reads what another warp wrote, no barrier between"),
    (EXCHANGE.format(between=""), "overwrites what another warp reads, no barrier between"),
    ("setp.lt.u32 %p1, %r0, 32;\n@%p1 bar.sync 0;", "divergent barrier: not all threads of block 0"),
    ("setp.lt.u32 %p1, %r0, 5;\n@%p1 bra A;\nbar.sync 0;\nA:\nbar.sync 0;", "divergent barrier"),
    ("setp.lt.u32 %p1, %r0, 5;\n@%p1 shfl.sync.bfly.b32 %r1, %r0, 1, 31, -1;", "member mask"),
    ("bar.sync 1;", "only barrier 0 of all threads is known"),
    ("L:\nbra.uni L;", "runs for more than"),
]


@pytest.mark.parametrize(("body", "message"), FAULTS, ids=[message for _, message in FAULTS])
def test_broken_rules_are_reported_with_their_line(body: str, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.ptx.machine._MOST_STEPS", 10_000)
    with pytest.raises(PtxError, match=message):
        run(body, [np.zeros(256, np.uint8).view(np.uint32), zeros(256)], threads=64, shared=1024, unwritten=[1])


def test_a_barrier_between_makes_an_exchange_legal() -> None:
    results = run(EXCHANGE.format(between="bar.sync 0;\n"), [zeros(64)], threads=64, shared=1024).buffers[0]
    assert results.tolist() == [lane ^ 32 for lane in range(64)]


LOAD = "ld.global.b32 %r2, [%d0];\nmov.u32 %r1, %ctaid.x;\n"
RACES = [
    (2, 32, PLACE + "mov.u32 %r1, %ctaid.x;\nst.global.b32 [%d41], %r1;", "races: .*another"),
    (
        2,
        32,
        PLACE + "mov.u32 %r1, %ctaid.x;\nsetp.eq.b32 %p1, %r1, 0;\n@%p1 ld.global.b32 %r2, [%d41];\n"
        "@!%p1 st.global.b32 [%d41], %r1;",
        "another block",
    ),
    # A reader among several, the one whose lanes come last in the instruction that reads.
    (2, 32, LOAD + "setp.eq.b32 %p1, %r1, 1;\n@%p1 st.global.b32 [%d0], 5;", "another block reads"),
    (1, 64, LOAD + "setp.gt.u32 %p1, %r0, 31;\n@%p1 st.global.b32 [%d0], 5;", "another warp reads"),
]


@pytest.mark.parametrize("blocks_at_once", [1, 2])
@pytest.mark.parametrize(("blocks", "threads", "body", "message"), RACES)
def test_blocks_and_warps_race_on_global_memory(
    blocks: int, threads: int, body: str, message: str, blocks_at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether blocks run together or one after the other."""
    monkeypatch.setattr("tests.ptx.machine._MOST_LANES", threads * blocks_at_once)
    with pytest.raises(PtxError, match=message):
        run(body, [zeros(64)], blocks=blocks, threads=threads)


def test_sectors_count_32_byte_pieces_once_per_warp() -> None:
    for stride, sectors in ((4, 4), (8, 8), (32, 32), (128, 32)):
        body = f"mul.wide.u32 %d40, %r0, {stride};\nadd.s64 %d41, %d0, %d40;\nld.global.b32 %r1, [%d41];"
        counts = run(body, [zeros(1024)]).machine.memory.counts
        assert (counts["read bytes"], counts["read sectors"]) == (128, sectors)


def test_a_guard_keeps_old_values() -> None:
    x = np.arange(256, dtype=np.uint32)
    results = compute("setp.lt.u32 %p1, a, 100;\nmov.b32 z, 7;\n@%p1 add.s32 z, a, 1", [x], zeros(256))
    assert results.tolist() == [i + 1 if i < 100 else 7 for i in range(256)]


def test_partly_written_registers_are_undefined_for_other_threads() -> None:
    results = run(PLACE + "setp.lt.u32 %p1, %r0, 3;\n@%p1 mov.b32 %r1, 7;\nst.global.b32 [%d41], %r1;", [zeros(32)])
    assert results.buffers[0].tolist() == [7] * 3 + [2**32 - 1] * 29
