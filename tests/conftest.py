"""Settings of the whole test suite."""

import os
import signal
import zlib

import pytest
import torch
from hypothesis import HealthCheck, settings

# One thread a rank, and in this process too: another number of threads sums in another order, so in other bits.
os.environ["OMP_NUM_THREADS"] = "1"
torch.set_num_threads(1)

# A shell starts what runs behind it with Ctrl-C ignored, which programs that tests start would inherit.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# No deadline: an example's first run imports and compiles, and the cores are shared with other ranks.
# The same examples every time: a change is judged by what it changes. `pytest --hypothesis-profile=thorough` looks for
# new ones.
settings.register_profile(
    "default",
    max_examples=50,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow],
    print_blob=True,
)
settings.register_profile("thorough", parent=settings.get_profile("default"), max_examples=1000, derandomize=False)
settings.load_profile("default")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--part", metavar="K/N", help="run part K (counted from 0) of N equal parts of the chosen tests")


def part_of(test: str, parts: int) -> int:
    """The part that a test belongs to: a function of its name alone, so that parts never shift or overlap."""
    return zlib.crc32(test.encode()) % parts


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Start the longest tests first, so that no worker is left alone with them; keep one part where `--part` asks for
    one; skip tests marked `gpu` where there is no GPU."""
    items.sort(key=lambda item: item.get_closest_marker("longest") is None)
    if config.option.part is not None:
        part, parts = (int(number) for number in config.option.part.split("/"))
        others = [item for item in items if part_of(item.nodeid, parts) != part]
        config.hook.pytest_deselected(items=others)
        items[:] = [item for item in items if part_of(item.nodeid, parts) == part]
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs an NVIDIA GPU"))
