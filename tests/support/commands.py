"""The shell commands of a Markdown page, and a way to run them as a reader does."""

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
NEEDS = (
    "needs GPUs",
    "needs several machines",
    "needs a network",
    "needs docker",
    "needs the CUDA toolkit",
    "needs half an hour",
    "needs old revisions",
)
"""The possible markers before a block of commands."""
_FENCE = re.compile(r"(?:<!-- (needs [\w ]+) -->\n+)?```(\w*)\n(.*?)```", re.DOTALL)


class Block(NamedTuple):
    """A fenced block. needs: what the marker before it says is needed to run it, or empty."""

    needs: str
    language: str
    text: str


def blocks(page: str) -> list[Block]:
    """Return the fenced blocks of a page in order."""
    return [Block(*match) for match in _FENCE.findall(page)]


def command_lines(page: str) -> list[str]:
    """Return the lines of a page's shell blocks, for pages in which every line is a command."""
    shell = [block.text for block in blocks(page) if block.language == "sh"]
    return [line for text in shell for line in text.splitlines() if line.strip()]


def run(command: str, timeout: float, folder: Path = ROOT, **variables: str) -> str:
    """Run commands up to the first that fails, with this environment's programs first on the PATH.

    Returns the standard output. Raises AssertionError if a command fails.
    """
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "OMP_NUM_THREADS": "1", **variables}
    finished = subprocess.run(
        f"set -e\n{command}",
        shell=True,
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
    assert finished.returncode == 0, f"{command}\n{finished.stdout[-3000:]}\n{finished.stderr[-3000:]}"
    return finished.stdout
