"""Load a PretrainConfig from YAML files and command-line overrides, and other dataclasses from YAML files.

`--config FILE` reads a whole configuration, `--model FILE` the content of one group, `--parallel.tensor 2` one field;
later ones win. FILE may also be the name of a packaged file, such as quickstart or llama3_8b. `--print_config` prints
the result as YAML. Hyphens in flags are read as underscores.
`parse_given` also returns which fields were set, in a file or as flags, and the values of a program's own flags.
`kind_of` distinguishes a BERT's command line from a GPT's. Messages of jsonargparse, which name Python classes, are
replaced by messages of one line.

`read_dataclass` reads a YAML file that holds one dataclass, such as a hardware file: a mapping becomes a dataclass, a
list of mappings a tuple of dataclasses, and jsonargparse parses every other value by the type of its field. All
problems of such a file are reported together, each with its line. Dataclasses that have rules about several fields at
once have a method `broken_rules`, which yields (field, problem).
"""

import os
import re
from argparse import Action
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import MISSING, asdict, dataclass, fields, is_dataclass
from functools import cache
from itertools import pairwise, zip_longest
from pathlib import Path
from typing import Any, Generic, Literal, NoReturn, TypeVar, get_args, get_origin

import yaml
from jsonargparse import ArgumentParser, Namespace, set_loader, set_parsing_settings

from megapipe.config import ConfigError, nearest
from megapipe.config.bert import BertDataConfig, BertModelConfig, BertPretrainConfig
from megapipe.config.field_types import base_of, bound_problems, has_other_digits, in_words, outside, type_hints
from megapipe.config.files import DECODING_ERRORS, MAX_YAML_BYTES, compose_yaml, decode_yaml, read_text
from megapipe.config.help_format import (
    FieldHelpFormatter,
    HelpAll,
    common_groups,
    describe_fields,
    describe_library_options,
    other_flag,
    type_of,
    with_packaged_files,
)
from megapipe.config.model import ModelConfig
from megapipe.config.other_names import hint
from megapipe.config.run import DataConfig, PretrainConfig

INIT_FROM_HELP = "Folder with initial weights: a megapipe checkpoint or a Hugging Face folder."

Config = TypeVar("Config", bound=PretrainConfig)

_WRONG_VALUE = re.compile(
    r'Parser key "(?P<key>[^"]+)":\s+(?:Expected an? .+?\. Got|Does not validate against any of.+\n\s*Given) value: '
    r"(?P<value>.*)",
    re.S,
)
_UNREAD_GROUP = re.compile(r'Parser key "(?P<key>[^"]+)": Unable to load config "(?P<file>[^"]+)"')
_UNREADABLE = re.compile(
    r"Parser key \"(?P<key>[^\"]+)\":\s+Unable to load config '(?P<file>[^']+)'\s+- (?P<why>.*)", re.S
)
_NO_FILE = re.compile(r"Parser key \"(?P<key>[^\"]+)\": (?:File does not exist|Path is not a file): '(?P<file>[^']+)'")
_NO_VALUE = re.compile(r"argument (?P<flag>--\S+): expected one argument")
_REQUIRED = re.compile(r"the following arguments are required: (?P<names>.+)")
_NO_MAPPING = re.compile(r"Unexpected config:")
_FROM_FILE = re.compile(r"Unable to load config '(?P<file>[^']+)'")
UNNAMED_FILE = "a file of --config"
"""Placeholder in a message for the file name, which the caller knows and fills in."""
_UNKNOWN_KEY = re.compile(
    r"unrecognized arguments: (?P<flag>.+)"
    r"|Group '(?P<group>[^']+)' does not accept option '(?P<inner>[^']+)'"
    r"|Option '(?P<key>[^']+)' is not accepted"
)


