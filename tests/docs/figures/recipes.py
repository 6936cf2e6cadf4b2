"""The table of predictions in examples/recipes/README.md: one row per `megapipe plan predict` command of that page."""

import json
import re
import shlex
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from megapipe.config.command_line import bytes_text, count_text, duration_text, seconds_text
from megapipe.planner.command.main import Request, parse_request
from megapipe.planner.command.main import main as plan
from megapipe.planner.command.planning import layout_text
from tests.docs.figures import ROOT, head, printed, row, table

PAGE = ROOT / "examples/recipes/README.md"


def commands(program: str) -> list[list[str]]:
    """Return the arguments of every command of the page that starts like this, such as `megapipe train`."""
    blocks = "".join(re.findall(r"```sh\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL))
    return [
        shlex.split(line)[len(program.split()) :] for line in blocks.splitlines() if line.startswith(f"{program} ")
    ]


@table("examples/recipes/README.md", "predictions of recipes", "slow")
def predictions() -> Iterator[str]:
    """Yield a row for each command. The second row of a recipe continues the first one."""
    columns = ("recipe", "GPUs", "layout", "steps", "tokens", "predicted step", "predicted memory", "predicted time")
    yield from head(*columns)
    done: dict[str, int] = {}
    for words in commands("megapipe plan predict"):
        request = parse_request("predict", words)
        name, config = words[words.index("--config") + 1], request.config
        steps = config.training.last_step - done.get(name, 0)
        done[name] = config.training.last_step
        tokens = steps * config.batch.global_size * config.data.sequence_length
        yield _row(name, request, steps, tokens, _prediction(words))


def _row(name: str, request: Request, steps: int, tokens: int, prediction: dict[str, Any]) -> str:
    config = request.config
    layout = replace(config, parallel=replace(config.parallel, data=prediction["layout"]["data"]))
    assert prediction["fits"]
    cells = [
        f"`{name}`, {config.data.sequence_length:,} tokens",
        f"{request.devices()} x {request.flags['hardware']}",
        layout_text(layout),
        f"{steps:,}",
        count_text(tokens),
        seconds_text(prediction["step_time_s"]),
        bytes_text(max(prediction["memory_bytes"])),
        duration_text(steps * prediction["step_time_s"]),
    ]
    return row(*cells)


def _prediction(words: list[str]) -> dict[str, Any]:
    report: dict[str, Any] = json.loads(printed(lambda: plan(["predict", *words, "--json"], {})))
    return report
