"""Whether ranks that hold the same numbers hold the same bits: weights and moments of replicas, parameters that tensor
ranks do not share, tied weights.

A run whose replicas have drifted apart, by a flipped bit or a missing reduction, goes on as if nothing were:
BLOOM-176B ran 17,000 steps so (bigscience, tr11-176B-ml chronicles).
"""

from collections import Counter
from collections.abc import Iterator, Sequence

import numpy as np
import torch
import xxhash
from torch import Tensor

from megapipe.checkpoint.shards import parts_of, shards_of
from megapipe.parallel.groups import Group
from megapipe.parallel.unit_state import UnitState

_TOLD = 5
"""Differences that a message spells out."""


class ReplicasDifferError(RuntimeError):
    """Ranks hold different bits of what has to be equal."""


def check_replicas(states: Sequence[UnitState], world: Group, step: int) -> None:
    """Compare the bits of everything that more than one rank holds. A collective call, between steps.

    A rank hashes each part of what it holds (xxh3, 64 bits), keyed by its global name and extent: what has one key on
    several ranks has to have one hash. Ranks exchange 16 bytes a part.

    Raises:
        ReplicasDifferError: naming parameters and ranks; the same on every rank.
    """
    names = dict(_keys(states))
    table = _gathered(np.array([(key, digest) for key, (_, digest) in names.items()], np.uint64), world, states)
    holders: dict[int, dict[int, int]] = {}
    for rank, rows in enumerate(table):
        for key, digest in rows.tolist():
            holders.setdefault(key, {})[rank] = digest
    differing = {key: found for key, found in holders.items() if len(set(found.values())) > 1}
    if not differing:
        return
    mine = [_line(words, differing[key]) for key, (words, _) in names.items() if key in differing]
    told = sorted(set().union(*world.all_gather_object(mine)))
    more = f"; and {len(told) - _TOLD} more" if len(told) > _TOLD else ""
    raise ReplicasDifferError(
        f"after step {step} ranks differ in state that must be equal: {'; '.join(told[:_TOLD])}{more}; a device "
        "computes wrongly, or a gradient was not reduced: continue from an earlier checkpoint, without the host of "
        "the rank that differs from the others"
    )


def _line(name: str, digests: dict[int, int]) -> str:
    """Who differs. Of two opinions the rarer one is named first; where they are as many, the higher ranks'."""
    common, count = Counter(digests.values()).most_common(1)[0]
    apart = [rank for rank, digest in digests.items() if digest != common]
    against = [rank for rank, digest in digests.items() if digest == common]
    verdict = "" if len(apart) < count else " (no majority)"
    return f"{name} on rank {_ranks(apart)} against rank {_ranks(against)}{verdict}"


def _ranks(ranks: list[int]) -> str:
    return ", ".join(map(str, ranks[:8])) + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")


def _keys(states: Sequence[UnitState]) -> Iterator[tuple[int, tuple[str, int]]]:
    """Key -> (what it is, hash of its bits) for every part that this rank holds."""
    for shard in shards_of(states):
        for kind, part in parts_of(shard).items():
            extent = shard.extent
            key = f"{shard.name}|{kind}|{extent.box.starts}|{extent.box.stops}|{extent.start}|{extent.stop}"
            words = f"{kind} of {shard.name} (unit {shard.state.name})"
            yield xxhash.xxh3_64_intdigest(key.encode()), (words, _digest(part))


def _digest(part: Tensor) -> int:
    return xxhash.xxh3_64_intdigest(part.detach().contiguous().view(torch.uint8).cpu().numpy().data)


def _gathered(rows: np.ndarray, world: Group, states: Sequence[UnitState]) -> list[np.ndarray]:
    """Every rank's rows [n, 2] of uint64. Numbers of rows differ from rank to rank: they travel with zeros behind."""
    if world.size == 1:
        return [rows]
    device = states[0].weights[0].device
    longest = torch.tensor([len(rows)], device=device)
    world.all_reduce(longest, "max")
    padded = np.zeros((int(longest), 2), np.int64)
    padded[: len(rows)] = rows.view(np.int64)
    gathered = world.all_gather(torch.from_numpy(padded).to(device)).cpu().numpy().view(np.uint64)
    return [each[each.any(axis=1)] for each in gathered]
