"""The link benchmark runs and ends in one JSON object; its figures are not judged here."""

import json

import pytest

from tests.support.commands import run


@pytest.mark.slow
def test_last_line_is_one_json_object() -> None:
    output = run("python benchmarks/link_speed.py --kilobytes 4 --messages 5 --repeats 1", 120)
    figures = json.loads(output.splitlines()[-1])
    assert figures["shared_memory_stream_microseconds"] > 0
    assert figures["gloo_stream_microseconds"] > 0
