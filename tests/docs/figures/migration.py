"""The tables of docs/migrate: the options of other programs, from the map in `config.other_names` that errors use."""

from collections.abc import Iterator
from functools import partial

from megapipe.config.other_names import OTHER_NAMES, WITHOUT_FIELD
from tests.docs.figures import head, row, table

PAGES = {"Megatron-LM": "megatron_lm.md", "nanoGPT": "nanogpt.md", "torchtitan": "torchtitan.md"}


def options(program: str) -> Iterator[str]:
    """Yield the options of a program with their fields here, then those without a field and the reasons."""
    yield from head(program, "megapipe", "values")
    yield from _rows(program)
    yield from ("", "These options have no field:", "", *head(program, "why"))
    yield from (row(_option(program, name), reason) for name, reason in WITHOUT_FIELD[program].items())


def _rows(program: str) -> Iterator[str]:
    for name, target in OTHER_NAMES[program].items():
        option, _, remark = target.partition("; ")
        yield f"| {_option(program, name)} | `--{option}` | {remark} |"


def _option(program: str, name: str) -> str:
    return f"`--{name.replace('_', '-')}`" if program == "Megatron-LM" else f"`{name}`"


for program, page in PAGES.items():
    table(f"docs/migrate/{page}", f"options of {program}")(partial(options, program))
