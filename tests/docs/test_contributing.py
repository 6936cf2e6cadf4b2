"""The lists in CONTRIBUTING.md are complete: each kind is added to a copy of the repository and used there."""

import re
import shlex
import shutil
from pathlib import Path

import pytest

from tests.support.commands import ROOT, run

ADDITIONS = Path(__file__).with_name("additions")
"""One file per kind. `=== PATH` starts the changes of a file. A change is a line `@@@`, the lines to replace, a line
`+++`, and the new lines; without lines to replace, it appends, or makes the file. The last file is a test that uses
what was added; if it is not a test, `CASES` are the tests that include it by its name."""
CASES = {
    "schedule": ("tests/schedules", "tests/planner/search", "tests/planner/cost"),
    "model family": ("tests/models/test_families.py", "tests/conversion/test_round_trips.py"),
}
ROWS = {
    kind: (int(number), re.findall(r"`([\w/]+\.py)`", files))
    for kind, number, files in re.findall(
        r"^\| an? ([^|]+) \| (\d) \| ([^|]+) \|", (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8"), re.MULTILINE
    )
}


def copy_repository(folder: Path) -> None:
    """Copy the files that git knows, with links as links."""
    for name in run("git ls-files -z", 60).split("\0"):
        if name and (ROOT / name).exists():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / name, follow_symlinks=False)


def apply(addition: str, folder: Path) -> list[str]:
    """Change the files of a copy, and return their paths."""
    paths = []
    for block in re.split(r"^=== ", addition, flags=re.MULTILINE)[1:]:
        path, _, changes = block.partition("\n")
        text = (folder / path).read_text(encoding="utf-8") if (folder / path).exists() else ""
        for change in changes.split("@@@\n")[1:]:
            before, _, after = change.partition("+++\n")
            assert not before or text.count(before) == 1, f"{path}: {before}"
            text = text.replace(before, after) if before else f"{text}\n\n{after}".lstrip()
        (folder / path).write_text(text, encoding="utf-8")
        paths.append(path)
    return paths


def test_every_row_has_an_addition() -> None:
    assert {kind.replace(" ", "_") for kind in ROWS} == {path.stem for path in ADDITIONS.iterdir()}


@pytest.mark.slow
@pytest.mark.one_in(4)
@pytest.mark.parametrize("kind", ROWS)
def test_listed_files_suffice(kind: str, tmp_path: Path) -> None:
    number, files = ROWS[kind]
    copy_repository(tmp_path)
    addition = (ADDITIONS / f"{kind.replace(' ', '_')}.txt").read_text(encoding="utf-8")
    changed = apply(addition, tmp_path)
    assert changed == files
    assert len(changed) == number
    names = re.findall(r"^def (test_new_\w+)", addition, re.MULTILINE)
    tests = [f"{files[-1]}::{name}" for name in names] or [*CASES[kind], "-k", Path(files[0]).stem]
    command = f"python -m pytest -q -x -p no:cacheprovider {shlex.join(tests)}"
    run(command, 240, tmp_path, PYTHONPATH=str(tmp_path), PYTHONDONTWRITEBYTECODE="1")
