"""The names of `import megapipe`: imported when used, documented, and their examples run."""

import doctest

import pytest

import megapipe
from megapipe.schedules.registry import GENERATORS
from tests.support.commands import run


@pytest.mark.parametrize("name", megapipe.__all__)
def test_every_public_name_has_an_example_that_runs(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(GENERATORS, "_registered", {each.name: each for each in GENERATORS.registered()})
    thing = getattr(megapipe, name)
    tests = [each for each in doctest.DocTestFinder(recurse=False).find(thing, name) if each.examples]
    assert tests, f"megapipe.{name} has no example in its docstring"
    assert sum(doctest.DocTestRunner().run(each).failed for each in tests) == 0


def test_importing_the_package_imports_nothing_else() -> None:
    program = (
        "import sys, megapipe; before = {m for m in sys.modules if m.startswith(('megapipe.', 'torch', 'numpy'))}; "
        "megapipe.build, megapipe.simulate, megapipe.search_speed, megapipe.parse, megapipe.LayoutTable; "
        "print(sorted(before), 'torch' in sys.modules)"
    )
    assert run(f'python -c "{program}"', 60) == "[] False\n"


def test_an_unknown_name_is_named() -> None:
    with pytest.raises(AttributeError, match="module 'megapipe' has no attribute 'Pipelin'; its names are"):
        megapipe.Pipelin  # noqa: B018
