"""One-line messages for wrong flags and files, in place of jsonargparse's long ones that name Python classes."""

import re
from pathlib import Path

from megapipe.config.packaged_files import other_flag

_WRONG_TYPE = re.compile(r'Parser key "(?P<key>[^"]+)":\s+Expected an? (?P<type>.+?)\. Got value: (?P<value>.*)', re.S)
_WRONG_UNION = re.compile(
    r'Parser key "(?P<key>[^"]+)":\s+Does not validate against any of the Union subtypes\s+'
    r"Subtypes: \[(?P<types>.+?)\]\n.*Given value: (?P<value>.*)",
    re.S,
)
_UNREAD_GROUP = re.compile(r'Parser key "(?P<key>[^"]+)": Unable to load config "(?P<file>[^"]+)"')
_UNREADABLE = re.compile(
    r"Parser key \"(?P<key>[^\"]+)\":\s+Unable to load config '(?P<file>[^']+)'\s+- (?P<why>.*)", re.S
)
_NO_FILE = re.compile(r"Parser key \"(?P<key>[^\"]+)\": (?:File does not exist|Path is not a file): '(?P<file>[^']+)'")
_NO_VALUE = re.compile(r"argument (?P<flag>--\S+): expected one argument")
_NO_MAPPING = re.compile(r"Unexpected config:")
_FROM_FILE = re.compile(r"Unable to load config '(?P<file>[^']+)'")
UNNAMED_FILE = "a file of --config"
"""Placeholder in a message for the file name, which the caller knows and fills in."""
_WORDS = {
    "<class 'int'>": "a whole number",
    "<class 'float'>": "a finite number",
    "<class 'bool'>": "true or false",
    "<class 'str'>": "text",
    "<class 'list'>": "a list of whole numbers, such as [1, 2]",
    "<class 'dict'>": "a mapping of names to values",
    "<class 'NoneType'>": "null",
    "tuple with 2 elements": "a list of 2",
    "list[int]": "a list of whole numbers, such as [1, 2]",
    "list[str]": "a list of words, such as [a, b]",
}


def in_words(message: str) -> str:
    """Return a message of jsonargparse as one line, such as `parallel.tensor is 'x', but must be a whole number`.

    Messages of an unknown kind keep their words.
    """
    return " ".join(_reworded(message).split())


def _reworded(message: str) -> str:
    wrong = _WRONG_TYPE.search(message) or _WRONG_UNION.search(message)
    if wrong is not None:
        types = wrong["type"] if "type" in wrong.groupdict() else wrong["types"]
        file = _FROM_FILE.search(message)
        where = f"{file['file']}: " if file is not None else ""
        value = wrong["value"].strip()
        return f"{where}{_name(wrong['key'])} is {value or repr(value)}, but must be {_rule(types)}"
    unreadable = _NO_FILE.search(message) or _UNREAD_GROUP.search(message)
    if unreadable is not None:
        key, path = unreadable["key"], Path(unreadable["file"])
        fields = "" if key == "config" else f"; to set a single field, write --{key}.FIELD VALUE"
        return f"--{key} {unreadable['file']}: {_why_unreadable(path)}{fields}"
    if (no_value := _NO_VALUE.search(message)) is not None:
        return f"{no_value['flag']} needs a value"
    if _NO_MAPPING.search(message) is not None:
        return f"{UNNAMED_FILE} is not a mapping: write `key: value` lines"
    group = _UNREADABLE.search(message)
    if group is not None:
        return f"--{group['key']} {group['file']} is not valid YAML: {group['why']}"
    return message.replace("Problems parsing config:", f"{UNNAMED_FILE} is not valid YAML:").strip()


def _name(key: str) -> str:
    """Return a field's name as it is, and a program's own flag with its hyphens."""
    return key if "." in key else f"--{key}"


def _rule(types: str) -> str:
    """Put types such as `<class 'int'>, <class 'NoneType'>` into words."""
    literal = re.search(r"Literal\[(.+)\]", types)
    if literal is not None:
        others = [words for name, words in _WORDS.items() if name in types]
        if not others:
            return f"one of {literal[1]}"
        return f"{', '.join([literal[1], *others[:-1]])} or {others[-1]}"
    return " or ".join(_WORDS.get(each.strip(), each.strip()) for each in re.split(r",(?![^\[]*\])", types))


def _why_unreadable(file: Path) -> str:
    if file.is_dir():
        return "is a folder; choose a YAML file"
    if not file.exists():
        return f"the file does not exist; {other_flag(str(file)) or 'choose an existing YAML file'}"
    return "is not a mapping or is not readable: write `key: value` lines"
