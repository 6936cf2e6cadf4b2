"""Importing the training programs does not import slow modules."""

import subprocess
import sys

import pytest


@pytest.mark.slow
def test_compiler_and_triton_are_imported_on_demand() -> None:
    # Seconds for every rank; and Triton reads TRITON_INTERPRET when it is first imported.
    program = (
        "import sys, megapipe.training.pretrain, megapipe.training.loop.replica; "
        "print([m for m in ('torch._dynamo', 'triton') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
