"""Load a PretrainConfig from YAML files and command-line overrides.

`--config FILE` reads a whole configuration, `--model FILE` the content of one group, `--parallel.tensor 2` one field;
later ones win. FILE may also be the name of a packaged file, such as quickstart or llama3_8b. `--print_config` prints
the result as YAML. Hyphens in flags are read as underscores.
`parse_given` also returns which fields were set, in a file or as flags, and the values of a program's own flags.
"""

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import pairwise
from typing import Any, Generic, NoReturn, TypeVar

import yaml
from jsonargparse import ArgumentParser, Namespace, set_loader, set_parsing_settings

from megapipe.config.errors import ConfigError
from megapipe.config.help_format import FieldHelpFormatter, HelpAll, common_groups, describe_library_options
from megapipe.config.other_names import hint
from megapipe.config.packaged_files import with_packaged_files
from megapipe.config.parser_errors import UNNAMED_FILE, in_words
from megapipe.config.run import PretrainConfig
from megapipe.config.untrusted import DECODING_ERRORS, MAX_YAML_CHARACTERS, decode_yaml

INIT_FROM_HELP = (
    "Folder to take initial weights from: a megapipe checkpoint, or a Hugging Face folder of such a model."
)

Config = TypeVar("Config", bound=PretrainConfig)

_UNKNOWN_KEY = re.compile(
    r"unrecognized arguments: (?P<flag>.+)"
    r"|Group '(?P<group>[^']+)' does not accept option '(?P<inner>[^']+)'"
    r"|Option '(?P<key>[^']+)' is not accepted"
)


class _Parser(ArgumentParser):
    """ArgumentParser whose errors are one ConfigError, with the nearest known name for an unknown one.

    Its help has only the common options; `format_all` returns the help with all of them.

    config_groups: names of the configuration's groups; `--print_config` prints these without a program's own flags.
    """

    config_groups: frozenset[str] = frozenset()

    def format_help(self, *args: Any, **kwargs: Any) -> str:
        """Return the help with the common options; see ArgumentParser.format_help."""
        groups, epilog = self._action_groups, self.epilog
        more = f"--help-all lists all {len(self._actions)} options. `megapipe help parallel.tensor` explains one."
        self._action_groups = common_groups(self, self.config_groups)
        self.epilog = f"{epilog}\n\n{more}" if epilog else more
        try:
            return str(super().format_help(*args, **kwargs))
        finally:
            self._action_groups, self.epilog = groups, epilog

    def format_all(self) -> str:
        """Return the help with all options."""
        return str(super().format_help())

    def dump(self, cfg: Any, *args: Any, **kwargs: Any) -> str:
        """Dump only the configuration; see ArgumentParser.dump."""
        kept = Namespace(  # type: ignore[no-untyped-call]
            **{name: value for name, value in vars(cfg).items() if name in self.config_groups}
        )
        return str(super().dump(kept, *args, **kwargs))

    def parse_path(self, cfg_path: Any, *args: Any, **kwargs: Any) -> Namespace:
        """Parse a file and name it in errors; see ArgumentParser.parse_path."""
        try:
            namespace: Namespace = super().parse_path(cfg_path, *args, **kwargs)
            return namespace
        except UnicodeDecodeError as error:
            raise ConfigError(f"--config {cfg_path} is not UTF-8 text: {error}; choose a YAML file") from error
        except ConfigError as error:
            named = [problem.replace(UNNAMED_FILE, f"--config {cfg_path}", 1) for problem in error.problems]
            raise ConfigError(named) from error

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        match = _UNKNOWN_KEY.search(message)
        if match is None:
            raise ConfigError(in_words(message)) from ex
        known = [action.dest for action in self._actions if action.dest]
        if match["key"] is not None:
            raise ConfigError(_misplaced(match["key"], known) or _unknown(match["key"], known)) from ex
        if match["inner"] is not None:
            group, inner = match["group"], match["inner"]
            if inner.partition(".")[0] in self.config_groups:
                raise ConfigError(
                    f"--{group} FILE takes the fields of one group, but the file has whole groups: pass it as "
                    "--config FILE"
                ) from ex
            raise ConfigError(_unknown(f"{group}.{inner}", known)) from ex
        words = match["flag"].split()
        if not words[0].startswith("-"):
            raise ConfigError(f"unexpected argument {words[0]!r}: flags start with --, as in --config FILE") from ex
        flags = [word.lstrip("-").split("=")[0] for word in words if word.startswith("--")]
        raise ConfigError([_unknown(flag, known) for flag in dict.fromkeys(flags)]) from ex


def _unknown(name: str, known: Sequence[str]) -> str:
    return f"unknown configuration key {name!r}{hint(name, known)} (--help-all lists every key)"


