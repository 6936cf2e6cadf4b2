"""Numbers as people read them."""

HOUR = 3600.0
DAY = 86400.0


def bytes_told(count: float) -> str:
    """`18.3 GB`, in powers of 1000 as memory is sold."""
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if abs(count) >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count:.0f} B"


def count_told(count: float) -> str:
    """`20.3B`, `124M`."""
    for unit, size in (("T", 1e12), ("B", 1e9), ("M", 1e6)):
        if count >= size:
            return f"{count / size:.3g}{unit}" if count < 1000 * size else f"{count / size:,.0f}{unit}"
    return f"{count:,.0f}"


def seconds_told(seconds: float) -> str:
    """`2.31 s`, `41.0 ms`, `180 us`: three figures."""
    if seconds >= 1000:
        return f"{seconds:,.0f} s"
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if seconds >= size:
            return f"{seconds / size:#.3g}".rstrip(".") + f" {unit}"
    return "0" if seconds == 0 else f"{seconds * 1e6:.2g} us"


def duration_told(seconds: float) -> str:
    """`34.0 days`, `2.5 hours`, `41 minutes`, or seconds."""
    for unit, size in (("days", DAY), ("hours", 3600.0), ("minutes", 60.0)):
        if seconds >= 2 * size:
            return f"{seconds / size:,.1f} {unit}"
    return seconds_told(seconds)
