"""The tables of docs/migrate: `python -m tests.config.migration_tables` writes them from `config.other_names`."""

from collections.abc import Iterator
from pathlib import Path

from megapipe.config.other_names import OTHER_NAMES, WITHOUT_FIELD

FOLDER = Path(__file__).parents[2] / "docs" / "migrate"
PAGES = {"Megatron-LM": "megatron_lm.md", "nanoGPT": "nanogpt.md", "torchtitan": "torchtitan.md"}
BEGIN, END = "<!-- table: python -m tests.config.migration_tables -->", "<!-- end of table -->"


def table(program: str) -> str:
    """Return the options of a program and what each is here, then those without a field and why."""
    return "\n".join(
        (
            *(f"| {program} | megapipe | values |", "|---|---|---|", *_rows(program)),
            *("", "These options have no field:", "", f"| {program} | why |", "|---|---|"),
            *(f"| {_option(program, name)} | {reason} |" for name, reason in WITHOUT_FIELD[program].items()),
        )
    )


def _rows(program: str) -> Iterator[str]:
    for name, target in OTHER_NAMES[program].items():
        option, _, remark = target.partition("; ")
        yield f"| {_option(program, name)} | `--{option}` | {remark} |"


def _option(program: str, name: str) -> str:
    return f"`--{name.replace('_', '-')}`" if program == "Megatron-LM" else f"`{name}`"


def parts(program: str) -> tuple[str, str, str]:
    """Return a program's page before, in and after its table."""
    before, rest = (FOLDER / PAGES[program]).read_text(encoding="utf-8").split(BEGIN)
    inside, after = rest.split(END)
    return before, inside, after


if __name__ == "__main__":
    for program, page in PAGES.items():
        before, _, after = parts(program)
        (FOLDER / page).write_text(f"{before}{BEGIN}\n\n{table(program)}\n\n{END}{after}", encoding="utf-8")