class FieldParser(ArgumentParser):
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
        """Dump the whole configuration and nothing else; see ArgumentParser.dump."""
        whole = self.get_defaults()
        whole.update(cfg)
        kept = Namespace(  # type: ignore[no-untyped-call]
            **{name: value for name, value in vars(whole).items() if name in self.config_groups}
        )
        return str(super().dump(kept, *args, **kwargs))

    def parse_path(self, cfg_path: Any, *args: Any, **kwargs: Any) -> Namespace:
        """Parse a file and name it in errors; see ArgumentParser.parse_path."""
        try:
            namespace: Namespace = super().parse_path(cfg_path, *args, **kwargs)
            return namespace
        except ConfigError as error:
            problems = [problem.replace(UNNAMED_FILE, f"--config {cfg_path}", 1) for problem in error.problems]
            raise ConfigError(problems) from error

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        match = _UNKNOWN_KEY.search(message)
        if match is None:
            hints = {action.dest: type_of(action) for action in self._actions}
            raise ConfigError(_one_line(message, hints)) from ex
        options = [action.dest for action in self._actions if action.dest]
        if match["key"] is not None:
            raise ConfigError(_misplaced(match["key"], options) or _unknown(match["key"], options)) from ex
        if match["inner"] is not None:
            group, inner = match["group"], match["inner"]
            if inner.partition(".")[0] in self.config_groups:
                raise ConfigError(
                    f"--{group} FILE takes the fields of one group, but "
                    "the file has whole groups: pass it as --config FILE"
                ) from ex
            raise ConfigError(_unknown(f"{group}.{inner}", options)) from ex
        words = match["flag"].split()
        if not words[0].startswith("-"):
            raise ConfigError(f"unexpected argument {words[0]!r}: flags start with --, as in --config FILE") from ex
        flags = [word.lstrip("-").split("=")[0] for word in words if word.startswith("--")]
        raise ConfigError([_unknown(flag, options) for flag in dict.fromkeys(flags)]) from ex


def _unknown(name: str, options: Sequence[str]) -> str:
    return f"unknown configuration key {name!r}{hint(name, options)} (--help-all lists every key)"


def _misplaced(key: str, options: Sequence[str]) -> str | None:
    """Describe a file of one group that was given to --config; None if the key belongs to no single group."""
    groups = {name.rpartition(".")[0] for name in options if name.rpartition(".")[2] == key}
    if len(groups) != 1 or "" in groups:
        return None
    (group,) = groups
    return (
        f"the key {key!r} of a --config file is a field of the group {group}: pass a file "
        f"of this group as --{group} FILE instead, or indent its lines below `{group}:`"
    )


def asks_for_help(arguments: Sequence[str]) -> bool:
    """Return whether the output for a command line includes the help of fields."""
    return not {"-h", "--help", "--help-all", "--help_all"}.isdisjoint(arguments)


def build_parser(
    description: str, kind: type[PretrainConfig] = PretrainConfig, *, documented: bool = True
) -> ArgumentParser:
    """Return a parser with every field of a kind of run.

    documented: with the docstrings of fields as help, which takes longer.
    """
    # jsonargparse would parse a whole file for each class of it; `describe_fields` parses each file once.
    set_parsing_settings(docstring_parse_attribute_docstrings=False)
    set_loader("yaml", decode_yaml, exceptions=(yaml.YAMLError,))
    parser = FieldParser(description=description, allow_abbrev=False, formatter_class=FieldHelpFormatter)
    parser.config_groups = frozenset(each.name for each in fields(kind))
    everything = parser.add_argument("--help_all", action=HelpAll, help="show all options and exit")
    # This is how help prints it; `underscored` lets users write both.
    everything.option_strings = ["--help-all"]
    parser.add_argument("--config", action="config", metavar="FILE")
    for group in fields(kind):
        if group.name == "init_from":
            continue
        parser.add_class_arguments(group.default_factory, group.name)
        if documented:
            describe_fields(parser, group.default_factory, group.name)
    parser.add_argument("--init_from", metavar="FOLDER", type=str, default="", help=INIT_FROM_HELP)
    describe_library_options(parser)
    _drop_help_of_values(parser)
    return parser


