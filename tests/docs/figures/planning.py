"""The planner's output in docs/planning.md, the README and docs/memory.md, and the layouts of examples/launch.

Commands run as they are written there, in a temporary folder.
"""

import contextlib
import json
import re
import shlex
import tempfile
import textwrap
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import yaml

from megapipe.calibration.commands import run_dry_run
from megapipe.config.command_line import bytes_text, seconds_text
from megapipe.config.load import parse
from megapipe.config.run import PretrainConfig
from megapipe.layout.hardware.description import load_hardware
from megapipe.planner.command.main import main, parse_request
from megapipe.planner.command.planning import config_yaml, layout_text, provenance
from megapipe.planner.recompute import resolved
from megapipe.planner.search.plan import BEST_ALONE, search_speed
from tests.docs.figures import ROOT, Rows, cells, files, printed, read, sentence

PROGRAM = r"(?:python tools/plan\.py|megapipe plan)"
BLOCK = re.compile(rf"```sh\n(?P<command>{PROGRAM} [^\n]+)\n```\n\n```text\n(?P<output>.*?)```", re.DOTALL)
README_LINES = 14
TIMELINE = "predict"
"""Command whose timeline is drawn; the other pictures are the search's."""


def answered(text: str, pictures: Path, most_lines: int | None = None) -> str:
    """Return the text with current outputs. pictures: folder to draw into. most_lines: maximum lines per output."""
    with _folder():
        return BLOCK.sub(lambda block: _answer(block, pictures, most_lines), text)


def _answer(block: re.Match[str], pictures: Path, most_lines: int | None) -> str:
    name, *arguments = shlex.split(block["command"])[2:]
    if name in ("search", TIMELINE):
        arguments += ["--pictures", name]
    text = printed(lambda: main([name, *arguments], {"dry-run": run_dry_run}))
    for each in Path(name).glob("*.svg"):
        if (each.stem == "timeline") == (name == TIMELINE):
            (pictures / each.name).write_text(each.read_text())
    lines = text.splitlines()
    if most_lines is not None and len(lines) > most_lines:
        lines = [*lines[:most_lines], "..."]
    return "\n".join(["```sh", block["command"], "```", "", "```text", *lines, "```"])


@contextlib.contextmanager
def _folder() -> Iterator[None]:
    """Change into a temporary folder that contains only the examples."""
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        Path("examples").symlink_to(ROOT / "examples")
        yield


LAUNCHES = {
    "one_node.sh": "--model llama3_8b --data.sequence_length 8192 --devices 8 --batch.global_size 128",
    "several_nodes.sh": "--model llama2_13b --data.sequence_length 4096 --devices 32 --batch.global_size 1024",
    "slurm.sbatch": "--model llama2_70b --data.sequence_length 4096 --devices 128 --batch.global_size 1024",
}
"""Scripts of examples/launch, each with the search whose best layout it starts."""
MARK = "Layout, written by python -m tests.docs.figures:"
COMMENT = re.compile(rf"# {MARK}\n(?:# [^\n]+\n)*")
FLAGS = re.compile(r"    --(?:layout|parallel)(?:[^\n]*\n)+?(?=    --optimizer)")


def launched(name: str) -> dict[str, str]:
    """Return a script of examples/launch with the planner's layout."""
    flags = f"{LAUNCHES[name]} --hardware a100-80 --training.precision bf16"
    request = parse_request("search", shlex.split(flags))
    hardware = request.hardware()
    best = search_speed(request.config, hardware, request.devices(), request.given, effort=BEST_ALONE).best
    written = yaml.safe_load(config_yaml(best.config))
    groups = {group: written[group] for group in ("parallel", "schedule", "zero", "recompute", "batch")}
    lines = [
        f"    {line} \\\n"
        for group, values in groups.items()
        for line in textwrap.wrap(
            " ".join(f"--{group}.{field}={_flag(value)}" for field, value in values.items()),
            110,
            break_on_hyphens=False,
        )
    ]
    comment = [
        MARK,
        *textwrap.wrap(f"The layout is the answer of megapipe plan search {flags}:", 115, break_on_hyphens=False),
        *textwrap.wrap(
            f"{layout_text(best.config)}. Predicted: {seconds_text(best.estimate.step_seconds)} a step and "
            f"{bytes_text(best.estimate.peak_bytes)} on the fullest GPU; {provenance(hardware)}.",
            115,
            break_on_hyphens=False,
        ),
    ]
    text = read(f"examples/launch/{name}")
    text = COMMENT.sub(lambda match: "".join(f"# {line}\n" for line in comment), text)
    return {f"examples/launch/{name}": FLAGS.sub(lambda match: "".join(lines), text)}


def _flag(value: object) -> str:
    text = json.dumps(value, separators=(",", ":")) if isinstance(value, list | bool) else str(value)
    return f"'{text}'" if isinstance(value, list) else text


@files("output of the planner", "slow")
def guide() -> dict[str, str]:
    """Run the commands of docs/planning.md; two of them draw its pictures."""
    with tempfile.TemporaryDirectory() as folder:
        made = {"docs/planning.md": answered(read("docs/planning.md"), Path(folder))}
        for path in Path(folder).iterdir():
            assert f"(pictures/planning/{path.name})" in made["docs/planning.md"], path.name
            made[f"docs/pictures/planning/{path.name}"] = path.read_text(encoding="utf-8")
    drawn = {name for name in made if name.endswith(".svg")}
    assert drawn == {f"docs/pictures/planning/{path.name}" for path in ROOT.glob("docs/pictures/planning/*")}
    return made


@files("plan in the README", "slow")
def plan_in_the_readme() -> dict[str, str]:
    """Run the README's search; its first lines are shown."""
    with tempfile.TemporaryDirectory() as unused:
        return {"README.md": answered(read("README.md"), Path(unused), README_LINES)}


for _script in LAUNCHES:
    files(f"layout of {_script}", "slow")(partial(launched, _script))


RECOMPUTE_AUTO = r"(?m)^torchrun --nproc_per_node 2 pretrain_gpt.py (.* --recompute.method auto .*)$"


def recompute_auto(*flags: str) -> PretrainConfig:
    """Return the run that the command of docs/memory.md trains."""
    (command,) = re.findall(RECOMPUTE_AUTO, read("docs/memory.md"))
    return parse([*shlex.split(command), *flags])


def chosen(*flags: str) -> str:
    """Return the line that a run prints about its choice."""
    return str(resolved(recompute_auto(*flags), load_hardware("cpu"), 2)[1])


@cells("docs/memory.md", "recomputation within a budget")
def recomputation_within_a_budget() -> Rows:
    for memory in ("0.07", "0.065", "0.06", "0.055", "0.05", "0.04"):
        match = re.match(
            r"recompute auto: (.*): at most ([\d.]+) GiB of tensors per rank", chosen("--recompute.memory", memory)
        )
        assert match is not None
        yield memory, match.groups()


@sentence("docs/memory.md", "choice of recomputation", r"(?m)^(recompute auto: .*)$")
def choice_of_recomputation() -> list[str]:
    return [chosen()]
