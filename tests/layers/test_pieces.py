"""Pieces of attention: of a ring, each visible pair once and the same number everywhere; one alone against float64."""

import math
import threading
from collections import Counter, defaultdict
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from megapipe.layers import attention_pieces, context_parallel
from megapipe.layers.attention_pieces import Seen, Weighing, piece_backward, piece_forward
from megapipe.parallel.groups import Work
from megapipe.parallel.in_process import ThreadGroup
from megapipe.spec import token_order
from megapipe.spec.token_order import Share, TokenOrder, Visibility, chunks_per_rank, pieces
from tests.layers.test_shared_samples import Case, shared_attention
from tests.support.meshes import run_threads


def work(order: TokenOrder, size: int, chunk: int, rank: int, visibility: Visibility) -> list[int]:
    """Pairs that a rank computes at each hop."""
    num_local = chunks_per_rank(order) * chunk
    hops = [(rank - hop) % size for hop in range(size)]
    return [sum(p.num_pairs for p in pieces(visibility, order, rank, other, size, num_local)) for other in hops]


@pytest.mark.parametrize("size", [2, 3, 4, 8])
def test_head_and_tail_balance_the_work_of_every_hop(size: int) -> None:
    causal = Visibility(causal=True)
    by_rank = [work("head_tail", size, 16, rank, causal) for rank in range(size)]
    assert all(each == by_rank[0] for each in by_rank)
    length = 2 * size * 16
    assert sum(map(sum, by_rank)) == length * (length + 1) // 2, "no pair too many"
    in_order = [sum(work("contiguous", size, 32, rank, causal)) for rank in range(size)]
    assert in_order == sorted(in_order)
    assert in_order[-1] > 2 * in_order[0]


@given(
    order=st.sampled_from(["head_tail", "contiguous"]),
    size=st.integers(1, 5),
    chunk=st.integers(1, 6),
    causal=st.booleans(),
    window=st.one_of(st.none(), st.integers(1, 30)),
    masked=st.booleans(),
    strip=st.integers(1, 9),
)
def test_pieces_cover_what_is_visible_once(
    order: TokenOrder, size: int, chunk: int, causal: bool, window: int | None, masked: bool, strip: int
) -> None:
    visibility = Visibility(causal, window if causal else None, masked)
    num_local = chunks_per_rank(order) * chunk
    length = size * num_local
    tokens = [Share(order, rank, size).numbers(length) for rank in range(size)]
    distance = np.arange(length)[:, None] - np.arange(length)
    visible = np.ones((length, length), dtype=bool)
    if causal:
        visible = (distance >= 0) & (distance < (length if window is None else window))
    computed = np.zeros((length, length), dtype=int)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(token_order, "STRIP", strip)
        for rank in range(size):
            for other in range(size):
                for piece in pieces(visibility, order, rank, other, size, num_local):
                    rows, columns = (tokens[rank][piece.queries], tokens[other][piece.keys])
                    square = np.ones((len(rows), len(columns)), dtype=bool)
                    square = np.tril(square) if piece.kind == "causal" else square
                    computed[np.ix_(rows, columns)] += square
                    if piece.kind != "masked":
                        assert visible[np.ix_(rows, columns)][square].all()
                    else:
                        assert len(piece.queries) <= strip
    assert computed.max() == 1
    assert (computed >= visible).all()


