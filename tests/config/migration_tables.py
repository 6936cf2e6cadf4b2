"""The tables of docs/migrate: `python -m tests.config.migration_tables` writes them from `config.other_names`."""

from collections.abc import Iterator
from pathlib import Path

from megapipe.config.other_names import OTHER_NAMES

FOLDER = Path(__file__).parents[2] / "docs" / "migrate"
PAGES = {"Megatron-LM": "megatron_lm.md", "nanoGPT": "nanogpt.md", "torchtitan": "torchtitan.md"}
BEGIN, END = "<!-- table: python -m tests.config.migration_tables -->", "<!-- end of table -->"


def table(program: str) -> str:
    """Return the options of a program and what each is here."""
    return "\n".join((f"| {program} | megapipe |", "|---|---|", *_rows(program)))


def _rows(program: str) -> Iterator[str]:
    dashes = "--" if program == "Megatron-LM" else ""
    for name, target in OTHER_NAMES[program].items():
        other = name.replace("_", "-") if dashes else name
        yield f"| `{dashes}{other}` | `--{target}` |"


def parts(program: str) -> tuple[str, str, str]:
    """Return a program's page before, in and after its table."""
    before, rest = (FOLDER / PAGES[program]).read_text(encoding="utf-8").split(BEGIN)
    inside, after = rest.split(END)
    return before, inside, after


if __name__ == "__main__":
    for program, page in PAGES.items():
        before, _, after = parts(program)
        (FOLDER / page).write_text(f"{before}{BEGIN}\n\n{table(program)}\n\n{END}{after}", encoding="utf-8")