def _drop_help_of_values(parser: ArgumentParser) -> None:
    """Remove the options --FIELD.help that jsonargparse adds for fields whose values are dataclasses: the help of the
    field itself names the fields of these values."""
    for group in parser._action_groups:
        group._group_actions[:] = [each for each in group._group_actions if not _is_help_of_values(each)]
    parser._actions[:] = [each for each in parser._actions if not _is_help_of_values(each)]
    for name in [name for name, each in parser._option_string_actions.items() if _is_help_of_values(each)]:
        del parser._option_string_actions[name]


def _is_help_of_values(action: Action) -> bool:
    return any(option.endswith(".help") for option in action.option_strings)


def underscored(arguments: Sequence[str]) -> list[str]:
    """Spell flags with underscores: `--model.num-layers=2` becomes `--model.num_layers=2`; values stay."""
    return [re.sub(r"(?<=^--)[^=]+", lambda flag: flag[0].replace("-", "_"), each) for each in arguments]


def parse(arguments: Sequence[str]) -> PretrainConfig:
    """Parse command-line arguments into a PretrainConfig; see `parse_as`.

    Example:
        >>> from megapipe import parse
        >>> parse(["--model.num_layers", "2"]).model.num_layers
        2
    """
    return parse_as(PretrainConfig, arguments)


def parse_as(kind: type[Config], arguments: Sequence[str]) -> Config:
    """Parse command-line arguments into a run of a kind; fields have their types, rules between them are not checked.

    Raises ConfigError on unknown keys, wrong types, numbers outside their bounds, unreadable files and duplicate keys.
    """
    return parse_given(_plain_parser(kind.kind), kind, arguments).config


@cache
def _plain_parser(kind: str) -> ArgumentParser:
    """Return the parser of a kind without flags of a program. Making one takes several times as long as parsing."""
    return build_parser("", KINDS[kind], documented=False)


