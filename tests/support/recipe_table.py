"""The table of predictions in examples/recipes/README.md: one row per `megapipe plan predict` command of that page.

python -m tests.support.recipe_table writes it into the page
"""

import contextlib
import io
import json
import re
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

from megapipe.config.words import bytes_told, count_told, duration_told, seconds_told
from megapipe.planner.command.arguments import Request, parse_request
from megapipe.planner.command.main import main as plan
from megapipe.planner.report.words import layout_told

PAGE = Path(__file__).resolve().parents[2] / "examples/recipes/README.md"
BEGIN, END = "<!-- predictions: begin -->", "<!-- predictions: end -->"
HEADER = """\
| recipe | GPUs | layout | steps | tokens | predicted step | predicted memory | predicted time |
|---|---|---|---|---|---|---|---|"""


def commands(program: str) -> list[list[str]]:
    """Return the arguments of every command of the page that starts like this, such as `megapipe train`."""
    blocks = "".join(re.findall(r"```sh\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL))
    return [
        shlex.split(line)[len(program.split()) :] for line in blocks.splitlines() if line.startswith(f"{program} ")
    ]


def table() -> str:
    """Return the table for the present recipes and cost model. The second row of a recipe continues the first one."""
    rows = [HEADER]
    done: dict[str, int] = {}
    for words in commands("megapipe plan predict"):
        request = parse_request("predict", words)
        name, config = words[words.index("--config") + 1], request.config
        steps = config.training.last_step - done.get(name, 0)
        done[name] = config.training.last_step
        tokens = steps * config.batch.global_size * config.data.sequence_length
        rows.append(_row(name, request, steps, tokens, _prediction(words)))
    return "\n".join(rows)


def _row(name: str, request: Request, steps: int, tokens: int, found: dict[str, Any]) -> str:
    config = request.config
    layout = replace(config, parallel=replace(config.parallel, data=found["layout"]["data"]))
    assert found["fits"]
    cells = [
        f"`{name}`, {config.data.sequence_length:,} tokens",
        f"{request.devices()} x {request.flags['hardware']}",
        layout_told(layout),
        f"{steps:,}",
        count_told(tokens),
        seconds_told(found["step_time_s"]),
        bytes_told(max(found["memory_bytes"])),
        duration_told(steps * found["step_time_s"]),
    ]
    return f"| {' | '.join(cells)} |"


def _prediction(words: list[str]) -> dict[str, Any]:
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        assert plan(["predict", *words, "--json"], {}) == 0
    found: dict[str, Any] = json.loads(output.getvalue())
    return found


def written() -> str:
    """Return the table that the page has."""
    return PAGE.read_text(encoding="utf-8").partition(BEGIN)[2].partition(END)[0].strip()


if __name__ == "__main__":
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    PAGE.write_text(f"{before}{BEGIN}\n{table()}\n{END}{rest.partition(END)[2]}", encoding="utf-8")
