"""The source distribution and the wheel hold all that a user needs: every program runs without the repository."""

import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tarfile
import venv
import zipfile
from email import message_from_bytes
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import pytest
import torch

from megapipe import __version__
from tests.packaging.environment import CONSTRAINTS, ROOT, closure, constraints, setup_arguments

NEWCOMERS_COMMANDS = 15
"""Commands, the installation among them, after which a newcomer sees generated text."""
NO_SOURCES = {".venv", ".git", "build", "runs", "data", "tests", "benchmarks", "shared"}


def pinned(text: str) -> dict[str, str]:
    """Return the versions of constraints by package."""
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    return dict(line.split("==") for line in lines)


def test_constraints_pin_this_environment() -> None:
    written = CONSTRAINTS.read_text()
    python = ".".join(platform.python_version_tuple()[:2])
    if f"(Python {python}." not in written or torch.version.cuda is not None:
        pytest.skip("constraints.txt is of another Python version, or leaves torch to CUDA")
    assert pinned(constraints()) == pinned(written), "if the tests pass in this environment, run `make constraints`"


def output_of(command: str | list[str], **options: Any) -> str:
    """Run a command to its end without the variables that lead Python to the sources, and return what it prints."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    environment |= {"OMP_NUM_THREADS": "1", **options.pop("env", {})}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, **options)
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def build(hook: str, source: Path, output: Path) -> Path:
    """Run a hook of the build back end in a folder of sources, and return the file that it writes."""
    output.mkdir(exist_ok=True)
    program = f"from setuptools import build_meta; print('built', build_meta.{hook}({str(output)!r}))"
    return output / output_of([sys.executable, "-W", "ignore", "-c", program], cwd=source).split()[-1]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built from the unpacked source distribution."""
    folder = tmp_path_factory.mktemp("built")
    sources = folder / "sources"
    shutil.copytree(
        ROOT,
        sources,
        symlinks=True,
        ignore=lambda path, names: {
            name for name in names if name.endswith(".egg-info") or (path == str(ROOT) and name in NO_SOURCES)
        },
    )
    archive = build("build_sdist", sources, folder / "sdist")
    with tarfile.open(archive) as file:
        file.extractall(folder / "unpacked", filter="data")
    (unpacked,) = (folder / "unpacked").iterdir()
    return build("build_wheel", unpacked, folder / "wheel")


@pytest.mark.slow
def test_the_wheel_has_all_modules_examples_and_metadata(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as file:
        names = set(file.namelist())
        metadata = message_from_bytes(file.read(f"megapipe-{__version__}.dist-info/METADATA"))
    folders = {"megapipe": "megapipe", "kernels": "megapipe/kernels", "examples": "megapipe/examples"}
    sources = {
        f"{target}/{path.relative_to(ROOT / folder)}"
        for folder, target in folders.items()
        for path in (ROOT / folder).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts and path.suffix not in (".so", ".cubin")
    }
    guides = {f"megapipe/{page.relative_to(ROOT)}" for page in (ROOT / "docs").rglob("*.md")}
    sources |= {name for name in guides if not name.startswith(("megapipe/docs/reference/", "megapipe/docs/project/"))}
    assert {name for name in names if name.startswith("megapipe/")} == sources
    assert not {name.partition("/")[0] for name in names} - {"megapipe", f"megapipe-{__version__}.dist-info"}
    assert metadata["Version"] == __version__
    assert metadata["License-File"] == "LICENSE"
    assert metadata["Description-Content-Type"] == "text/markdown"
    assert metadata.get_payload().startswith("# megapipe")
    assert "Programming Language :: Python :: 3.13" in metadata.get_all("Classifier")


@pytest.fixture(scope="module")
def programs(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The programs of an environment that has the wheel and the packages that it names, in the pinned versions.

    These packages are links to those of this environment, because installing them would take minutes. Test tools are
    not among them.
    """
    folder = tmp_path_factory.mktemp("empty") / "environment"
    venv.create(folder, with_pip=False, symlinks=True)
    (packages,) = folder.glob("lib/python*/site-packages")
    for distribution in closure(setup_arguments()["install_requires"]).values():
        tops = {file.parts[0] for file in distribution.files or () if not file.is_absolute()}
        for top in tops - {"..", "__pycache__"}:
            if not (packages / top).exists():
                (packages / top).symlink_to(str(distribution.locate_file(top)))
    pip = [sys.executable, "-m", "pip", "--isolated", "--python", str(folder / "bin" / "python")]
    output_of([*pip, "install", "--no-index", "-c", str(CONSTRAINTS), str(wheel)])
    return folder / "bin"


@pytest.mark.slow
def test_an_installed_wheel_trains_generates_plans_and_converts(programs: Path, tmp_path: Path) -> None:
    """In an empty folder, with one process: `train -n 2` is what the tests of the launcher start."""
    line = json.dumps({"text": "To be, or not to be, that is the question. " * 10})
    (tmp_path / "text.jsonl").write_text(f"{line}\n" * 40)

    def run(command: str) -> str:
        return output_of([str(programs / "megapipe"), *command.split()], cwd=tmp_path)

    assert run("--version") == f"megapipe {__version__}\n"
    explained = " ".join(run("help parallel.tensor").split())
    assert "--config three_d (2)" in explained
    assert "docs/parallelism.md" in explained
    (packages,) = programs.parent.glob("lib/python*/site-packages")
    assert f"(in {packages}/megapipe)" in explained
    assert (packages / "megapipe/docs/parallelism.md").is_file()
    run("preprocess --input text.jsonl --output-prefix corpus --tokenizer bytes --append-eod")
    data = "--data.prefix corpus_text_document"
    size = "--model.num_layers 1 --model.hidden_size 32 --batch.global_size 4 --training.steps 3"
    assert "finished after step 3/3" in run(f"train --config quickstart {data} {size} --training.precision fp32")
    assert run("generate --checkpoint runs/quickstart --prompt Z --max-new-tokens 4 --temperature 0").startswith("Z")
    run("convert convert runs/quickstart --to hf exported")
    assert (tmp_path / "exported/model.safetensors").is_file()
    assert "layouts" in run(
        "plan search --model llama3_8b --data.sequence_length 8192 --hardware h100 --devices 8 --batch.global_size 64"
    )
    assert "rank 0" in run("schedule show --schedule 1f1b --ranks 2 --microbatches 4")


@pytest.mark.slow
def test_the_readme_leads_to_text_from_own_data(programs: Path, tmp_path: Path) -> None:
    """With the commands of one section, which names no other page; shorter, and after `pip install`."""
    section = (ROOT / "README.md").read_text().partition("### Your own text\n")[2].partition("\n### ")[0]
    commands = re.findall(r"```sh\n(.*?)```", section, re.DOTALL)[0].splitlines()
    assert 1 + len(commands) <= NEWCOMERS_COMMANDS
    assert "](" not in section
    (tmp_path / "texts").mkdir()
    for number, text in enumerate(topics.values()):
        (tmp_path / f"texts/{number}.txt").write_text(text)
    (tmp_path / "texts/more.jsonl").write_text(json.dumps({"text": "One more document."}) + "\n")
    variables = {"PATH": f"{programs}{os.pathsep}{os.environ['PATH']}"}
    for command in commands:
        short = " --training.steps 6" if command.startswith("megapipe train ") else ""
        output = output_of(command + short, shell=True, cwd=tmp_path, env=variables)
    prompt = re.search(r'--prompt "(.*?)"', commands[-1])
    assert prompt is not None
    assert output.startswith(prompt[1])
    assert len(output.split()) > 10
