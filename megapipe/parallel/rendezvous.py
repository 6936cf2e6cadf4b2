"""A store that holds nothing of an earlier start, for ranks that torchrun has started again.

torchrun shares one store between all starts of a job, so that ranks find the addresses of those that died and connect
to them (pytorch#135712, pytorch#167288; torch 2.13). Its count of restarts tells starts apart on one host alone: each
host counts its own. So ranks agree upon a name for their start, and keep all else under it.
"""

import time
import uuid
from collections.abc import Mapping
from datetime import timedelta

import torch.distributed as dist

from megapipe.parallel.errors import LaunchError

_PAUSE_SECONDS = 0.01


def shares_store_with_earlier_starts(environment: Mapping[str, str]) -> bool:
    """Whether torchrun may have left something in the store that it gives its ranks."""
    shared = environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return shared and environment.get("TORCHELASTIC_MAX_RESTARTS", "0") != "0"


def fresh_store(environment: Mapping[str, str], timeout: timedelta) -> dist.Store:
    """Torchrun's store, seen from this start of the job alone. All ranks call it."""
    store = dist.TCPStore(
        environment["MASTER_ADDR"], int(environment["MASTER_PORT"]), is_master=False, timeout=timeout
    )
    name = agreed_name(store, int(environment["RANK"]), int(environment["WORLD_SIZE"]), timeout.total_seconds())
    return dist.PrefixStore(name, store)


def agreed_name(store: dist.Store, rank: int, world_size: int, timeout: float) -> str:
    """A name that the ranks of this start share, whatever those of earlier ones left behind.

    Rank 0 makes it up. Every other rank asks under a word of its own, which nobody has answered before; what rank 0
    answers to those who are dead by now does no harm. Raises LaunchError after `timeout` seconds.
    """
    if rank == 0:
        return _answer(store, world_size, timeout)
    word = uuid.uuid4().hex
    store.set(f"start/asks {rank}", word)
    answer = f"start/answer {word}"
    try:
        store.wait([answer], timedelta(seconds=timeout))
    except dist.DistStoreError as error:
        raise LaunchError(
            f"rank {rank}: rank 0 did not start within {timeout:g} s (parallel.timeout_seconds)"
        ) from error
    name = store.get(answer).decode()
    store.set(f"{name}/has {rank}", "")
    return name


def _answer(store: dist.Store, world_size: int, timeout: float) -> str:
    name = f"start {uuid.uuid4().hex}"
    waiting = list(range(1, world_size))
    deadline = time.monotonic() + timeout
    while waiting:
        for rank in waiting:
            if store.check([f"start/asks {rank}"]):
                store.set(f"start/answer {store.get(f'start/asks {rank}').decode()}", name)
        waiting = [rank for rank in waiting if not store.check([f"{name}/has {rank}"])]
        if waiting and time.monotonic() > deadline:
            raise LaunchError(f"rank {waiting[0]} did not start within {timeout:g} s (parallel.timeout_seconds)")
        time.sleep(_PAUSE_SECONDS)
    return name
