"""The text form, with parameters and without: files read back the same, and damaged ones are read or refused."""

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megapipe.schedules import GENERATORS, Action, Kind, ScheduleError, build, dumps, loads, lower, order, validate
from megapipe.schedules.actions import read_action, write_action
from megapipe.schedules.build import load_file, read_file
from megapipe.schedules.command.main import main
from megapipe.schedules.errors import split_lines
from megapipe.schedules.parameters import FileParameters, Scanner
from tests.schedules.support import schedules

OWN = """megapipe schedule 3
name own
ranks p
microbatches m
for s in 0..p: stage {s} rank {s}
body
rank r:
  let w = min(p-1-r, m)
  for i in 0..w: F{r}.{i}
  for i in w..m: F{r}.{i} B{r}.{i-w}
  for i in m-w..m: B{r}.{i}
"""
PIPEDREAM = """megapipe schedule 3
name pipedream
class B
ranks p
microbatches m
require m >= p
updates {m}
for s in 0..p: stage {s} rank {s} versions {p-s}
prologue
rank r:
  for i in 0..m:
    F{r}.{i}
    if i >= p-1-r: B{r}.{i-(p-1-r)}
body
rank r:
  for i in m..2*m: F{r}.{i} B{r}.{i-(p-1-r)}
epilogue
rank r:
  for i in m-(p-1-r)..m: B{r}.{i}
"""
TEXTS = {"pipedream": PIPEDREAM} | {each.name: each.text for each in GENERATORS.registered() if each.text}
SIZES = st.integers(1, 6), st.integers(1, 13)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_texts_expand_to_the_order_of_their_generators(data):
    name, ranks, count = data.draw(st.sampled_from(sorted(TEXTS))), *map(data.draw, SIZES)
    options = {}
    if "option group_size" in TEXTS[name]:
        options = {"chunks": data.draw(st.integers(1, 3)), "group_size": data.draw(st.integers(1, 9))}
    sizes = FileParameters(ranks, max(count, ranks) if name == "pipedream" else count, options)
    expanded = loads(TEXTS[name], "mine", sizes)
    assert expanded == order(name, ranks, sizes.microbatches, **options)
    assert loads(dumps(expanded)) == expanded


ARITHMETIC, COMPARISONS = (
    st.sampled_from(["+", "-", "*", "//", "%"]),
    st.sampled_from(["<", "<=", ">", ">=", "==", "!="]),
)
EXPRESSIONS = st.recursive(
    st.integers(0, 99).map(str) | st.sampled_from(["p", "m"]),
    lambda inner: (
        st.builds("{}{}{}".format, inner, ARITHMETIC, inner)
        | st.builds("({} {} {})".format, inner, ARITHMETIC | COMPARISONS | st.sampled_from(["and", "or"]), inner)
        | st.builds("{}({}, {})".format, st.sampled_from(["min", "max"]), inner, inner)
        | st.builds("-{}".format, inner)
    ),
    max_leaves=9,
)


def result(compute):
    """The value for 3 ranks and 4 micro-batches, or the error."""
    try:
        return str(compute({"p": 3, "m": 4}))
    except ScheduleError as error:
        return str(error)


