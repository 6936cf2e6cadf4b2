"""The format of `--help`: `--model.num_layers N  Number of transformer blocks. (default: 12)`; and the configuration
files that are part of the package, by name: `--config quickstart`, `--model llama3_8b`.

`--help` shows the options of COMMON and the program's own flags, `--help-all` shows all options.
"""

import argparse
import ast
import copy
import difflib
import inspect
import json
import os
import re
import sys
from argparse import SUPPRESS, Action
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path
from types import NoneType, SimpleNamespace, UnionType
from typing import Any, Literal, Union, get_args, get_origin

from jsonargparse import ArgumentParser, DefaultHelpFormatter

from megapipe.config import ConfigError
from megapipe.config.command_line import ProseFormatter
from megapipe.config.field_types import base_of, rule_of

FOLDER = Path(__file__).resolve().parents[1] / "examples"
_FOLDERS = {"config": ("", "parallel", "recipes"), "model": ("models",)}
"""Flags -> the folders of their files."""
_NAMED_WITH_FOLDER = "recipes"
"""The folder that is part of the names of its files, because some have the name of the model that they train."""
_NAME = re.compile(rf"({_NAMED_WITH_FOLDER}/)?[A-Za-z0-9][\w.-]*")


def packaged_files(flag: str) -> dict[str, Path]:
    """Return the packaged files for a flag such as `model`, by name; empty if the flag has none."""
    files = [file for folder in _FOLDERS.get(flag, ()) for file in (FOLDER / folder).glob("*.yaml")]
    prefix = {_NAMED_WITH_FOLDER: f"{_NAMED_WITH_FOLDER}/"}
    return dict(sorted((prefix.get(file.parent.name, "") + file.stem, file) for file in files))


def with_packaged_files(words: Sequence[str]) -> list[str]:
    """Replace the names of packaged files in a command line by their paths. Files of the user come first.

    Raises:
        ConfigError: neither a file nor a packaged file has the name.
    """
    replaced = list(words)
    for place, word in enumerate(words):
        flag, has_value, value = word.partition("=")
        name = flag.removeprefix("--")
        if name == flag or not (files := packaged_files(name)):
            continue
        if has_value:
            replaced[place] = f"{flag}={_path_of(flag, value, files)}"
        elif place + 1 < len(words):
            replaced[place + 1] = _path_of(flag, words[place + 1], files)
    return replaced


def _path_of(flag: str, value: str, files: Mapping[str, Path]) -> str:
    if os.path.isfile(value) or not _NAME.fullmatch(value) or value.endswith((".yaml", ".yml")):
        return value
    if value in files:
        return str(files[value])
    if os.path.exists(value):  # a folder; the parser says so
        return value
    near = difflib.get_close_matches(value, files, n=3, cutoff=0.5)
    names = f"did you mean {' or '.join(near)}?" if near else f"the packaged ones are {', '.join(files)}"
    raise ConfigError(
        f"{flag} {value}: the file does not exist, and no packaged "
        f"file for {flag} has this name; {other_flag(value) or names}"
    )


def other_flag(name: str) -> str | None:
    """Return the advice to use the flag that has a packaged file of this name; None if no flag has one."""
    flag = next((flag for flag in _FOLDERS if name in packaged_files(flag)), None)
    return flag and f"pass the packaged file of this name as --{flag} {name}"


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
_GROUP_HELP = "Path to a configuration file."  # jsonargparse's help of every group
_MANY = 8
"""Number of packaged files from which `--help` shows only two of them."""


class FieldHelpFormatter(ProseFormatter, DefaultHelpFormatter):
    """Show types as placeholders after the flag, then the bounds of numbers, and defaults as YAML writes them."""

    def _get_help_string(self, action: Action) -> str:
        text = action.help or ""
        if action.required:
            return f"{text} (required)"
        facts = [rule_of(type_of(action))]
        has_default = action.option_strings and action.nargs != 0 and action.default not in (SUPPRESS, None)
        if has_default and "(default" not in text:
            facts.append(f"default: {as_yaml(action.default)}")
        return f"{text} ({'; '.join(filter(None, facts))})" if any(facts) else text

    def _get_default_metavar_for_optional(self, action: Action) -> str:
        return _placeholder(type_of(action))


