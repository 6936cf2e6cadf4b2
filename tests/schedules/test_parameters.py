"""Schedule files with parameters: the order of the generators for any sizes, and errors with line and remedy."""

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megapipe.schedules import GENERATORS, ScheduleError, build, dumps, loads, order, parameters
from megapipe.schedules.build import load_file, read_file
from megapipe.schedules.command.main import main
from megapipe.schedules.errors import split_lines
from megapipe.schedules.parameters import FileParameters, Scanner

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


def changed(old: str, new: str, text: str = OWN) -> str:
    assert text.count(old) == 1
    return text.replace(old, new)


WRONG = {
    # the grammar
    "no colon": (changed("0..w: F", "0..w F"), 9, "expected ':' after the range, but found 'F'", ""),
    "no range": (changed("in 0..w:", "in w:"), 9, r"expected '\.\.' after the first number, but found ':'", ""),
    "unknown name": (changed("let w = min(p", "let w = min(P"), 8, "'P' is not defined", "the names here are m, p, r"),
    "name of another block": (changed("  for i in w..m: F", "  F"), 10, "'i' is not", "names here are m, p, r, w"),
    "name twice": (changed("let w", "let r"), 8, "'r' is already defined", "choose another name"),
    "a word as name": (changed("let w", "let min"), 8, "'min' is not a name", "no word of the grammar"),
    "half an expression": (changed("{i-w}", "{i-}"), 10, "expected a number, .* but found the end", ""),
    "two expressions": (changed("{i-w}", "{i w}"), 10, "unexpected 'w' in the expression {i w}", ""),
    "python": (changed("{i-w}", "{i**2}"), 10, r"expected a number, a name or an expression .*, but found '\*'", ""),
    "open brace": (changed("{i-w}", "{i-w"), 10, "'{' has no partner", "braces enclose an expression"),
    "empty loop": (changed("0..w: F{r}.{i}", "0..w:"), 9, "nothing follows the colon", "indent the lines below it"),
    "crooked block": (changed("  for i in w", "   for i in w"), 10, "the block starts with line 8", "indent both"),
    "tab": (changed("  for i in w", "\tfor i in w"), 10, "indented with a tab", "use spaces"),
    "else alone": (changed("  for i in w", "  else: B0.0\n  for i in w"), 10, "else has no if", "below the block of"),
    "a row of one rank": (changed("rank r:", "rank 0:"), 7, "'0' is not a name", "use letters"),
    "two rows": (OWN + "rank x: F0.0\n", 12, "one row for all ranks", "indent the line below 'rank r:'"),
    "no row": (changed("rank r:", "F0.0"), 7, "expected 'rank r:'", ""),
    # parameters
    "a fixed number": (changed("ranks p", "ranks 2"), 3, "'2' is not a name for a number", "a fixed file of format 2"),
    "ranks twice": (changed("ranks p", "ranks p\nranks q"), 4, "appears twice", "remove one of the two"),
    "unknown option": (changed("ranks p", "ranks p\noption depth 2"), 4, "'depth' is not one of chunks", ""),
    "format 2": (changed("schedule 3", "schedule 2"), 3, "unknown header line", "with 'megapipe schedule 3'"),
    # values, with 2 ranks and 4 micro-batches
    "not required": (changed("body", "require m >= 3*p\nbody"), 6, r"m >= 3\*p is required, but f", "change the run"),
    "divided by 0": (changed("{i-w}", "{i // (r-r)}"), 10, "1 // 0 has no value with p = 2, m = 4", "change"),
    "negative": (changed("{i-w}", "{i-2*w}"), 10, r"{i-2\*w} is -1 with p = 2, m = 4, r = 0, w = 1, i = 1", ""),
    "too many ranks": (changed("in 0..p:", "in 0..p+1:"), 3, "2 ranks, but the stages are on ranks 0 to 2", ""),
    "endless": (changed("0..m", "0..m*99999999", PIPEDREAM), 13, "expands to more than", "shorten"),
    # the order
    "no action": (changed("{i-w}", "{i-w},"), 10, "'B0.0,' is not an action", "write KIND"),
    "no backward": (changed("in m-w..m: B", "in m-w..m-1: B"), 7, "micro-batch 3: it never happens", "add B0.3"),
    "twice": (changed("in m-w..m: B", "in m-w-1..m: B"), 11, "micro-batch 2: .* second time", "remove one of the two"),
    "too early": (changed("F{r}.{i} B{r}.{i-w}", "B{r}.{i-w} F{r}.{i}"), 10, "needs F.* which comes after it", ""),
    "circle": (
        changed("min(p-1-r, m)", "r*(p-r)"), 10,
        r"B0\.0 of rank 0 \(mine\.txt with p = 2, m = 4, line 10\) waits for B1\.0, which .* F1\.1 of", "change",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_file_is_refused_with_line_and_remedy(tmp_path, capsys, monkeypatch, name):
    text, line, problem, remedy = WRONG[name]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(parameters, "MOST_STEPS", 10_000)
    (tmp_path / "mine.txt").write_text(text)
    assert main(["validate", "mine.txt", "--ranks", "2", "--microbatches", "4"]) == 2
    first, *near = capsys.readouterr().err.splitlines()
    assert re.search(rf"{problem}.*{remedy}", first), first
    assert re.search(rf"mine.txt( with .*)?, line {line}", first), first
    assert any(each.startswith(f"  > {line:5d} | ") for each in near)


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


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_a_damaged_text_is_read_or_refused(data):
    text = data.draw(st.sampled_from([OWN, PIPEDREAM, TEXTS["interleaved_1f1b"]]))
    at = data.draw(st.integers(0, len(text) - 1))
    junk = data.draw(st.text(alphabet="0p{}():.,-*/% \nxif", max_size=3))
    try:
        expanded = loads(text[:at] + junk + text[at + data.draw(st.integers(0, 4)) :], "mine", FileParameters(2, 4))
    except ScheduleError:
        return
    assert loads(dumps(expanded)) == expanded
