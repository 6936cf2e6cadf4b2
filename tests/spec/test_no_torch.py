"""Packages that plan import neither torch nor triton."""

import subprocess
import sys

IMPORT_ALL = """
import importlib, pkgutil, sys
for package in map(importlib.import_module, sys.argv[1:]):
    names = [module.name for module in pkgutil.walk_packages(package.__path__, package.__name__ + ".")]
    assert names, "the package has no module"
    for name in names:
        importlib.import_module(name)
    print(*sorted({"torch", "triton"} & set(sys.modules)), end="")
"""


def test_packages_that_plan_import_no_torch() -> None:
    packages = [f"megapipe.{name}" for name in ("random", "config", "spec", "layout", "planner", "schedules")]
    command = [sys.executable, "-c", IMPORT_ALL, *packages]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