def _misplaced(key: str, known: Sequence[str]) -> str | None:
    """Describe a file of one group that was given to --config; None if the key belongs to no single group."""
    groups = {name.rpartition(".")[0] for name in known if name.rpartition(".")[2] == key}
    if len(groups) != 1 or "" in groups:
        return None
    (group,) = groups
    return (
        f"the key {key!r} of a --config file is a field of the group {group}: pass a file of this group as "
        f"--{group} FILE instead, or indent its lines below `{group}:`"
    )


def build_parser(
    description: str, kind: type[PretrainConfig] = PretrainConfig, *, documented: bool = True
) -> ArgumentParser:
    """Return a parser with every field of a kind of run. documented: with the docstrings of fields as help."""
    set_parsing_settings(docstring_parse_attribute_docstrings=documented)
    set_loader("yaml", decode_yaml, exceptions=(yaml.YAMLError,))
    parser = _Parser(description=description, allow_abbrev=False, formatter_class=FieldHelpFormatter)
    parser.config_groups = frozenset(each.name for each in fields(kind))
    everything = parser.add_argument("--help_all", action=HelpAll, help="show all options and exit")
    everything.option_strings = ["--help-all"]  # as help prints it; `underscored` lets users write both
    parser.add_argument("--config", action="config", metavar="FILE")
    for group in fields(kind):
        if group.name == "init_from":
            continue
        parser.add_class_arguments(group.default_factory, group.name)
    parser.add_argument("--init_from", metavar="FOLDER", type=str, default="", help=INIT_FROM_HELP)
    describe_library_options(parser)
    return parser


def underscored(arguments: Sequence[str]) -> list[str]:
    """Spell flags with underscores: `--model.num-layers=2` becomes `--model.num_layers=2`; values stay."""
    return [re.sub(r"^--[^=]+", lambda match: "--" + match[0][2:].replace("-", "_"), each) for each in arguments]


def parse(arguments: Sequence[str], description: str = "") -> PretrainConfig:
    """Parse command-line arguments into a PretrainConfig; see `parse_as`."""
    return parse_as(PretrainConfig, arguments, description)


def parse_as(kind: type[Config], arguments: Sequence[str], description: str = "") -> Config:
    """Parse command-line arguments into a run of a kind; fields are typed but rules between them are not checked yet.

    Raises ConfigError on unknown keys, wrong types, unreadable files and duplicate keys.
    """
    return parse_given(build_parser(description, kind), kind, arguments).config


@dataclass(frozen=True)
class Given(Generic[Config]):
    """The values of a command line.

    config: all fields. fields: names, such as `parallel.tensor`, of the fields that were set in a file or as a flag,
    except those set to null, which stay open. flags: the program's own flags by name, and `config`.
    """

    config: Config
    fields: frozenset[str]
    flags: Mapping[str, Any]


def parse_given(parser: ArgumentParser, kind: type[Config], arguments: Sequence[str]) -> Given[Config]:
    """Parse arguments with a parser of `build_parser(description, kind)`, to which flags may have been added.

    Raises ConfigError as `parse_as`.
    """
    words = with_packaged_files(underscored(arguments))
    groups = {each.name for each in fields(kind)}
    _check_file_sizes(words, {"config", *groups})
    try:
        namespace: Namespace = parser.parse_args(words)
        values = parser.instantiate(namespace)
    except UnicodeDecodeError as error:
        raise ConfigError(f"a file on this command line is not UTF-8 text: {error}; choose a YAML file") from error
    except ConfigError:
        raise
    except DECODING_ERRORS as error:  # jsonargparse fails like this on values that no field can have
        raise ConfigError(f"a value of this command line or of its files cannot be read: {error}") from error
    own = {name: values[name] for name in vars(namespace) if name not in groups}
    return Given(kind(**{name: values[name] for name in groups}), _written(parser, words, groups), own)


def _check_file_sizes(words: Sequence[str], flags: set[str]) -> None:
    """Raise ConfigError for a YAML file that is too large, before it is read into memory."""
    for word, following in pairwise([*words, ""]):
        flag, has_value, value = word.partition("=")
        path = value if has_value else following
        if flag.removeprefix("--") in flags and os.path.isfile(path) and os.path.getsize(path) > MAX_YAML_CHARACTERS:
            raise ConfigError(
                f"{flag} {path} has {os.path.getsize(path):,} bytes; a configuration file has at most "
                f"{MAX_YAML_CHARACTERS:,}"
            )


def _written(parser: ArgumentParser, words: Sequence[str], groups: set[str]) -> frozenset[str]:
    """Return the fields that files or flags set to a value other than null."""
    namespace: Namespace = parser.parse_args(words, defaults=False)
    return frozenset(
        name
        for name, value in namespace.items()
        if name.partition(".")[0] in groups and not name.endswith("__path__") and value is not None
    )
