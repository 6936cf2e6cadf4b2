"""Write the planner's output into docs/planning.md, the README and the layouts of examples/launch:
``python -m tests.planner.command.redraw``.

Commands run as written there, in a temporary folder.
"""

import contextlib
import io
import json
import os
import re
import shlex
import tempfile
import textwrap
from collections.abc import Iterator
from pathlib import Path

import yaml

from megapipe.calibration.commands import run_dry_run
from megapipe.config.words import bytes_told, seconds_told
from megapipe.planner.command.arguments import parse_request
from megapipe.planner.command.launch import config_yaml
from megapipe.planner.command.main import main
from megapipe.planner.command.planning import provenance
from megapipe.planner.report.words import layout_told
from megapipe.planner.search.plan import BEST_ALONE, search_speed
from tests.planner.command.plan import ROOT

LAUNCH = ROOT / "examples" / "launch"
GUIDE = ROOT / "docs" / "planning.md"
README = ROOT / "README.md"
PICTURES = ROOT / "docs" / "pictures" / "planning"
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
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        status = main([name, *arguments], {"dry-run": run_dry_run})
    assert status == 0, block["command"]
    for each in Path(name).glob("*.svg"):
        if (each.stem == "timeline") == (name == TIMELINE):
            (pictures / each.name).write_text(each.read_text())
    lines = printed.getvalue().splitlines()
    if most_lines is not None and len(lines) > most_lines:
        lines = [*lines[:most_lines], "..."]
    return "\n".join(["```sh", block["command"], "```", "", "```text", *lines, "```"])


@contextlib.contextmanager
def _folder() -> Iterator[None]:
    """Change into a temporary folder that contains only the examples."""
    before = Path.cwd()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        Path("examples").symlink_to(ROOT / "examples")
        try:
            yield
        finally:
            os.chdir(before)


LAUNCHES = {
    "one_node.sh": "--model llama3_8b --data.sequence_length 8192 --devices 8 --batch.global_size 128",
    "several_nodes.sh": "--model llama2_13b --data.sequence_length 4096 --devices 32 --batch.global_size 1024",
    "slurm.sbatch": "--model llama2_70b --data.sequence_length 4096 --devices 128 --batch.global_size 1024",
}
"""Scripts of examples/launch, each with the search whose best layout it starts."""
MARK = "Layout, written by python -m tests.planner.command.redraw:"
COMMENT = re.compile(rf"# {MARK}\n(?:# [^\n]+\n)*")
FLAGS = re.compile(r"    --(?:layout|parallel)(?:[^\n]*\n)+?(?=    --optimizer)")


def launched(name: str) -> str:
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
            f"{layout_told(best.config)}. Predicted: {seconds_told(best.estimate.step_seconds)} a step and "
            f"{bytes_told(best.estimate.peak_bytes)} on the fullest GPU; {provenance(hardware)}.",
            115,
            break_on_hyphens=False,
        ),
    ]
    text = (LAUNCH / name).read_text()
    text = COMMENT.sub(lambda found: "".join(f"# {line}\n" for line in comment), text)
    return FLAGS.sub(lambda found: "".join(lines), text)


def _flag(value: object) -> str:
    text = json.dumps(value, separators=(",", ":")) if isinstance(value, list | bool) else str(value)
    return f"'{text}'" if isinstance(value, list) else text


if __name__ == "__main__":
    PICTURES.mkdir(parents=True, exist_ok=True)
    GUIDE.write_text(answered(GUIDE.read_text(), PICTURES))
    for script in LAUNCHES:
        (LAUNCH / script).write_text(launched(script))
    with tempfile.TemporaryDirectory() as unused:
        README.write_text(answered(README.read_text(), Path(unused), README_LINES))
