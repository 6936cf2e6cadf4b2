"""Schedules think without torch."""

import subprocess
import sys


def test_schedules_import_no_torch():
    program = "import sys, megapipe.schedules; print([m for m in ('torch', 'triton') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"
