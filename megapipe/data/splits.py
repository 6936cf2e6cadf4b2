"""Training, validation and test documents: contiguous ranges by share."""

import math
from itertools import accumulate
from typing import Literal, get_args

from megapipe.data.errors import DataError

SplitName = Literal["train", "validation", "test"]
SPLIT_NAMES: tuple[SplitName, ...] = get_args(SplitName)


def parse_shares(text: str) -> tuple[float, float, float]:
    """Shares that add up to 1 from "949,50,1" (train, validation, test; missing ones are 0).

    Raises DataError for anything else than one to three numbers, none negative, not all zero.
    """
    try:
        shares = [float(part) for part in text.split(",")]
    except ValueError:
        shares = []
    valid = 1 <= len(shares) <= 3 and all(math.isfinite(share) and share >= 0 for share in shares) and sum(shares) > 0
    if not valid:
        raise DataError(
            f"split is {text!r}; it must be one to three numbers, the shares of {', '.join(SPLIT_NAMES)}, for example "
            "949,50,1"
        )
    total = sum(shares)
    train, validation, test = [share / total for share in shares] + [0.0] * (3 - len(shares))
    return train, validation, test


def split_documents(num_documents: int, shares: str) -> dict[SplitName, range]:
    """Contiguous document ranges of the three splits, bounds rounded as in Megatron-LM: round(share so far * n).

    A range may be empty; whoever needs samples from it says so.
    """
    ends = [min(num_documents, round(share * num_documents)) for share in accumulate(parse_shares(shares))]
    starts = [0, *ends[:-1]]
    return {name: range(start, end) for name, start, end in zip(SPLIT_NAMES, starts, ends, strict=True)}
