"""Which modules the product has, and what training imports."""

import functools
import re

from tests.architecture.imports import imports, reachable
from tests.architecture.source import Source, product, working_tree

ENTRY_POINTS = ("pretrain_gpt.py", "pretrain_bert.py", "tools", "examples")
"""Programs; the examples are those of the library."""
STARTED_BY_NAME = ("megapipe.__main__", "megapipe.kernels.cuda_backend.build")
"""The console script, and what setup.py runs."""

NO_ENTRY_POINT = {
    "megapipe.planner.pipedream.partition": "PipeDream's partitioners, to compare with a search over layouts",
    "megapipe.planner.pipedream.transformer": "the models of 2BW's paper, for the paper's best depths",
}
"""Modules that no entry point imports, and why they stay. Nothing may be added."""

TRAINING_MODULES = 448
TRAINING_PLANNER_MODULES = 57
"""What `import megapipe.training.pretrain` loads of megapipe, and of that of the planner. May only go down."""


@functools.cache
def modules() -> dict[str, Source]:
    return {source.module: source for source in product()}


def test_every_module_is_reachable_from_an_entry_point() -> None:
    programs = [name for source in working_tree(*ENTRY_POINTS) for name in imports(modules(), source)]
    unreachable = modules().keys() - reachable(modules(), [*STARTED_BY_NAME, *programs])
    assert unreachable <= NO_ENTRY_POINT.keys()


def test_imported_modules_exist() -> None:
    """Also those of tests that need a GPU, or Triton's interpreter, and so are not always collected."""
    importers = [*product(), *working_tree("tests", "benchmarks", *ENTRY_POINTS)]
    imported = {
        (source.path, name)
        for source in importers
        for name in re.findall(r"^\s*from (megapipe[\w.]*) import", source.text, re.MULTILINE)
    }
    assert {(path, name) for path, name in imported if name not in modules()} == set()


def test_training_imports_no_more_modules_than_before() -> None:
    loaded = reachable(modules(), ["megapipe.training.pretrain"], at_once=True)
    planner = {name for name in loaded if name.startswith("megapipe.planner")}
    assert len(loaded) <= TRAINING_MODULES
    assert len(planner) <= TRAINING_PLANNER_MODULES, sorted(planner)
