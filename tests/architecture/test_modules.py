"""Which modules the product has, and what training imports."""

import functools
import pickle
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.architecture.imports import imports, reachable
from tests.architecture.source import Source, product, working_tree
from tests.support.gpt_runs import GPT2_SHAPE, make_config, write_shard

ENTRY_POINTS = ("pretrain_gpt.py", "pretrain_bert.py", "tools", "examples")
"""Programs; the examples are those of the library."""
STARTED_BY_NAME = ("megapipe.__main__", "megapipe.kernels.cuda_backend.build")
"""The console script, and what setup.py runs."""

IMPORT = re.compile(r"^[ \t]*from (megapipe[\w.]*) import (\([^)]*\)|[^\n]*)", re.MULTILINE)

TRAINING_MODULES = 300
TRAINING_PLANNER_MODULES = 0
"""Modules of megapipe, and of its planner, that `import megapipe.training.pretrain` loads. May only go down."""
TRAINED_MODULES = 300
"""Modules of megapipe in a process after one step of a GPT on one device. May only go down."""

TRAIN_AND_COUNT = """
import pickle, sys
from megapipe.parallel.launch import LaunchEnvironment
from megapipe.training.pretrain import pretrain
assert pretrain(pickle.load(sys.stdin.buffer), LaunchEnvironment()) == 0
print(sum(name.split(".")[0] == "megapipe" for name in sys.modules))
"""


@functools.cache
def modules() -> dict[str, Source]:
    return {source.module: source for source in product()}


def test_every_module_is_reachable_from_an_entry_point() -> None:
    programs = [name for source in working_tree(*ENTRY_POINTS) for name in imports(modules(), source)]
    unreachable = modules().keys() - reachable(modules(), [*STARTED_BY_NAME, *programs])
    assert unreachable == set()


def test_imported_names_exist() -> None:
    """Also those of benchmarks, and of tests that need a GPU or Triton's interpreter: not every run imports them."""
    importers = [*product(), *working_tree("tests", "benchmarks", *ENTRY_POINTS)]
    broken = [
        (source.path, module, name)
        for source in importers
        for module, names in re.findall(IMPORT, source.text)
        for name in re.findall(r"(\w+)(?: as \w+)?", re.sub(r"#.*", "", names))
    ]
    missing = [each for each in broken if not exists(*each[1:])]
    assert missing == []


def exists(module: str, name: str) -> bool:
    """Whether a module has a submodule of this name, or the word in its text."""
    return f"{module}.{name}" in modules() or (module in modules() and name in words_of(module))


@functools.cache
def words_of(module: str) -> set[str]:
    return set(re.findall(r"\w+", modules()[module].text))


def test_training_imports_no_more_modules_than_before() -> None:
    loaded = reachable(modules(), ["megapipe.training.pretrain"], at_once=True)
    planner = {name for name in loaded if name.startswith("megapipe.planner")}
    assert len(loaded) <= TRAINING_MODULES
    assert len(planner) <= TRAINING_PLANNER_MODULES, sorted(planner)


@pytest.mark.slow
def test_a_training_step_loads_no_more_modules_than_before(tmp_path: Path) -> None:
    config = make_config(
        write_shard(tmp_path),
        GPT2_SHAPE,
        parallel={"device": "cpu"},
        training={"steps": 1, "directory": str(tmp_path / "run")},
    )
    command = [sys.executable, "-c", TRAIN_AND_COUNT]
    done = subprocess.run(command, input=pickle.dumps(config), capture_output=True, check=True, timeout=120)
    assert int(done.stdout.split()[-1]) <= TRAINED_MODULES