@settings(max_examples=150, deadline=None)
@given(EXPRESSIONS)
def test_expressions_have_python_values(text):
    compute = Scanner(next(split_lines(text, "mine")), {"p", "m"}).expression()
    try:
        # `and` and `or` give 0 or 1 here, and an operand in Python.
        bools = re.sub(r"(\band\b|\bor\b)", r"!=0 \1 0!=", text)
        wanted = int(eval(bools, {"p": 3, "m": 4, "min": min, "max": max}))
    except ZeroDivisionError:
        wanted = None
    if wanted is None:
        assert re.search("has no value with p = 3, m = 4|is too large", result(compute))
        return
    if "is too large" not in (value := result(compute)):
        assert value == str(wanted)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        (FileParameters(), "mine is for any number of ranks, and needs one of at least 1; pass --ranks"),
        (
            FileParameters(2, 4, {"chunks": 2}),
            "mine does not declare the option 'chunks'; add the line 'option chunks 1'",
        ),
        (FileParameters(2, 4, {"update": "lazy"}), "mine does not declare the option 'update'; leave it out"),
        (FileParameters(10**6, 10**6), "forwards per step; the maximum is"),
    ],
)
def test_sizes_that_a_file_does_not_have_are_refused(tmp_path, sizes, message):
    (tmp_path / "mine").write_text(OWN)
    with pytest.raises(ScheduleError, match=message):
        read_file(tmp_path / "mine", sizes) if sizes.ranks > 2 else loads(OWN, "mine", sizes)
    with pytest.raises(ScheduleError, match="is a file without parameters, which takes no options, but chunks"):
        loads(dumps(order("1f1b", 2, 4)), "mine", FileParameters(2, 4, {"chunks": 2}))


def test_commands_take_a_file_with_parameters(tmp_path, capsys):
    (tmp_path / "own.txt").write_text(GENERATORS["interleaved_1f1b"].text)
    shape = ["--schedule", str(tmp_path / "own.txt"), "--ranks", "3", "--microbatches", "6", "--chunks", "3"]
    assert main(["write", *shape]) == 0
    assert capsys.readouterr().out == dumps(order("interleaved_1f1b", 3, 6, chunks=3))
    assert main(["draw", *shape, "-o", str(tmp_path / "own.svg")]) == 0
    assert main(["write", "--schedule", "interleaved_1f1b"]) == 0
    assert capsys.readouterr().out.endswith(GENERATORS["interleaved_1f1b"].text)
    assert load_file(tmp_path / "own.txt", FileParameters(3, 6, {"chunks": 3})) == build(
        "interleaved_1f1b", 3, 6, chunks=3
    )


HAND_WRITTEN = """megapipe schedule 1
name mine  # a comment
microbatches 2

stage 0 rank 0 units 2
stage 1 rank 1
body
# all of it is one step
rank 0: F0.0 F0.1 B0.0 B0.1
rank 1: F1.0 B1.0 F1.1 B1.1
"""

FIELD = st.integers(-1, 2**31 - 1)


@given(st.builds(Action, st.sampled_from(Kind), *[FIELD] * 5, st.just(-1)), st.integers(1, 4))
def test_every_action_reads_back(action, slices):
    action = Action(action.kind, *(field // slices if field > 0 else field for field in action[1:]))
    assert read_action(write_action(action, slices), slices) == action


@settings(max_examples=80, deadline=None)
@given(schedules() | schedules("forward"))
def test_every_schedule_reads_back(schedule):
    text = dumps(schedule)
    assert loads(text) == schedule
    assert dumps(loads(text)) == text


def test_a_hand_written_schedule_runs():
    report = validate(lower(loads(HAND_WRITTEN)))
    assert report.peak_activations == (2.0, 1.0)
    assert report.canonical_order


DAMAGED = [
    *((text, FileParameters()) for text in (HAND_WRITTEN, dumps(build("1f1b", 2, 2)))),
    *((text, FileParameters(2, 4)) for text in (OWN, PIPEDREAM, TEXTS["interleaved_1f1b"])),
]


@settings(max_examples=600, deadline=None)
@given(st.data(), st.sampled_from(DAMAGED))
def test_damaged_texts_are_read_or_refused(data, text_and_sizes):
    text, sizes = text_and_sizes
    at = data.draw(st.integers(0, len(text) - 1))
    junk = data.draw(st.text(alphabet="0Fpxif.:,@^/%*-(){} \n", max_size=3))
    try:
        schedule = loads(text[:at] + junk + text[at + data.draw(st.integers(0, 4)) :], sizes=sizes)
    except ScheduleError:
        return
    assert loads(dumps(schedule)) == schedule
