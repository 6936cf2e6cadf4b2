"""The installed packages that megapipe depends on. `python -m tests.packaging.environment` prints constraints.txt."""

import contextlib
import io
import platform
import runpy
from collections.abc import Iterable
from importlib.metadata import Distribution, distribution
from pathlib import Path
from typing import Any
from unittest import mock

import setuptools
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).resolve().parents[2]
CONSTRAINTS = ROOT / "constraints.txt"
EXTRAS = ("hf", "test")
"""Extras that the tests have installed."""

HEADER = f"""\
# Written by `make constraints`: all packages that the tests pass with (Python {platform.python_version()}, no GPU).
# Where there is a GPU, the Makefile leaves torch to pip, because its version depends on CUDA. triton is not pinned,
# because each build of torch needs its own version of it.
"""


def setup_arguments() -> dict[str, Any]:
    """Return the arguments that setup.py gives to `setuptools.setup`."""
    quiet = contextlib.redirect_stdout(io.StringIO())
    with contextlib.chdir(ROOT), mock.patch.object(setuptools, "setup") as setup, quiet:
        runpy.run_path("setup.py")
    return dict(setup.call_args.kwargs)


def closure(requirements: Iterable[str]) -> dict[str, Distribution]:
    """Return the installed packages that requirements need, and those that these need, by canonical name.

    Raises:
        PackageNotFoundError: one of them is not installed.
        AssertionError: one is installed in a version that a requirement excludes.
    """
    waiting = [(Requirement(each), "") for each in requirements]
    done: set[tuple[str, str]] = set()
    needed: dict[str, Distribution] = {}
    while waiting:
        requirement, extra = waiting.pop()
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": extra}):
            continue
        name = canonicalize_name(requirement.name)
        needed[name] = distribution(requirement.name)
        assert requirement.specifier.contains(needed[name].version, prereleases=True), requirement
        for wanted in {"", *requirement.extras}:
            if (name, wanted) not in done:
                done.add((name, wanted))
                waiting += [(Requirement(each), wanted) for each in needed[name].requires or ()]
    return needed


def constraints() -> str:
    """Return the content of constraints.txt for this environment."""
    arguments = setup_arguments()
    extras = [each for extra in EXTRAS for each in arguments["extras_require"][extra]]
    needed = closure([*arguments["install_requires"], *extras])
    del needed["triton"]
    return HEADER + "".join(f"{name}=={Version(each.version).public}\n" for name, each in sorted(needed.items()))


if __name__ == "__main__":
    print(constraints(), end="")
