"""Ranks of one start agree upon a name, whatever earlier starts of the job left in the store."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch.distributed as dist

from megapipe.parallel.errors import LaunchError
from megapipe.parallel.rendezvous import agreed_name, shares_store_with_earlier_starts


def test_every_start_has_a_name_of_its_own() -> None:
    store, earlier = dist.HashStore(), set[str]()
    with ThreadPoolExecutor(3) as threads:
        for dying in (2, 1, None):  # the first two starts lose a rank before it has asked
            ranks = [rank for rank in (1, 2) if rank != dying]
            asked = [threads.submit(agreed_name, store, rank, 3, 60.0) for rank in ranks]
            if dying is None:
                names = {agreed_name(store, 0, 3, 60.0), *(each.result() for each in asked)}
                assert len(names) == 1
                assert names.isdisjoint(earlier)
            else:
                with pytest.raises(LaunchError, match=f"rank {dying} did not start within 1 s"):
                    agreed_name(store, 0, 3, 1.0)
                earlier |= {each.result() for each in asked}
                store.set(f"start/asks {dying}", "a word of the dead")


def test_a_missing_first_rank_is_named() -> None:
    with pytest.raises(LaunchError, match=r"rank 1: rank 0 did not start within 0.1 s"):
        agreed_name(dist.HashStore(), 1, 2, 0.1)


def test_only_jobs_that_may_restart_need_a_name() -> None:
    shared = {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_MAX_RESTARTS": "3"}
    assert shares_store_with_earlier_starts(shared)
    assert not shares_store_with_earlier_starts(shared | {"TORCHELASTIC_MAX_RESTARTS": "0"})
    assert not shares_store_with_earlier_starts(shared | {"TORCHELASTIC_USE_AGENT_STORE": "False"})
    assert not shares_store_with_earlier_starts({})