def note_pieces(monkeypatch: pytest.MonkeyPatch, note: Callable[..., None]) -> None:
    """Call note("forward" or "backward", ...) with the arguments of every product of attention in pieces."""

    def noted(what: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            note(what, *arguments)
            return function(*arguments)

        return call

    for module, what in ((attention_pieces, "forward"), (context_parallel, "backward")):
        monkeypatch.setattr(module, f"piece_{what}", noted(what, getattr(module, f"piece_{what}")))


def test_ranks_run_what_was_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Counted where the products are, forward and backward."""
    done: Counter[str] = Counter()

    def count(what: str, *arguments: Any) -> None:
        query, key, *_ = arguments if what == "forward" else arguments[1:]
        (seen,) = (each for each in arguments if isinstance(each, Seen))
        assert seen.visible is None
        rows, columns = query.shape[2], key.shape[2]
        done[threading.current_thread().name] += rows * (rows + 1) // 2 if seen.causal else rows * columns

    note_pieces(monkeypatch, count)
    run_threads({"context": 4}, shared_attention, Case("ring", 4, 4, dtype=torch.float32))
    assert len(done) == 4
    assert set(done.values()) == {2 * sum(work("head_tail", 4, 4, 0, Visibility(causal=True)))}


class _NotedWork(Work):
    def __init__(self, work: Work, note: Callable[[str], None]) -> None:
        self._work = work
        self._note = note

    def wait(self) -> None:
        self._note("wait")
        self._work.wait()


def test_hops_overlap_the_work_of_their_predecessors(monkeypatch: pytest.MonkeyPatch) -> None:
    events: dict[str, list[str]] = defaultdict(list)
    shift = ThreadGroup.shift

    def note(what: str, *_: Any) -> None:
        events[threading.current_thread().name].append(what)

    def noted_shift(group: ThreadGroup, tensor: Tensor, into: Tensor) -> Work:
        note("shift")
        return _NotedWork(shift(group, tensor, into), note)

    monkeypatch.setattr(ThreadGroup, "shift", noted_shift)
    note_pieces(monkeypatch, note)
    run_threads({"context": 3}, shared_attention, Case("ring", 3, 4))
    hops = ["shift", "forward", "wait", "shift", "forward", "wait", "forward"]
    # Keys and values as forward; gradients are sent after each hop's work and awaited after the next one's.
    back = ["shift", "backward", "wait", "shift", "backward", "shift", "wait", "backward", "wait", "shift", "wait"]
    assert list(events.values()) == [hops + back] * 3


SCALE = 0.3
CASES = pytest.mark.parametrize("what", ["all", "causal", "masked"])


def inputs(device: str, dtype: torch.dtype, rows: int, columns: int, width: int) -> list[Tensor]:
    """Gradient and query of four heads, key and value of two."""
    generator = torch.Generator().manual_seed(3)
    shapes = [(2, 4, rows, width)] * 2 + [(2, 2, columns, width)] * 2
    return [torch.randn(each, generator=generator).to(device, dtype) for each in shapes]


def seen_of(what: str, device: str, rows: int, columns: int) -> Seen:
    if what != "masked":
        return Seen(causal=what == "causal")
    visible = torch.rand(2, 1, rows, columns, generator=torch.Generator().manual_seed(4)) < 0.5
    visible[0, :, 1] = False  # a query that sees nothing
    return Seen(visible=visible.to(device))


def definition(tensors: list[Tensor], seen: Seen) -> list[Tensor]:
    """Mixed values, log-sum, and gradients of query, key and value."""
    gradient, *leaves = (each.double().requires_grad_() for each in tensors)
    query, key, value = leaves
    scores = query @ key.repeat_interleave(2, dim=1).transpose(-1, -2) * SCALE
    rows, columns = scores.shape[-2:]
    visible = torch.ones(rows, columns, dtype=torch.bool, device=scores.device)
    visible = visible.tril() if seen.causal else visible
    visible = visible if seen.visible is None else seen.visible
    scores = scores.masked_fill(~visible, -math.inf)
    log_sum = scores.logsumexp(-1)
    weights = (scores - log_sum.masked_fill(log_sum == -math.inf, 0.0)[..., None]).exp()
    mixed = weights @ value.repeat_interleave(2, dim=1)
    return [mixed.detach(), log_sum.detach(), *torch.autograd.grad(mixed, leaves, gradient)]


def check(device: str, what: str, unfused: bool, dtype: torch.dtype, size: int, width: int, tolerance: float) -> None:
    rows, columns = (size, size) if what == "causal" else (size, size - 3)
    tensors, seen = inputs(device, dtype, rows, columns, width), seen_of(what, device, rows, columns)
    how = Weighing(SCALE, unfused=unfused)
    gradient, query, key, value = tensors
    mixed, log_sum = piece_forward(query, key, value, seen, how)
    finite = log_sum.masked_fill(log_sum == -math.inf, 0.0)
    actual = [mixed, log_sum, *piece_backward(gradient, query, key, value, mixed, finite, seen, how)]
    expected = definition(tensors, seen)
    assert torch.equal(actual[1] == -math.inf, expected[1] == -math.inf)
    for one, other in zip(actual, expected, strict=True):
        one, other = (each.double().masked_fill(each == -math.inf, 0.0) for each in (one, other))
        assert (one - other).norm() <= tolerance * other.norm()


@CASES
@pytest.mark.parametrize("unfused", [False, True])
def test_pieces_on_a_cpu(what: str, unfused: bool) -> None:
    check("cpu", what, unfused, torch.float64, 9, 8, 1e-12)


@pytest.mark.gpu
@CASES
@pytest.mark.parametrize("unfused", [False, True])
def test_pieces_on_a_gpu(what: str, unfused: bool) -> None:
    check("cuda", what, unfused, torch.bfloat16, 300, 64, 2e-2)
