"""The format of `--help`: `--model.num_layers N  Number of transformer blocks. (default: 12)`.

`--help` shows the options of COMMON and the program's own flags, `--help-all` shows all options.
"""

import argparse
import copy
import json
import sys
from argparse import SUPPRESS, Action
from collections.abc import Iterable
from pathlib import Path
from types import NoneType, SimpleNamespace, UnionType
from typing import Any, Literal, Union, get_args, get_origin

from jsonargparse import ArgumentParser, DefaultHelpFormatter

from megapipe.config.command_line import ProseFormatter, natural, positive
from megapipe.config.packaged_files import packaged_files

COMMON = {
    "options": ("help", "help_all", "config", "print_config"),
    "model": ("model", "model.num_layers", "model.hidden_size", "model.num_heads", "model.vocabulary_size"),
    "data and batch": ("data.prefix", "data.sequence_length", "batch.global_size", "batch.micro_size"),
    "training": (
        "training.steps",
        "training.precision",
        "training.directory",
        "optimizer.learning_rate",
        "optimizer.warmup_steps",
        "evaluation.every",
        "checkpoint.every",
        "tracking.wandb_project",
    ),
    "layout": ("parallel.tensor", "parallel.pipeline", "zero.stage", "schedule.name", "recompute.method"),
}
"""The options that most runs use, by heading. `--help` shows these; a program's own flags join the first heading."""

_PLACEHOLDERS = {int: "N", float: "X", str: "TEXT", NoneType: "null", dict: "MAPPING", list: "LIST"}
_IN_WORDS = {
    int: "a whole number",
    natural: "a whole number of at least 0",
    positive: "a whole number of at least 1",
    float: "a number",
    bool: "true or false",
    NoneType: "null",
}
_GROUP_HELP = "Path to a configuration file."  # jsonargparse's help of every group
_MANY = 8
"""Number of packaged files from which `--help` shows only two of them."""


class FieldHelpFormatter(ProseFormatter, DefaultHelpFormatter):
    """Show types as placeholders after the flag, and defaults as YAML writes them."""

    def _get_help_string(self, action: Action) -> str:
        text = action.help or ""
        if action.required:
            return f"{text} (required)"
        has_default = action.option_strings and action.nargs != 0 and action.default not in (SUPPRESS, None)
        if not has_default or "(default" in text:
            return text
        return f"{text} (default: {as_yaml(action.default)})"

    def _get_default_metavar_for_optional(self, action: Action) -> str:
        return _placeholder(type_of(action))


class HelpAll(argparse._HelpAction):
    """`--help-all`: print the help with all options, and exit. For parsers that have a `format_all`."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        parser._print_message(parser.format_all(), sys.stdout)
        parser.exit()


def describe_library_options(parser: ArgumentParser) -> None:
    """Replace the help texts of jsonargparse's own options: `--GROUP FILE` and `--print_config`."""
    for action in parser._actions:
        if action.help == _GROUP_HELP:
            action.metavar = "FILE"
            action.help = f"{file_of(action.dest)} below{_or_packaged(packaged_files(action.dest))}"
        elif action.dest == "print_config":
            action.help = "print the configuration that all other options give, as YAML, and exit"


def file_of(dest: str) -> str:
    """Return what a file of `--config` or of a group holds."""
    return f"YAML file with any of the {'groups' if dest == 'config' else f'{dest} fields'}"


def _or_packaged(names: Iterable[str]) -> str:
    return f", or a packaged one: {', '.join(names)}" if names else ""


def common_groups(parser: ArgumentParser, groups: frozenset[str]) -> list[Any]:
    """Return the argument groups of the short help. groups: the names of the configuration's groups."""
    actions = {action.dest: action for action in parser._actions}
    library = {"help", "help_all", "config", "print_config", "init_from", *groups}
    own = [name for name in actions if name not in library and "." not in name]
    first, *_ = COMMON
    return [
        SimpleNamespace(
            title=title,
            description=None,
            _group_actions=[_shortened(actions[name]) for name in (*names, *(own if title == first else ()))],
        )
        for title, names in COMMON.items()
    ]


def _shortened(action: Action) -> Action:
    """Return an action whose help names only a few packaged files."""
    names = list(packaged_files(action.dest))
    if len(names) < _MANY:
        return action
    short = copy.copy(action)
    few = [name for name in names if name in ("gpt2_124m", "llama3_8b", "gpt_tiny", "quickstart")]
    short.help = (
        f"{file_of(action.dest)}, or a packaged one, such as {' or '.join(few)} (`megapipe help --{action.dest}` "
        "lists them)"
    )
    return short


def invocation(action: Action) -> str:
    """Return an option with its placeholder, such as `--parallel.tensor N`."""
    value = "|".join(action.choices) if action.choices else action.metavar or _placeholder(type_of(action))
    return f"{', '.join(action.option_strings)}{'' if action.nargs == 0 else f' {value}'}"


def type_of(action: Action) -> Any:
    """Return the type of an option's value."""
    return getattr(action, "_typehint", action.type)


def in_words(hint: Any) -> str:
    """Return the values of a type in words, such as `a whole number, or null` for `int | None`."""
    origin, arguments = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        *others, last = [in_words(each).removeprefix("one of ") for each in arguments]
        return f"{', '.join(others)}, or {last}"
    if origin is Literal:
        return f"one of {', '.join(map(str, arguments))}"
    if origin is tuple:
        return f"a list of {len(arguments)} {_several(arguments[0])}"
    if origin is dict:
        return f"a mapping of names to {_several(arguments[1])}"
    return f"a list of {_several(arguments[0])}" if origin is list else _IN_WORDS.get(hint, "text")


def _several(hint: Any) -> str:
    if get_origin(hint) is list:
        return f"lists of {_several(get_args(hint)[0])}"
    if get_origin(hint) is Literal:
        return f"any of {', '.join(map(str, get_args(hint)))}"
    return {int: "whole numbers", float: "numbers"}.get(hint, "names")


def _placeholder(hint: Any) -> str:
    """Return the placeholder after a flag of this type, such as `N|null` for `int | None`."""
    if get_origin(hint) is Literal:
        return "|".join(map(str, get_args(hint)))
    if get_origin(hint) in (Union, UnionType):
        return "|".join(map(_placeholder, get_args(hint)))
    return _PLACEHOLDERS.get(get_origin(hint) or hint, "VALUE")


def as_yaml(default: object) -> str:
    """Return a default as a configuration file writes it; `empty` for an empty text."""
    if isinstance(default, str | Path):
        return str(default) or "empty"
    return json.dumps(default)
