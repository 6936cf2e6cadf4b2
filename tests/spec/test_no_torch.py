import subprocess
import sys

import pytest

IMPORT_ALL = """
import importlib, pkgutil, sys
package = importlib.import_module(sys.argv[1])
names = [module.name for module in pkgutil.walk_packages(package.__path__, package.__name__ + ".")]
for name in names:
    importlib.import_module(name)
assert names, "the package holds no module"
print(*sorted({"torch", "triton"} & set(sys.modules)))
"""


@pytest.mark.parametrize("room", ["config", "random", "spec", "layout", "planner"])
def test_a_room_that_thinks_imports_no_torch(room: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", IMPORT_ALL, f"megapipe.{room}"], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == ""
