"""The pages on moving from other programs have the map that errors use, and commands that start."""

from pathlib import Path

import pytest

from tests.config.migration_tables import PAGES, parts, table
from tests.support.commands import blocks, run


@pytest.mark.parametrize("program", PAGES)
def test_tables_are_the_map_that_errors_use(program: str) -> None:
    assert parts(program)[1].strip() == table(program)


@pytest.mark.slow
@pytest.mark.parametrize("program", PAGES)
def test_commands_of_the_pages_run(program: str, tmp_path: Path) -> None:
    for block in blocks("".join(parts(program))):
        if block.language == "sh" and not block.needs:
            assert "parameters of a rank" in run(block.text, 60.0, tmp_path)
