"""`megapipe help`: explain one field of the configuration, or another command."""

import re
import shutil
import sys
import textwrap
from argparse import Action
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

from megapipe.cli.train import parser_of
from megapipe.config import ConfigError
from megapipe.config.command_line import natural, positive
from megapipe.config.field_types import NaturalInt, PositiveInt, in_words
from megapipe.config.files import decode_yaml
from megapipe.config.help_format import as_yaml, file_of, invocation, packaged_files, type_of
from megapipe.config.load import KINDS
from megapipe.config.other_names import OTHER_NAMES, hint, split_target
from megapipe.layout.hardware.description import PRESETS

USAGE = """\
usage: megapipe help [COMMAND | FIELD]

Explain a command, or a field of the configuration such as parallel.tensor. A name with -- is always a field.
"""
GUIDES = Path(__file__).resolve().parents[1] / "docs"
"""Folder of the guides, which are part of the package."""
VARIABLES = {
    "kernels.backends": "MEGAPIPE_KERNEL_PREFERENCES: a file of measured preferences, or none",
    "ranks": "RANK, WORLD_SIZE (of torchrun), SLURM_PROCID (of srun): this process is a rank already",
    "parallel.device": "CUDA_VISIBLE_DEVICES: the GPUs that auto and cuda may use",
    "tracking.wandb_project": "WANDB_MODE, WANDB_API_KEY, WANDB_BASE_URL: the account, and whether the run is online",
}
"""Environment variables that change the effect of an option. No variable sets a field of the configuration."""
_LONGEST = 6
"""Maximum number of files, pages and other fields to name."""
_TOPIC = 13
"""Width of the first column."""


def main(arguments: Sequence[str]) -> int:
    """Run a command line and return its exit status."""
    from megapipe.cli.main import SUBCOMMANDS, overview
    from megapipe.cli.main import main as run

    if not arguments:
        print(overview())
        return 0
    if arguments[0] in ("-h", "--help"):
        print(USAGE, end="")
        return 0
    command = arguments[0].replace("_", "-")
    if command in SUBCOMMANDS:
        return run([command, *arguments[1:], "--help"])
    try:
        if len(arguments) > 1:
            raise ConfigError(f"unexpected argument {arguments[1]!r}: name one field")
        print("\n".join(explained(arguments[0], SUBCOMMANDS)))
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def explained(word: str, commands: Iterable[str] = ()) -> list[str]:
    """Return the lines that explain an option of `megapipe train`; the name may be given without its group.

    Raises ConfigError if several groups have the option, or if none has it. The message then suggests a similar name.
    """
    parsers = map(parser_of, KINDS.values())
    gpt, bert = ({each.dest: each for each in parser._actions} for parser in parsers)
    name = _name_of(word, bert, commands)
    action = gpt.get(name, bert[name])
    fields = [each for each in bert if "." in each and bert[each].metavar != "FILE"]
    if action.metavar == "FILE":
        about = file_of(name)
        facts = {
            "packaged": ", ".join(packaged_files(name)),
            "fields": ", ".join(each for each in fields if each.startswith(f"{name}.")),
        }
    else:
        about = " ".join((action.help or "").split())
        kind = {natural: NaturalInt, positive: PositiveInt}.get(type_of(action), type_of(action))
        values: Any = Literal[*action.choices] if action.choices else kind
        facts = {"value": "" if values is None else in_words(values)}
    if name in fields:
        other = as_yaml(bert[name].default)
        facts["default"] = as_yaml(action.default)
        if name not in gpt:
            facts["only for"] = "BERT runs"
        elif other != facts["default"]:
            facts["default"] += f"; {other} for BERT runs"
        facts["set by"] = _listed(_packaged(name))
        facts["related"] = _listed(_related(name, action, bert, fields))
    if name in ("plan", "recompute.hardware"):
        facts["presets"] = f"{', '.join(PRESETS)}; docs/hardware.md lists them, and describes files"
    facts["variables"] = VARIABLES.get(name, "")
    facts["also called"] = _listed(_other_names(name))
    facts["pages"] = _listed(_pages(name if name in fields else f"--{name}"))
    if facts["pages"] and not (Path("docs").is_dir() and GUIDES.samefile("docs")):
        facts["pages"] += f" (in {GUIDES.parent})"
    width = shutil.get_terminal_size().columns
    if name not in fields:  # help texts of fields are already sentences
        about = about[:1].upper() + about[1:] + ("" if about.endswith((".", ")")) else ".")
    return [
        invocation(action),
        "",
        *textwrap.wrap(about, width, initial_indent="  ", subsequent_indent="  ", break_on_hyphens=False),
        "",
        *(line for topic, text in facts.items() if text for line in _row(topic, text, width)),
    ]


