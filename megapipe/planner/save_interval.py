"""How often a run that may fail at any time should save."""

import math


def save_interval(save_seconds: float, seconds_between_failures: float) -> float:
    """Seconds of training between saves that lose least to saving and to work done twice: sqrt(2 C M).

    Young, "A first order approximation to the optimum checkpoint interval" (Communications of the ACM, 1974); Daly
    2006 (Future Generation Computer Systems 22) shows it to be the first term of the exact one, good where saving
    takes much less than the time between failures.

    Args:
        save_seconds: what a save adds to the training time, C.
        seconds_between_failures: mean, of the whole job, M.

    Raises:
        ValueError: either is not above 0.
    """
    if save_seconds <= 0 or seconds_between_failures <= 0:
        raise ValueError(
            f"a save takes {save_seconds} s and failures are {seconds_between_failures} s apart; both must be above 0"
        )
    return math.sqrt(2 * save_seconds * seconds_between_failures)


def lost_share(interval_seconds: float, save_seconds: float, seconds_between_failures: float) -> float:
    """Share of the training time that saves every `interval_seconds` and half an interval a failure take, to first
    order. Arguments as in `save_interval`."""
    return save_seconds / interval_seconds + interval_seconds / (2 * seconds_between_failures)
