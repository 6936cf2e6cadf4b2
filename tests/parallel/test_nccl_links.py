"""How NCCL links divide a pipeline into communicators, without a GPU: splits and messages are recorded."""

from collections import Counter
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from megapipe.parallel.groups import LaunchError
from megapipe.parallel.links import Edge
from megapipe.parallel.pipeline_links import disjoint_rounds, nccl_links
from megapipe.schedules import build

PAIRS = st.lists(
    st.tuples(st.integers(0, 9), st.integers(0, 9)).filter(lambda pair: pair[0] != pair[1]), unique=True, max_size=40
)


@given(pairs=PAIRS)
def test_rounds_are_disjoint_and_few(pairs: list[tuple[int, int]]) -> None:
    rounds = disjoint_rounds(pairs)
    assert sorted(pair for each in rounds for pair in each) == sorted(pairs)
    for each in rounds:
        assert max(Counter(rank for pair in each for rank in pair).values()) == 1
    degree = max(Counter(rank for pair in pairs for rank in pair).values(), default=0)
    assert degree <= len(rounds) <= max(0, 2 * degree - 1)


@pytest.mark.parametrize(
    ("name", "ranks", "options", "most_links", "rounds"),
    [
        ("1f1b", 2, {}, 2, 2),
        ("1f1b", 8, {}, 4, 4),
        ("interleaved_1f1b", 2, {"chunks": 7}, 2, 2),
        ("interleaved_1f1b", 7, {"chunks": 3}, 4, 6),
        ("interleaved_1f1b", 8, {"chunks": 4}, 4, 4),
        ("zb_v", 8, {}, 4, 4),
    ],
)
def test_ranks_have_one_link_per_neighbour_and_direction(
    name: str, ranks: int, options: dict[str, Any], most_links: int, rounds: int
) -> None:
    connections = build(name, ranks, ranks, **options).header.connections
    assert max(Counter(rank for pair in connections for rank in pair).values()) == most_links
    assert len(disjoint_rounds(connections)) == rounds


class Recorder:
    """Replaces torch.distributed with NCCL on one rank: records splits and messages."""

    def __init__(self, rank: int, size: int, monkeypatch: pytest.MonkeyPatch, multiprocessors: int = 108) -> None:
        self.splits: list[list[list[int]]] = []
        self.messages: list[tuple[str, int, object]] = []
        self.rank = rank
        self.group: Any = SimpleNamespace(
            rank=rank, ranks=tuple(range(size)), global_rank=rank, process_group="pipeline", pairs={}
        )
        options = SimpleNamespace(config=SimpleNamespace())
        nccl = SimpleNamespace(Options=lambda **_: options)
        monkeypatch.setattr(dist, "ProcessGroupNCCL", nccl, raising=False)
        monkeypatch.setattr(dist, "split_group", self.split_group)
        monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
        properties = SimpleNamespace(multi_processor_count=multiprocessors)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
        monkeypatch.setattr(
            "megapipe.parallel.pipeline_links.DistributedGroup",
            lambda name, process_group: SimpleNamespace(name=name, process_group=process_group),
        )
        for name in ("isend", "irecv"):
            monkeypatch.setattr(dist, name, self.message(name))

    def split_group(self, parent: object, ranks: list[list[int]], group_desc: str, **_: object) -> str | None:
        assert parent == "pipeline"
        self.splits.append(ranks)
        return group_desc if any(self.rank in members for members in ranks) else None

    def message(self, name: str) -> Any:
        def start(tensor: torch.Tensor, peer: int, carrier: object) -> Any:
            self.messages.append((name, peer, carrier))
            return SimpleNamespace(wait=lambda *_: None)

        return start


def edges_of(pairs: Sequence[tuple[int, int]], maximum_bytes: int = 8) -> list[Edge]:
    return [Edge(*pair, maximum_bytes) for pair in pairs]


def test_each_pair_is_split_and_connected_once(monkeypatch: pytest.MonkeyPatch) -> None:
    connections = build("interleaved_1f1b", 4, 8, chunks=3).header.connections
    recorder, device = Recorder(1, 4, monkeypatch), torch.device("cpu")
    small = nccl_links(recorder.group, edges_of(connections), 60.0, device)
    assert recorder.splits == [
        [[0, 1], [2, 3]], [[0, 1], [2, 3]], [[1, 2], [0, 3]], [[1, 2], [0, 3]],
    ]  # fmt: skip
    assert recorder.messages == [
        ("isend", 0, "link 1->0") if pair == (1, 0) else
        ("irecv", 0, "link 0->1") if pair == (0, 1) else
        ("isend", 2, "link 1->2") if pair == (1, 2) else
        ("irecv", 2, "link 2->1")
        for pair in connections if 1 in pair
    ]  # fmt: skip
    # An engine with larger messages shares the communicators: no rank splits or connects again.
    large = nccl_links(recorder.group, edges_of(connections, 800), 60.0, device)
    assert len(recorder.splits) == len(recorder.messages) == 4
    edge = Edge(1, 2, 800)
    large[edge].send(torch.zeros(100))
    small[Edge(1, 2, 8)].send(torch.zeros(1))
    assert recorder.messages[-2:] == [("isend", 2, "link 1->2")] * 2


@pytest.mark.parametrize(
    ("size", "multiprocessors", "reason"),
    [
        (18, 108, r"pipeline rank 0 has 34 links, but torch has 32 .* at most 16 neighbours"),
        (4, 8, r"6 links, .* up to 24 thread blocks, .* only 16 .* at most 2 neighbours"),
    ],
    ids=["streams", "thread blocks"],
)
def test_more_links_than_a_gpu_can_run_are_refused(
    size: int, multiprocessors: int, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pairs = [pair for other in range(1, size) for pair in ((0, other), (other, 0))]
    recorder = Recorder(0, size, monkeypatch, multiprocessors)
    nccl_links(recorder.group, edges_of(pairs[:-2]), 60.0, torch.device("cpu"))
    with pytest.raises(LaunchError, match=reason):
        nccl_links(recorder.group, edges_of(pairs[-2:]), 60.0, torch.device("cpu"))
