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

# A shell starts background jobs with SIGINT ignored, nohup with SIGHUP ignored; child programs inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)

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


FAST_EXAMPLES = 0.3
"""Share of a property's examples that the fast and slow tiers run; the exhaustive one runs all of them."""
FEWEST_EXAMPLES = 6


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The prefix of a small shard, which tests only read."""
    from tests.support.gpt_runs import write_shard  # imports most packages, which tests without it need not wait for

    return write_shard(tmp_path_factory.mktemp("corpus"))


@pytest.fixture
def without_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave out the loss curve, which takes longer to draw than a few steps of a tiny model."""
    monkeypatch.setattr("megapipe.training.observe.metrics.draw_loss_curves", lambda *_, **__: None)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--part", metavar="K/N", help="run part K (counted from 0) of N equal parts of the chosen tests")
    parser.addoption("--all-examples", action="store_true", help="run every example of property tests, not a share")


def place(test: pytest.Item) -> int:
    """A number that depends on a test's name alone, so that parts and samples never shift."""
    return zlib.crc32(test.nodeid.encode())


@pytest.hookimpl(tryfirst=True)
def pytest_itemcollected(item: pytest.Item) -> None:
    """Give a property the share of its examples that the tier runs."""
    test = getattr(item, "obj", None)
    if not getattr(test, "is_hypothesis_test", False) or item.config.option.all_examples:
        return
    test = getattr(test, "__func__", test)
    if not hasattr(test, "megapipe_examples"):
        chosen = test._hypothesis_internal_use_settings
        test.megapipe_examples = chosen.max_examples
        share = max(min(FEWEST_EXAMPLES, chosen.max_examples), round(FAST_EXAMPLES * chosen.max_examples))
        test._hypothesis_internal_use_settings = settings(chosen, max_examples=share)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Start the longest tests first, so that no worker is left alone with them; make all but one in N cases of a test
    marked `one_in(N)` exhaustive; skip tests marked `gpu` where there is no GPU."""
    items.sort(key=lambda item: item.get_closest_marker("longest") is None)
    cases: dict[str, list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("one_in"):
            cases.setdefault(item.nodeid.split("[")[0], []).append(item)
    for test in cases.values():
        mark = test[0].get_closest_marker("one_in")
        assert mark is not None
        for item in sorted(test, key=place)[-(-len(test) // mark.args[0]) :]:
            item.add_marker(pytest.mark.exhaustive)
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs an NVIDIA GPU"))


class Part:
    """Keeps one part of the tests that all other options have chosen."""

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        part, parts = (int(number) for number in config.option.part.split("/"))
        config.hook.pytest_deselected(items=[item for item in items if place(item) % parts != part])
        items[:] = [item for item in items if place(item) % parts == part]


def pytest_configure(config: pytest.Config) -> None:
    if config.option.part is not None:
        config.pluginmanager.register(Part())
