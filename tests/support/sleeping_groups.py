"""A group whose gathers and reductions take a set time on a stream of their own, as a slow network's would."""

import time
from abc import update_abstractmethods
from collections.abc import Callable
from typing import Any

from torch import Tensor

from megapipe.parallel.groups import Group, ReduceOperation, Work


class _SleepingWork(Work):
    def __init__(self, work: Work, ready: int) -> None:
        self._work = work
        self._ready = ready

    def wait(self) -> None:
        time.sleep(max(0, self._ready - time.perf_counter_ns()) / 1e9)
        self._work.wait()


class SleepingGroup(Group):
    """Wraps a group. An operation ends `seconds` after its start, or after the end of the operation before it.

    Attributes:
        log: (operation, started, there), in order; nanoseconds of `time.perf_counter_ns`.
    """

    def __init__(self, group: Group, seconds: float) -> None:
        super().__init__(group.name, group.ranks, group.rank)
        self._group = group
        self._nanoseconds = int(seconds * 1e9)
        self._free = 0
        self.log: list[tuple[str, int, int]] = []

    def _slowed(self, operation: str, work: Work) -> Work:
        now = time.perf_counter_ns()
        self._free = max(now, self._free) + self._nanoseconds
        self.log.append((operation, now, self._free))
        return _SleepingWork(work, self._free)

    def all_reduce(self, tensor: Tensor, op: ReduceOperation = "sum", async_op: bool = False) -> Work:
        work = self._slowed("all_reduce", self._group.all_reduce(tensor, op, async_op=True))
        if not async_op:
            work.wait()
        return work

    def gather_into(self, whole: Tensor, part: Tensor) -> Work:
        return self._slowed("gather_into", self._group.gather_into(whole, part))

    def reduce_into_part(self, whole: Tensor) -> Work:
        return self._slowed("reduce_into_part", self._group.reduce_into_part(whole))

    def shift(self, tensor: Tensor, into: Tensor) -> Work:
        return self._slowed("shift", self._group.shift(tensor, into))


def _passed_on(operation: str) -> Callable[..., Any]:
    def method(self: SleepingGroup, *args: Any, **kwargs: Any) -> Any:
        return getattr(self._group, operation)(*args, **kwargs)

    return method


for _name in SleepingGroup.__abstractmethods__:
    setattr(SleepingGroup, _name, _passed_on(_name))
update_abstractmethods(SleepingGroup)
