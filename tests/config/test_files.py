"""The shared decoder of JSON and YAML accepts and refuses the right texts."""

import json
import os
import time
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from megapipe.config.files import MAX_DEPTH, compose_yaml, decode_json, decode_yaml, is_of_type, read_bytes, read_text

BAD_JSON = {
    "NaN": b"[NaN]",
    "Infinity": b'{"a": -Infinity}',
    "a float that overflows": b"1e999",
    "6,000 digits": b"9" * 6000,
    "50 digits": b"[" + b"9" * 50 + b"]",
    "a key twice": b'{"a": 1, "b": {"c": 1, "c": 2}}',
    "deep": b"[" * 101 + b"]" * 101,
    "deeper": b'{"a":' * 100_000,
    "hidden depth": b'["]]]]",' * 101 + b"1" + b"]" * 101,
    "not UTF-8": b'"\xff"',
    "half a pair": rb'["\ud800"]',
    "two values": b"1 2",
    "empty": b"",
}
GOOD_JSON = {
    b'{"a": [1, -2.5e-300, true, null, "[[9999999999999999999999999999999999999999999e999"]}': 1,
    b"[" * 100 + b"]" * 100: 2,
    rb'"\ud83d\ude00"': 3,
    b"12345678901234567890123456789012345678": 4,
}
BAD_YAML = {
    "alias bomb": "a0: &a0 [x]\n" + "".join(f"a{n}: &a{n} [{','.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 20)),
    "6,000 digits": f"a: {'9' * 6000}",
    "sexagesimal": f"a: 1{':1' * 1000}",
    "digits of another script": "a: \uff12",
    "digits of two scripts": "a: [1, 1\uff12.5e-3]",
    "month 13": "a: 2001-13-45",
    "tag": "a: !!python/object/apply:os.system [x]",
    "int of text": "a: !!int x",
    "deep": "[" * 200,
    "list as key": "? [a]\n: b",
    "twice": "a: 1\na: 2",
    "recursive": "a: &a [*a]",
    "merge": "a: &a {b: 1}\nc:\n  <<: *a",
}


@pytest.mark.parametrize("name", BAD_JSON)
def test_bad_json_is_one_line(name: str) -> None:
    with pytest.raises(ArithmeticError, match=r"^file is not readable JSON: [^\n]+$"):
        decode_json(BAD_JSON[name], "file", ArithmeticError)


@pytest.mark.parametrize("content", GOOD_JSON, ids=GOOD_JSON.values())
def test_good_json_is_a_value(content: bytes) -> None:
    decode_json(content, "file", ValueError)


@given(st.recursive(st.none() | st.booleans() | st.integers(-(10**38), 10**38) | st.text(), st.lists, max_leaves=20))
def test_whatever_json_writes_is_read_back(value: object) -> None:
    for ascii_only in (True, False):
        try:
            content = json.dumps(value, ensure_ascii=ascii_only).encode()
        except UnicodeEncodeError:
            continue
        assert decode_json(content, "file", ValueError) == value


@pytest.mark.parametrize("name", BAD_YAML)
def test_bad_yaml_is_one_error_at_once(name: str) -> None:
    start = time.process_time()
    with pytest.raises(yaml.YAMLError):
        decode_yaml(BAD_YAML[name])
    if name in ("alias bomb", "recursive", "6,000 digits", "deep"):
        with pytest.raises(yaml.YAMLError):
            compose_yaml(BAD_YAML[name])
    assert time.process_time() - start < 2


def test_a_large_yaml_text_is_refused() -> None:
    with pytest.raises(yaml.YAMLError, match="at most 10 are read"):
        decode_yaml("a: 1\n" * 3, 10)


def test_only_regular_files_of_a_bounded_size_are_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "large").write_bytes(bytes(11))
    for name, message in (("pipe", "not a regular file"), ("large", "at most 10 are read"), ("", "directory; choose")):
        with pytest.raises(ValueError, match=message):
            read_bytes(tmp_path / name, ValueError, 10)
    with pytest.raises(FileNotFoundError):
        read_bytes(tmp_path / "none", ValueError)


def test_a_byte_order_mark_is_not_part_of_a_text(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("schedule", "utf-8-sig")
    assert read_text(tmp_path / "file", ValueError, "") == "schedule"


def test_types_of_decoded_values() -> None:
    right = ((1, int), (True, bool), (None, int | None), ({"a": 1}, dict[str, int] | None))
    wrong = ((True, int), (-1, int), (1, bool), ("x", int | None), ({"a": "b"}, dict[str, int] | None))
    assert all(is_of_type(value, declared) for value, declared in right)
    assert not any(is_of_type(value, declared) for value, declared in (*wrong, ([], dict[str, int])))


def test_depth_is_counted_in_levels() -> None:
    assert decode_yaml("[" * (MAX_DEPTH - 1) + "]" * (MAX_DEPTH - 1)) is not None
