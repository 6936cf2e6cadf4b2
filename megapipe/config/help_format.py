"""The format of `--help`: `--model.num_layers N  Number of transformer blocks. (default: 12)`."""

import json
from argparse import SUPPRESS, Action
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

from jsonargparse import ArgumentParser, DefaultHelpFormatter

from megapipe.config.packaged_files import packaged_files

_PLACEHOLDERS = {int: "N", float: "X", str: "TEXT", NoneType: "null", dict: "MAPPING", list: "LIST"}
_GROUP_HELP = "Path to a configuration file."  # jsonargparse's help of every group


class FieldHelpFormatter(DefaultHelpFormatter):
    """Show types as placeholders after the flag, and defaults as YAML writes them."""

    def _get_help_string(self, action: Action) -> str:
        text = action.help or ""
        if action.required:
            return f"{text} (required)"
        has_default = action.option_strings and action.nargs != 0 and action.default not in (SUPPRESS, None)
        if not has_default or "(default" in text:
            return text
        return f"{text} (default: {_as_yaml(action.default)})"

    def _get_default_metavar_for_optional(self, action: Action) -> str:
        return _placeholder(getattr(action, "_typehint", action.type))


def describe_library_options(parser: ArgumentParser) -> None:
    """Replace the help texts of jsonargparse's own options: `--GROUP FILE` and `--print_config`."""
    for action in parser._actions:
        if action.help == _GROUP_HELP:
            content = "groups" if action.dest == "config" else f"{action.dest} fields"
            action.metavar = "FILE"
            action.help = f"YAML file with any of the {content} below{_or_packaged(action.dest)}"
        elif action.dest == "print_config":
            action.help = "print the configuration that all other options give, as YAML, and exit"


def _or_packaged(flag: str) -> str:
    names = packaged_files(flag)
    return f", or a packaged one: {', '.join(names)}" if names else ""


def _placeholder(hint: Any) -> str:
    """Return the placeholder after a flag of this type, such as `N|null` for `int | None`."""
    if get_origin(hint) is Literal:
        return "|".join(map(str, get_args(hint)))
    if get_origin(hint) in (Union, UnionType):
        return "|".join(map(_placeholder, get_args(hint)))
    return _PLACEHOLDERS.get(get_origin(hint) or hint, "VALUE")


def _as_yaml(default: object) -> str:
    if isinstance(default, str | Path):
        return str(default) or "empty"
    return json.dumps(default)