@dataclass(frozen=True)
class Given(Generic[Config]):
    """The values of a command line.

    config: all fields. fields: names, such as `parallel.tensor`, of the fields that were set in a file or as a flag,
    except those set to null, which count as not set. flags: the program's own flags by name, and `config`.
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
    _check_files(words, {"config", *groups})
    _check_digits(words, {flag: type_of(action) for action in parser._actions for flag in action.option_strings})
    try:
        # The dataclasses have the defaults. The parser would check its own defaults like values.
        namespace: Namespace = parser.parse_args(words, defaults=False)
        values = parser.instantiate(namespace)
    except ConfigError:
        raise
    except DECODING_ERRORS as error:  # from jsonargparse, for values that no field can have
        raise ConfigError(f"a value of the command line or its files cannot be read: {error}") from error
    flags = {each.dest: each.default for each in parser._actions} | vars(values)
    program_flags = {key: flags[key] for key in flags if key.partition(".")[0] not in groups}
    config = kind(**{name: values[name] for name in groups if name in values})
    if problems := bound_problems(config):
        raise ConfigError(problems)
    set_fields = frozenset(
        name
        for name, value in namespace.items()
        if name.partition(".")[0] in groups and not name.endswith("__path__") and value is not None
    )
    return Given(config, set_fields, program_flags)


def _check_files(words: Sequence[str], flags: set[str]) -> None:
    """Raise ConfigError for a YAML file without a name, one that is too large, before it is read into memory, or one
    that is not text."""
    for word, following in zip_longest(words, words[1:]):
        flag, has_value, value = word.partition("=")
        path = value if has_value else following
        if flag.removeprefix("--") not in flags or path is None:
            continue
        if not path:
            raise ConfigError(f"{flag} is empty; name a YAML file, or leave the flag out")
        if not os.path.isfile(path):
            continue
        read_text(Path(path), ConfigError, f"choose a YAML file for {flag}", MAX_YAML_BYTES)


def _check_digits(words: Sequence[str], hints: Mapping[str, Any]) -> None:
    """Raise ConfigError for a number with digits of another script than ASCII, which jsonargparse would read; YAML's
    loader refuses them itself. hints: types of values by flag."""
    for word, following in pairwise([*words, ""]):
        flag, has_value, value = word.partition("=")
        text, hint = value if has_value else following, hints.get(flag)
        kinds = set(map(base_of, (hint, *get_args(hint))))
        if kinds & {int, float} and str not in kinds and has_other_digits(text):
            name = _name(flag.removeprefix("--"))
            raise ConfigError(f"{name} is {text}, but must be {in_words(hint)}, in the digits 0 to 9")


KINDS: dict[str, type[PretrainConfig]] = {each.kind: each for each in (PretrainConfig, BertPretrainConfig)}

_BERT_ONLY_FIELDS = {
    f"{group}.{each.name}"
    for group, bert, gpt in (("model", BertModelConfig, ModelConfig), ("data", BertDataConfig, DataConfig))
    for each in fields(bert)
    if each.name not in {other.name for other in fields(gpt)}
}
"""Fields that only BERT runs have, such as `data.pairs`."""


_BERT_ONLY_VALUE = ("model.norm_position", "post")
"""Field and value that only BERT runs have."""


def kind_of(arguments: Sequence[str]) -> type[PretrainConfig]:
    """Return BERT's kind if the flags or their files set a field or value that only BERT runs have, otherwise GPT's.

    Wrong flags and unreadable files count as not set; the parser reports them.

    Raises:
        ConfigError: a flag is only for BERT runs, but the model comes from a file, and it is a GPT.
    """
    flag_words = underscored(arguments)
    try:
        words = with_packaged_files(flag_words)
    except ConfigError:
        return PretrainConfig
    flags, files = dict[str, str](), dict[str, dict[str, Any]]()
    for (word, following), names in zip(pairwise([*words, ""]), pairwise([*flag_words, ""]), strict=True):
        flag, has_value, value = word.removeprefix("--").partition("=")
        if flag in ("config", "model", "data"):
            files[names[0] if has_value else " ".join(names)] = _fields_in(flag, value or following)
        else:
            flags[flag] = value or following
    if any(map(_bert_only, files.values())):
        return BertPretrainConfig
    models = [name for name, values in files.items() if any(field.startswith("model.") for field in values)]
    if (bert_flags := _bert_only(flags)) and models:
        raise ConfigError(
            f"--{bert_flags[0]} {flags[bert_flags[0]]} is for BERT runs only, but the model of {models[-1]} is a GPT: "
            "leave the flag out, choose a BERT, or add --kind bert (megapipe plan: --bert) to train one of these sizes"
        )
    return BertPretrainConfig if bert_flags else PretrainConfig


def _bert_only(values: Mapping[str, Any]) -> list[str]:
    """Return the names of the fields that only BERT runs have, or whose value only BERT runs have."""
    return [name for name, value in values.items() if name in _BERT_ONLY_FIELDS or (name, value) == _BERT_ONLY_VALUE]


def _fields_in(flag: str, file: str) -> dict[str, Any]:
    """Return the fields of the model and of the data in a file; none if it cannot be read."""
    try:
        if not os.path.isfile(file) or os.path.getsize(file) > MAX_YAML_BYTES:
            return {}
        content = decode_yaml(Path(file).read_text(encoding="utf-8"))
        groups = content if flag == "config" else {flag: content}
        return {f"{key}.{name}": each for key in ("model", "data") for name, each in (groups.get(key) or {}).items()}
    except (OSError, yaml.YAMLError, *DECODING_ERRORS):
        return {}


def _one_line(message: str, hints: Mapping[str, Any]) -> str:
    """Return a message of jsonargparse as one line, such as `parallel.tensor is x, but must be a whole number`.

    Messages of an unknown kind keep their words. hints: types of the parser's options by name.
    """
    return " ".join(_reworded(message, hints).split())


def _reworded(message: str, hints: Mapping[str, Any]) -> str:
    wrong = _WRONG_VALUE.search(message)
    if wrong is not None and wrong["key"] in hints:
        file = _FROM_FILE.search(message)
        where = f"{file['file']}: " if file is not None else ""
        value = wrong["value"].strip()
        return f"{where}{_name(wrong['key'])} is {value or repr(value)}, but must be {in_words(hints[wrong['key']])}"
    unreadable = _NO_FILE.search(message) or _UNREAD_GROUP.search(message)
    if unreadable is not None:
        key, path = unreadable["key"], Path(unreadable["file"])
        single = "" if key == "config" else f"; to set a single field, write --{key}.FIELD VALUE"
        return f"--{key} {unreadable['file']}: {_why_unreadable(path)}{single}"
    if (no_value := _NO_VALUE.search(message)) is not None:
        return f"{no_value['flag']} needs a value"
    if (required := _REQUIRED.search(message)) is not None:
        flags = [f"--{name.strip()}" for name in required["names"].split(",")]
        return f"{', '.join(flags)} {'is' if len(flags) == 1 else 'are'} missing; --help explains what to set"
    if _NO_MAPPING.search(message) is not None:
        return f"{UNNAMED_FILE} is not a mapping: write `key: value` lines"
    group = _UNREADABLE.search(message)
    if group is not None:
        return f"--{group['key']} {group['file']} is not valid YAML: {group['why']}"
    return message.replace("Problems parsing config:", f"{UNNAMED_FILE} is not valid YAML:").strip()


def _name(key: str) -> str:
    """Return a field's name as it is, and a program's own flag with its hyphens."""
    return key if "." in key else f"--{key}"


def _why_unreadable(file: Path) -> str:
    if file.is_dir():
        return "is a folder; choose a YAML file"
    if not file.exists():
        return f"the file does not exist; {other_flag(str(file)) or 'choose an existing YAML file'}"
    return "is not a mapping or is not readable: write `key: value` lines"


Content = TypeVar("Content")
_NUMBER = re.compile(r"\d+\.?\d*[eE][+-]?\d+|0", re.ASCII)


def read_dataclass(kind: type[Content], text: str, origin: str, max_characters: int) -> Content:
    """Return the content of a YAML text.

    Args:
        kind: a dataclass.
        text: content of a file, with at most `max_characters`.
        origin: name of the file, for messages.

    Raises:
        ConfigError: all problems, as `machine.yaml:3: groups[0].num_nodes is 0, but must be at least 1`.
    """
    try:
        root = compose_yaml(text, max_characters)
    except yaml.YAMLError as error:
        raise ConfigError(f"{origin} is not readable YAML: {error}") from None
    reader = _Reader(origin)
    content: Content = reader.section(kind, root, "")
    if reader.problems:
        raise ConfigError(reader.problems)
    return content


def written_dataclass(content: Any, remark: str = "") -> str:
    """Return YAML text that `read_dataclass` reads back, with numbers to six digits. remark: comments at the top."""
    head = "".join(f"# {line}".rstrip() + "\n" for line in remark.splitlines())
    return head + yaml.safe_dump(_plain(asdict(content)), sort_keys=False, width=119, default_flow_style=None)


def _plain(value: Any) -> Any:
    """Return a value as YAML writes it: tuples become lists, numbers have six digits, and null values and empty lists
    are left out of dictionaries."""
    if isinstance(value, dict):
        return {name: _plain(each) for name, each in value.items() if each is not None and each != ()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    return float(f"{value:.6g}") if isinstance(value, float) else value


class _Reader:
    """Reads the nodes of a file, and collects problems. The value of a node with a problem is None."""

    def __init__(self, origin: str) -> None:
        self.origin = origin
        self.problems: list[str] = []

    def report(self, node: yaml.Node | None, place: str, problem: str) -> None:
        line = f":{node.start_mark.line + 1}" if node is not None else ""
        self.problems.append(f"{self.origin}{line}: {place or 'the file'} {problem}")

    def section(self, kind: Any, node: yaml.Node | None, place: str) -> Any:
        """Return a dataclass from a mapping."""
        if not isinstance(node, yaml.MappingNode):
            return self.report(node, place, "is not a mapping: write `key: value` lines")
        before, prefix = len(self.problems), f"{place}." if place else ""
        nodes = dict(self._fields(kind, node, place))
        hints = type_hints(kind)
        values = {name: self.value(hints[name], each, f"{prefix}{name}") for name, each in nodes.items()}
        for each in fields(kind):
            if each.default is MISSING and each.default_factory is MISSING and each.name not in nodes:
                self.report(node, f"{prefix}{each.name}", "is missing; add it")
        if len(self.problems) > before:
            return None
        content = kind(**values)
        for name, problem in getattr(content, "broken_rules", tuple)():
            self.report(nodes.get(re.split(r"[.\[]", name)[0], node), f"{prefix}{name}", problem)
        return content

    def _fields(self, kind: Any, node: yaml.MappingNode, place: str) -> Iterator[tuple[str, yaml.Node]]:
        names, seen = tuple(type_hints(kind)), set()
        for key, value in node.value:
            name = f"{place}.{key.value}" if place else key.value
            if not isinstance(key, yaml.ScalarNode):
                self.report(key, place, "has a list or mapping as a key: write a name")
            elif key.value not in names:
                hint = nearest(key.value, names)
                self.report(key, name, f"is an unknown key{hint} (known here: {', '.join(names)})")
            elif key.value in seen:
                self.report(key, name, "appears twice in one mapping; keep one of them")
            else:
                seen.add(key.value)
                yield key.value, value

    def value(self, hint: Any, node: yaml.Node, place: str) -> Any:
        """Return a value of a field's type."""
        inner = next((each for each in (hint, *get_args(hint)) if isinstance(each, type) and is_dataclass(each)), None)
        if inner is not None and type(None) not in get_args(hint) and inner is not hint:
            if not isinstance(node, yaml.SequenceNode) or not node.value:
                return self.report(node, place, "is not a list: write one or more `- ` items")
            return tuple(self.section(inner, each, f"{place}[{index}]") for index, each in enumerate(node.value))
        if inner is not None:
            return self.section(inner, node, place)
        try:
            value = _parser(hint).parse_object({"value": _text_of(node)})["value"]
        except ConfigError:
            shown = (node.value or "empty") if isinstance(node, yaml.ScalarNode) else "a list or mapping"
            near = nearest(shown, get_args(hint)) if get_origin(hint) is Literal else ""
            return self.report(node, place, f"is {shown}, but must be {in_words(hint)}{near}")
        if value == "":
            return self.report(node, place, "is empty: write a name")
        for where, number, rule in outside(hint, value, place):
            self.report(node, where, f"is {number:g}, but must be {rule}")
        return value


def _text_of(node: yaml.Node) -> Any:
    """Return the texts of scalars, in lists and mappings; the types of fields decide how they are parsed.

    Numbers in lists are converted here, because a link matrix has a million of them.
    """
    if isinstance(node, yaml.SequenceNode):
        return [float(each.value) if _NUMBER.fullmatch(str(each.value)) else _text_of(each) for each in node.value]
    if isinstance(node, yaml.MappingNode):
        return {str(key.value): _text_of(value) for key, value in node.value}
    return node.value


@cache
def _parser(hint: Any) -> FieldParser:
    parser = FieldParser()
    parser.add_argument("--value", type=hint)
    return parser
