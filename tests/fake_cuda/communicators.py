"""NCCL as far as streams see it: which stream an exchange runs on, what waits for it, and who keeps its tensors.

Asynchronous collectives and all point-to-point exchanges run on the communicator's own stream, which first waits for
the current one; synchronous collectives run on the current stream. `wait()` lets the current stream wait. Tensors of
an asynchronous collective are kept until then; those of sends and receives are recorded on the communicator's stream
(torch's ProcessGroupNCCL.cpp). Nothing is exchanged but Python objects; what every rank exchanged is logged, so that
the logs of all ranks can be compared.
"""

import itertools
import pickle
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d as c10d

from tests.fake_cuda.mode import Watch, on_device
from tests.fake_cuda.timeline import Place, place


class Exchanged(NamedTuple):
    """One exchange of a communicator. kind: a collective's name, `send` or `recv`. peer: global rank, -1 for all."""

    communicator: str
    kind: str
    shape: tuple[int, ...]
    dtype: str
    peer: int


class Nccl:
    """All communicators of one rank.

    Attributes:
        log: every exchange of tensors, in the order of the calls.
        open: works that no thread has waited for, and where they were started.
    """

    def __init__(self, watch: Watch, rank: int, world_size: int, folder: Path) -> None:
        self.watch = watch
        self.rank = rank
        self.world_size = world_size
        self.log: list[Exchanged] = []
        self.open: dict[Work, Place] = {}
        self._store = dist.FileStore(str(folder / "objects"), world_size)
        self._store.set_timeout(timedelta(seconds=100))
        self._groups: dict[str, Communicator] = {}
        self._worlds = 0
        self._functional: dict[int, tuple[Tensor, Work]] = {}

    def install(self) -> None:
        """Take the place of torch.distributed's functions that make groups, for the rest of the process."""
        dist.init_process_group = self._initialise  # type: ignore[assignment]
        dist.split_group = self._split  # type: ignore[assignment]
        dist.destroy_process_group = self._destroy  # type: ignore[assignment]
        dist.get_backend = lambda group=None: "nccl"  # type: ignore[assignment]
        dist.all_gather_object = self._gather_objects  # type: ignore[assignment]
        dist.batch_isend_irecv = self._batch  # type: ignore[assignment]
        dist.ProcessGroupNCCL = SimpleNamespace(Options=_options)  # type: ignore[assignment,misc]
        functional = torch.ops._c10d_functional
        self.watch.handlers |= {
            functional.all_reduce.default: self._all_reduce,
            functional.all_gather_into_tensor.default: self._all_gather,
            functional.reduce_scatter_tensor.default: self._reduce_scatter,
            functional.all_to_all_single.default: self._all_to_all,
            functional.wait_tensor.default: self._wait_tensor,
        }

    def _initialise(self, backend: str, **options: Any) -> None:
        if options.get("device_id") is None:
            raise RuntimeError("an NCCL world without device_id cannot be split")
        self._worlds += 1  # a process may leave one and join another
        world = self._make(range(self.world_size), options["device_id"], f"world {self._worlds}")
        c10d._update_default_pg(world)

    def _destroy(self, group: Any = None) -> None:
        for work, where in self.open.items():
            self.watch.timeline.fault(f"{work.kind} was never waited for", where)
        self.open.clear()
        c10d._update_default_pg(None)
        c10d._world.pg_group_ranks.clear()
        c10d._unregister_all_process_groups()

    def _split(
        self,
        parent_pg: Any = None,
        split_ranks: Sequence[Sequence[int]] = (),
        timeout: Any = None,
        pg_options: Any = None,
        group_desc: str | None = None,
        **other: Any,
    ) -> Any:
        parent = c10d._get_default_group() if parent_pg is None else parent_pg
        splits = [[parent.members[rank] for rank in ranks] for ranks in split_ranks]
        members = [rank for ranks in splits for rank in ranks]
        if len(members) != len(set(members)):
            raise ValueError(f"split_group with ranks {split_ranks}: groups overlap")
        if self.open:
            work, where = next(iter(self.open.items()))
            self.watch.timeline.fault(f"a group is split while {work.kind} is under way", place(), where, "started")
        number = f"{parent.name_here}/{next(parent.splits)}"
        mine = next((ranks for ranks in splits if self.rank in ranks), None)
        return None if mine is None else self._make(mine, c10d._get_default_group().bound_device_id, number)

    def _make(self, ranks: Sequence[int], device: torch.device, number: str) -> "Communicator":
        ranks = sorted(ranks)
        name = f"{number}:{'-'.join(map(str, ranks))}"
        group = Communicator(self, name, ranks, device)
        self._groups[name] = group
        mapping = {rank: index for index, rank in enumerate(ranks)}
        c10d._register_pg_in_world(group, "nccl", self._store, name, "cuda:nccl", mapping)
        return group

    def exchange_objects(self, group: "Communicator", value: Any) -> list[Any]:
        """Every member's object, by group rank. The host waits for all of them."""
        turn = next(group.turns)
        key = f"{group.name_here}/{turn}"
        self._store.set(f"{key}/{self.rank}", pickle.dumps(value))
        return [pickle.loads(self._store.get(f"{key}/{rank}")) for rank in group.members]

    def _gather_objects(self, values: list[Any], value: Any, group: Any = None) -> None:
        group = c10d._get_default_group() if group is None else group
        self.watch.timeline.synchronize_device("all_gather_object")
        values[:] = self.exchange_objects(group, value)

    def _batch(self, operations: Sequence[dist.P2POp]) -> list[Any]:
        """One launch for all of them, and one work."""
        group = operations[0].group or c10d._get_default_group()
        sends = [each.tensor for each in operations if each.op is dist.isend]
        receives = [each.tensor for each in operations if each.op is dist.irecv]
        for each in operations:
            group.note("send" if each.op is dist.isend else "recv", each.tensor, group.members[each.group_peer])
        return [group.point_to_point("batch of sends and receives", sends, receives)]

    # Collectives that autograd and compilers see: the result is waited for by name.

    def _finish_later(self, result: Tensor, work: "Work") -> Tensor:
        self._functional[id(result)] = (result, work)
        return result

    def _all_reduce(self, x: Tensor, operation: str, name: str) -> Tensor:
        with self.watch:
            result = x.clone()
        return self._finish_later(result, self._groups[name].collective("all_reduce", [result], [result], True))

    def _all_gather(self, x: Tensor, size: int, name: str) -> Tensor:
        result = x.new_empty((x.shape[0] * size, *x.shape[1:]))
        return self._finish_later(result, self._groups[name].collective("all_gather", [x], [result], True))

    def _reduce_scatter(self, x: Tensor, operation: str, size: int, name: str) -> Tensor:
        result = x.new_empty((x.shape[0] // size, *x.shape[1:]))
        return self._finish_later(result, self._groups[name].collective("reduce_scatter", [x], [result], True))

    def _all_to_all(self, x: Tensor, received: Sequence[int], sent: Sequence[int], name: str) -> Tensor:
        result = x.new_empty((sum(received), *x.shape[1:]))
        return self._finish_later(result, self._groups[name].collective("all_to_all", [x], [result], True))

    def _wait_tensor(self, x: Tensor) -> Tensor:
        _, work = self._functional.pop(id(x))
        work.wait()
        return x


def _options(**fields: Any) -> SimpleNamespace:
    """ProcessGroupNCCL.Options."""
    return SimpleNamespace(config=SimpleNamespace(), **fields)


class Work(dist._Work if hasattr(dist, "_Work") else dist.Work):  # type: ignore[misc]
    """An exchange under way."""

    def __init__(self, nccl: Nccl, kind: str, event: dict[int, int], stash: Sequence[Tensor]) -> None:
        super().__init__()
        self.kind = kind
        self._nccl = nccl
        self._event = event
        self._stash = list(stash)
        nccl.open[self] = place()

    def __hash__(self) -> int:
        return id(self)

    def __eq__(self, other: object) -> bool:
        return self is other

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Let the current stream wait; with a timeout the host waits."""
        watch = self._nccl.watch
        if self._nccl.open.pop(self, None) is None:
            watch.timeline.fault(f"{self.kind} is waited for twice", place())
        watch.timeline.wait(watch.device.current, self._event)
        if timeout is not None:
            watch.timeline.synchronize(self._event, "wait with a timeout")
        self._stash.clear()
        return True

    def is_completed(self) -> bool:
        return True


class Communicator(dist.ProcessGroup):
    """One communicator of this rank. members: global ranks by group rank."""

    def __init__(self, nccl: Nccl, name: str, members: Sequence[int], device: torch.device) -> None:
        super().__init__(list(members).index(nccl.rank), len(members))
        self._nccl = nccl
        self.name_here = name
        self.members = list(members)
        self.bound_device_id = device
        self.turns = itertools.count()
        self.splits = itertools.count()
        self._stream: int | None = None
        self._set_group_name(name)

    @property
    def group_name(self) -> str:
        return self.name_here

    def getBackendName(self) -> str:
        return "nccl"

    @property
    def stream(self) -> int:
        """The communicator's own stream, made at its first use."""
        if self._stream is None:
            self._stream = self._nccl.watch.timeline.new_stream()
        return self._stream

    def note(self, kind: str, tensor: Tensor, peer: int = -1) -> None:
        """Log an exchange."""
        dtype = str(tensor.dtype).removeprefix("torch.")
        self._nccl.log.append(Exchanged(self.name_here, kind, tuple(tensor.shape), dtype, peer))

    def collective(
        self, kind: str, sources: Sequence[Tensor], targets: Sequence[Tensor], own_stream: bool
    ) -> "Work | None":
        """Start a collective; None where the current stream itself runs it."""
        watch = self._nccl.watch
        for each in (*sources, *targets):
            self._check(kind, each)
        self.note(kind, sources[0])
        if not own_stream:
            self._launch(kind, sources, targets, watch.device.current)
            return None
        watch.timeline.follow(self.stream, watch.timeline.record(watch.device.current))
        self._launch(kind, sources, targets, self.stream)
        return Work(self._nccl, kind, watch.timeline.record(self.stream), [*sources, *targets])

    def point_to_point(self, kind: str, sends: Sequence[Tensor], receives: Sequence[Tensor]) -> "Work":
        """Start sends and receives in one launch."""
        watch = self._nccl.watch
        for each in (*sends, *receives):
            self._check(kind, each)
        watch.timeline.follow(self.stream, watch.timeline.record(watch.device.current))
        self._launch(kind, sends, receives, self.stream)
        if kind == "recv":
            watch.timeline.received(self.stream)
        for each in (*sends, *receives):
            watch.memory_of(each).recorded.add(self.stream)
        return Work(self._nccl, kind, watch.timeline.record(self.stream), [])

    def _launch(self, kind: str, sources: Sequence[Tensor], targets: Sequence[Tensor], stream: int) -> None:
        # Sums of small numbers are taken to be this rank's own: flags that no rank sets stay unset.
        alike = kind in ("all_reduce", "broadcast")
        self._nccl.watch.launch(f"nccl {kind}", sources, targets, stream, keeps_values=alike)

    def _check(self, kind: str, tensor: Tensor) -> None:
        if not on_device(tensor):
            raise RuntimeError(f"No backend type associated with device type {tensor.device.type} ({kind} over NCCL)")
        if not tensor.is_contiguous():
            raise ValueError(f"Tensors must be contiguous ({kind} of a tensor with strides {tensor.stride()})")
        if tensor.device != self.bound_device_id:
            raise RuntimeError(f"{kind} over NCCL on {self.bound_device_id} got a tensor on {tensor.device}")

    # What torch.distributed calls.

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> Any:
        return self.collective("all_reduce", tensors, tensors, opts.asyncOp)

    def broadcast(self, tensors: list[Tensor], opts: Any = None) -> Any:
        written = [] if opts.rootRank == self.rank() else tensors  # in place, the source only sends
        return self.collective("broadcast", tensors, written, opts.asyncOp)

    def all_gather_single(self, output: Tensor, x: Tensor, opts: Any = None) -> Any:
        if output.numel() != x.numel() * self.size():
            raise ValueError(f"all_gather of {x.numel()} elements into {output.numel()} on {self.size()} ranks")
        return self.collective("all_gather", [x], [output], opts.asyncOp)

    def reduce_scatter_single(self, output: Tensor, x: Tensor, opts: Any = None) -> Any:
        if x.numel() != output.numel() * self.size():
            raise ValueError(f"reduce_scatter of {x.numel()} elements into {output.numel()} on {self.size()} ranks")
        return self.collective("reduce_scatter", [x], [output], opts.asyncOp)

    _allgather_base = all_gather_single
    _reduce_scatter_base = reduce_scatter_single

    def send(self, tensors: list[Tensor], destination: int, tag: int) -> Any:
        self.note("send", tensors[0], self.members[destination])
        return self.point_to_point("send", tensors, [])

    def recv(self, tensors: list[Tensor], source: int, tag: int) -> Any:
        self.note("recv", tensors[0], self.members[source])
        return self.point_to_point("recv", [], tensors)

    def barrier(self, opts: Any = None) -> Any:
        self._nccl.watch.timeline.synchronize_device("barrier")
        self._nccl.exchange_objects(self, None)


def check_logs(logs: Sequence[Sequence[Exchanged]]) -> list[str]:
    """Return mismatches between the ranks' logs, by rank: collectives are the same on all members, and what one
    rank sends another receives in the same order."""
    problems = []
    names = {each.communicator for log in logs for each in log}
    for name in sorted(names):
        members = [int(each) for each in name.rsplit(":", 1)[1].split("-")]
        collectives = {
            rank: [each for each in logs[rank] if each.communicator == name and each.peer < 0] for rank in members
        }
        first = collectives[members[0]]
        for rank in members:
            if collectives[rank] != first:
                index, mine, theirs = next(
                    (index, one, other)
                    for index, (one, other) in enumerate(itertools.zip_longest(collectives[rank], first))
                    if one != other
                )
                problems.append(f"{name}: collective {index} is {mine} on rank {rank}, {theirs} on {members[0]}")
        for source, target in itertools.permutations(members, 2):
            sent = _exchanged(logs[source], name, "send", target)
            received = _exchanged(logs[target], name, "recv", source)
            if sent != received:
                problems.append(f"{name}: rank {source} sends {sent} to rank {target}, which receives {received}")
    return problems


def _exchanged(log: Sequence[Exchanged], name: str, kind: str, peer: int) -> list[tuple[tuple[int, ...], str]]:
    return [
        (each.shape, each.dtype) for each in log if (each.communicator, each.kind, each.peer) == (name, kind, peer)
    ]
