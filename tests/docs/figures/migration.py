"""Tables of other programs: their options, from the map in `config.other_names` that errors use, and their models."""

import re
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import megapipe.spec.families
from megapipe.config.other_names import OTHER_NAMES, WITHOUT_FIELD
from megapipe.spec.family import families
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


@table("docs/conversion.md", "families")
def known_families() -> Iterator[str]:
    """Yield every family of Hugging Face transformers, its models, and the fields that all of them have."""
    yield from head("`model_type`", "models", "fields that all of them have")
    files = [path.read_text(encoding="utf-8") for path in Path(megapipe.spec.families.__path__[0]).glob("*.py")]
    for name, family in families().items():
        (text,) = (text for text in files if re.search(rf'(\(\s*|model_type=)"{name}",', text))
        models = " ".join(text.split('"""')[1].partition(")")[0].split()) + ")"
        chosen = {"bias"} if family.known_keys & {"attention_bias", "qkv_bias", "use_bias"} else set[str]()
        needs = (f"`{field} {value}`".lower() for field, value in family.needs.items() if field not in chosen)
        yield row(f"`{name}`", models, ", ".join(needs))