def _name_of(word: str, options: dict[str, Action], commands: Iterable[str]) -> str:
    """Return the option that a user names. Raises ConfigError, which suggests the nearest option or command."""
    name = word.lstrip("-").replace("-", "_")
    by_flag = [dest for dest, action in options.items() if word in action.option_strings]
    if by_flag or name in options:
        return by_flag[0] if by_flag else name
    same = [each for each in options if each.rpartition(".")[2] == name]
    if len(same) > 1:
        raise ConfigError(f"{word!r} is a field of several groups: write one of {', '.join(same)}")
    if same:
        return same[0]
    near = hint(name, [*options, *commands])
    raise ConfigError(f"unknown field or command {word!r}{near} (`megapipe train --help-all` lists all fields)")


_WIDEST = 32
"""Maximum number of characters of a value that a file sets."""


def _packaged(name: str) -> Iterator[str]:
    """Yield the packaged files that set a field, as flags, with the value that they set."""
    for flag in ("config", "model"):
        keys = name.removeprefix(f"{flag}.").split(".") if flag == "model" else name.split(".")
        for file, path in packaged_files(flag).items():
            text = path.read_text(encoding="utf-8")
            if not re.search(rf"^ *{keys[-1]}:", text, re.MULTILINE):
                continue
            value = decode_yaml(text)
            for key in keys:
                value = value.get(key) if isinstance(value, dict) else None
            if value is not None:
                text = as_yaml(value)
                yield f"--{flag} {file} ({text if len(text) <= _WIDEST else f'{text[: _WIDEST - 3]}...'})"


def _other_names(name: str) -> Iterator[str]:
    """Yield the names of an option in other programs."""
    for program, targets in OTHER_NAMES.items():
        yield from (f"{other} ({program})" for other, target in targets.items() if split_target(target)[0] == name)


def _pages(name: str) -> list[str]:
    """Return the guides that mention an option, most mentions first."""
    mention = re.compile(rf"(?<![\w.]){re.escape(name)}(?![\w.]*\w)")
    files = sorted(file for folder in ("", "migrate", "tutorials") for file in (GUIDES / folder).glob("*.md"))
    uses = Counter({file: len(mention.findall(file.read_text("utf-8"))) for file in files})
    return [f"docs/{file.relative_to(GUIDES)}" for file, count in uses.most_common() if count]


def _related(name: str, action: Action, options: dict[str, Action], fields: Sequence[str]) -> list[str]:
    """Return fields that a field's help mentions, fields whose help mentions it, and the rest of its group."""
    group = name.rpartition(".")[0]
    other_fields = [each for each in fields if each != name]
    named = [each for each in other_fields if _mentions(action, each, group)]
    naming = [each for each in other_fields if _mentions(options[each], name, each.rpartition(".")[0])]
    siblings = [each for each in other_fields if each.rpartition(".")[0] == group]
    return list(dict.fromkeys([*named, *naming, *siblings]))


def _mentions(action: Action, name: str, group: str) -> bool:
    """Return whether a help text mentions a field, by its full name or, within its group, by the last part of it."""
    owner, _, last = name.rpartition(".")
    short = rf"|`{last}`|(?<![\w.]){last}(?!\w)" if "_" in last else rf"|`{last}`"
    return bool(re.search(rf"(?<![\w.]){re.escape(name)}(?!\w){short if owner == group else ''}", action.help or ""))


def _listed(texts: Iterable[str]) -> str:
    """Join the first few texts and the number of the others. Lines do not break within a text."""
    unbroken = [text.replace(" ", "\u00a0") for text in texts]
    rest = f" and {len(unbroken) - _LONGEST} more" if len(unbroken) > _LONGEST else ""
    return ", ".join(unbroken[:_LONGEST]) + rest


def _row(topic: str, text: str, width: int) -> list[str]:
    lines = textwrap.wrap(
        text,
        width,
        initial_indent=f"{topic:<{_TOPIC}}",
        subsequent_indent=" " * _TOPIC,
        break_on_hyphens=False,
        break_long_words=False,
    )
    return [line.replace("\u00a0", " ") for line in lines]