class HelpAll(argparse._HelpAction):
    """`--help-all`: print the help with all options, and exit. For parsers that have a `format_all`."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        parser._print_message(parser.format_all(), sys.stdout)
        parser.exit()


def describe_fields(parser: ArgumentParser, kind: Any, group: str) -> None:
    """Make the docstrings of a dataclass's fields the help texts of the options of `group`. The docstring of a field
    that is a dataclass itself becomes the title of its group of options."""
    texts = _docstrings(kind)
    for field in fields(kind):
        name, inner = f"{group}.{field.name}", field.default_factory
        if is_dataclass(inner):
            parser.groups[name].title = texts[field.name].removesuffix(".")
            describe_fields(parser, inner, name)
        else:
            parser._option_string_actions[f"--{name}"].help = texts[field.name]


def _docstrings(kind: type) -> dict[str, str]:
    """Return the docstrings of the fields of a dataclass, and of those that it inherits, by name."""
    texts = {}
    for each in reversed(kind.__mro__[:-1]):
        for field, text in pairwise(_classes(each.__module__)[each.__name__].body):
            match field, text:
                case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(docstring))):
                    texts[name] = inspect.cleandoc(docstring)
    return texts


@cache
def _classes(module: str) -> dict[str, ast.ClassDef]:
    """Return the syntax trees of the classes of an imported module, by name."""
    tree = ast.parse(inspect.getsource(sys.modules[module]))
    return {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}


def describe_library_options(parser: ArgumentParser) -> None:
    """Replace the help texts of jsonargparse's own options: `--GROUP FILE` and `--print_config`."""
    for action in parser._actions:
        if action.help == _GROUP_HELP:
            action.metavar, names = "FILE", ", ".join(packaged_files(action.dest))
            action.help = f"{file_of(action.dest)} below{f', or a packaged one: {names}' if names else ''}"
        elif action.dest == "print_config":
            action.help = "print the configuration that all other options give, as YAML, and exit"


def file_of(dest: str) -> str:
    """Return a description of a file. dest: `config`, or the name of the group whose fields the file sets."""
    return f"YAML file with any of the {'groups' if dest == 'config' else f'{dest} fields'}"


def common_groups(parser: ArgumentParser, groups: frozenset[str]) -> list[Any]:
    """Return the argument groups of the short help. groups: the names of the configuration's groups."""
    actions = {action.dest: action for action in parser._actions}
    library = {"help", "help_all", "config", "print_config", "init_from", *groups}
    flags = [name for name in actions if name not in library and "." not in name]
    first, *_ = COMMON
    return [
        SimpleNamespace(
            title=title,
            description=None,
            _group_actions=[_shortened(actions[name]) for name in (*names, *(flags if title == first else ()))],
        )
        for title, names in COMMON.items()
    ]


def _shortened(action: Action) -> Action:
    """Return an action whose help names only a few packaged files."""
    names = list(packaged_files(action.dest))
    if len(names) < _MANY:
        return action
    short = copy.copy(action)
    examples = [name for name in names if name in ("gpt2_124m", "llama3_8b", "gpt_tiny", "quickstart")]
    short.help = (
        f"{file_of(action.dest)}, or a packaged one, such as "
        f"{' or '.join(examples)} (`megapipe help --{action.dest}` lists them)"
    )
    return short


def invocation(action: Action) -> str:
    """Return an option with its placeholder, such as `--parallel.tensor N`."""
    value = "|".join(action.choices) if action.choices else action.metavar or _placeholder(type_of(action))
    return f"{', '.join(action.option_strings)}{'' if action.nargs == 0 else f' {value}'}"


def type_of(action: Action) -> Any:
    """Return the type of an option's value."""
    return getattr(action, "_typehint", action.type)


def _placeholder(hint: Any) -> str:
    """Return the placeholder after a flag of this type, such as `N|null` for `int | None`."""
    if get_origin(hint) is Literal:
        return "|".join(map(str, get_args(hint)))
    if get_origin(hint) in (Union, UnionType):
        return "|".join(map(_placeholder, get_args(hint)))
    hint = base_of(hint)
    return _PLACEHOLDERS.get(get_origin(hint) or hint, "VALUE")


def as_yaml(default: object) -> str:
    """Return a default as a configuration file writes it; `empty` for an empty text."""
    if isinstance(default, str | Path):
        return str(default) or "empty"
    return json.dumps(default)
