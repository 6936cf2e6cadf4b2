"""Every shell command of the documentation is run by a test, or needs what the tests' machines may not have."""

import re
from pathlib import Path

import pytest

from tests.support.commands import NEEDS, ROOT, blocks, run

PAGES = {
    str(path.relative_to(ROOT / "docs")): path.read_text(encoding="utf-8")
    for path in sorted((ROOT / "docs").glob("**/*.md"))
}
RUN_HERE = ("conversion_foreign.md", "kernels.md", "context_parallel.md", "memory.md", "offload.md", "schedules.md")
"""Pages whose commands this file runs. Training takes two steps."""
RUN_BY = {
    "bert.md": "tests/test_readme.py",
    "conversion.md": "tests/conversion/test_command.py",
    "data.md": "tests/docs/test_pages.py",
    "generation.md": "tests/inference/test_generate_command.py",
    "migrate/megatron_lm.md": "tests/docs/test_pages.py",
    "migrate/nanogpt.md": "tests/docs/test_pages.py",
    "migrate/torchtitan.md": "tests/docs/test_pages.py",
    "parallelism.md": "tests/test_examples.py",
    "planning.md": "tests/docs/test_figures.py",
}
"""Pages whose commands another test runs, or checks as runs that can start."""


def commands(page: str) -> list[str]:
    """Return the commands of a page that are not marked, each on one line."""
    text = "".join(block.text for block in blocks(page) if block.language in ("sh", "bash") and not block.needs)
    return [line for line in re.sub(r"\\\n\s*", " ", text).splitlines() if line.strip() and not line.startswith("#")]


def test_every_command_is_run_or_marked() -> None:
    pages = {name for name, text in PAGES.items() if commands(text)}
    assert {name for name in pages if not name.startswith("tutorials/")} == {*RUN_HERE, *RUN_BY}, (
        "run the commands in a test and name it here, or put a line such as <!-- needs GPUs --> before the block"
    )
    assert all((ROOT / path).is_file() for path in RUN_BY.values())
    needs = {block.needs for text in PAGES.values() for block in blocks(text)}
    assert needs <= {"", *NEEDS}


@pytest.mark.exhaustive
@pytest.mark.parametrize("page", RUN_HERE)
def test_commands_run(page: str, tmp_path: Path) -> None:
    """In a folder with the programs of the repository; the pages name its files by relative paths."""
    for name in ("examples", "tools", "megapipe", "kernels", "pretrain_gpt.py"):
        (tmp_path / name).symlink_to(ROOT / name)
    lines = commands(PAGES[page])
    assert lines
    if any("pretrain_gpt.py" in line for line in lines) or "runs/quickstart" in PAGES[page]:
        shard = "python tools/preprocess.py --input python-stdlib --tokenizer bytes --append-eod"
        run(f"{shard} --output-prefix data/stdlib", 240, tmp_path)
    if "runs/quickstart" in PAGES[page]:
        train = "python pretrain_gpt.py --config examples/gpt_tiny.yaml --training.directory runs/quickstart"
        run(f"{train} --training.steps 1", 240, tmp_path)
    for line in lines:
        run(f"{line} --training.steps 2" if "pretrain_gpt.py" in line else line, 300, tmp_path)
