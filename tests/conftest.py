"""Settings of the whole test suite."""

import os
import signal

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


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest begin first, so that no worker is left alone with them; tests marked `gpu` say why they do not run
    where there is none."""
    items.sort(key=lambda item: item.get_closest_marker("longest") is None)
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs an NVIDIA GPU"))
