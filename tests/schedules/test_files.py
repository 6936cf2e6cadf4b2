"""Schedule files: what training takes of them, and errors with the line, the problem, and how to fix it."""

import re
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest

from megapipe.schedules import GENERATORS, ScheduleError, build, dumps, loads, lower, order, parameters, validate
from megapipe.schedules.build import fit_for_training, load_file, read_file
from megapipe.schedules.command.main import main
from megapipe.schedules.errors import excerpt
from megapipe.schedules.parameters import FileParameters
from megapipe.schedules.states import StateTable
from tests.schedules.support import TRAINED
from tests.schedules.test_text import OWN
from tests.schedules.test_text import PIPEDREAM as ANY_PIPEDREAM

MINE = """megapipe schedule 2
name mine
microbatches 4
stage 0 rank 0
stage 1 rank 1
body
rank 0: F0.0 F0.1 B0.0 F0.2 B0.1 F0.3 B0.2 B0.3
rank 1: F1.0 B1.0 F1.1 B1.1 F1.2 B1.2 F1.3 B1.3
"""
HEADER, _ = MINE.split("body\n")
PIPEDREAM = dumps(order("pipedream", 2, 4))


def changed(*changes: tuple[str, str], text: str = MINE) -> str:
    for old, new in changes:
        assert text.count(old) == 1
        text = text.replace(old, new)
    return text


def own(old: str, new: str) -> str:
    return changed((old, new), text=OWN)


BOTH_LAST_SWAPPED = (("B0.2 B0.3", "B0.3 B0.2"), ("F1.2 B1.2 F1.3 B1.3", "F1.2 F1.3 B1.3 B1.2"))
CROSSED = (("F0.0 F0.1 B0.0", "F0.0 B0.0 F0.1"), ("F1.0 B1.0 F1.1", "F1.0 F1.1 B1.0"))
WRONG_FIXED = {
    # duplicate actions
    "forward twice": (changed(("F0.2", "F0.1")), 7, "F.* 0, micro-batch 1: .* second time", "remove one of the two"),
    "backward twice": (changed(("B1.2", "B1.2 B1.2")), 8, "BACKWARD .* second time", "remove one of the two"),
    "whole and halves": (changed(("B1.2", "B1.2 BI1.2 BW1.2")), 8, "whole and in halves", "remove one"),
    "weight half twice": (changed(("B0.2 ", "BI0.2 BW0.2 BW0.2 ")), 7, "WEIGHT .* second time", "remove one"),
    # missing actions
    "no backward": (changed((" B1.3", "")), 8, "micro-batch 3: it never happens", "add B1.3 to this rank"),
    "no forward": (changed(("F0.1 ", "")), 7, "FORWARD stage 0, micro-batch 1: it never", "add F0.1 to this rank"),
    "no weight half": (changed(("B1.0", "BI1.0")), 8, "BACKWARD_WEIGHT .* never happens", "add BW1.0 to this"),
    "no input half": (changed(("B0.0", "BW0.0")), 7, "BACKWARD_INPUT .* never happens", "add BI0.0 to this rank"),
    "a receive less": (
        dumps(build("1f1b", 2, 2)).replace("RA1.1^1 ", ""), 11,
        r"rank 1 \(\S+, line 11\), RECV_ACTIVATION stage 1, micro-batch 1: it never happens", "",
    ),
    "empty rank": (HEADER + "body\nrank 0: F0.0\nrank 1:\n", 7, "F.* micro-batch 1: it never", "add F0.1 to this"),
    # places
    "another rank's stage": (changed(("F0.0", "F1.0")), 7, "stage 1 is on rank 1", "move it there"),
    "unknown stage": (changed(("F1.0", "F2.0")), 8, "there are 2 stages", "change its stage, or add one"),
    "unknown micro-batch": (changed(("F0.3", "F0.4")), 7, "numbered from 0 to 3", "change it, or the number"),
    "unknown unit": (changed(("F0.3", "F0/1.3")), 7, "the stage has fewer units", "change its unit, or leave it out"),
    "a send": (changed(("F0.0", "F0.0 SA0.0")), 7, "SEND_ACTIVATION", "give only forwards and backwards"),
    "a slice": (changed(("F0.0", "F0.0:1")), 7, "not sliced", "leave out the slice"),
    # order
    "backward first": (changed(("F0.0 F0.1 B0.0", "B0.0 F0.0 F0.1")), 7, "BACKWARD .* needs F", "move F0.0 before it"),
    "weight half first": (changed(("B0.0", "BW0.0 BI0.0")), 7, "needs BACKWARD_INPUT", "move BI0.0 before it"),
    "stages of one rank": (
        "megapipe schedule 2\nname mine\nmicrobatches 1\nstage 0 rank 0\nstage 1 rank 0\nbody\n"
        "rank 0: F1.0 F0.0 B1.0 B0.0\n",
        7, "FORWARD stage 1.* it needs FORWARD stage 0.* which comes after it", "move F0.0 before it",
    ),
    "part of a group": (changed(("F0.0 F0.1 B0.0", "F0.1 F0.0+B0.0")), 7, "of the same group", "move F0.0 before it"),
    "circle": (
        changed(*CROSSED), 7,
        r"B0\.0 of rank 0 \(\S+, line 7\) waits for B1\.0, which comes after F1\.1 of rank 1 \(\S+, line 8\), "
        r"which waits for F0\.1, which comes after B0\.0;", r"change the order, such as F0\.1 before B0\.0",
    ),
    "circle of three": (
        "megapipe schedule 2\nname mine\nmicrobatches 2\nstage 0 rank 0\nstage 1 rank 1\nstage 2 rank 2\nbody\n"
        "rank 0: F0.0 B0.0 F0.1 B0.1\nrank 1: F1.0 F1.1 B1.1 B1.0\nrank 2: F2.0 B2.0 F2.1 B2.1\n",
        8, r"waits for B1\.0, which comes after F1\.1 of rank 1 \(\S+, line 9\), which waits for F0\.1, ", "before B0",
    ),
    "weights before their update": (
        PIPEDREAM.replace("F0.1 B0.0 F0.2", "F0.1 F0.2 B0.0"), 10,
        "FORWARD stage 0, micro-batch 2, .* it needs UPDATE stage 0", "move it to a later place",
    ),
    # words
    "another rank's line": (changed(("rank 1: F", "rank 2: F")), 8, "column 1: expected 'rank 1:'", ""),
    "another stage's line": (changed(("stage 1", "stage 2")), 5, "column 7: .* expected stage 1", ""),
    "unknown field": (changed(("stage 1 rank 1", "stage 1 rank 1 unit 2")), 5, "column 16: 'unit' is not one of", ""),
    "no units": (changed(("rank 0\n", "rank 0 units 0\n")), 4, "column 22: '0' is not a whole number", ""),
    "a route to nowhere": (changed(("body", "route 0 5\nbody")), 6, "column 9: stage 5 is not defined", ""),
    "a route in a circle": (changed(("body", "route 0 0\nbody")), 6, "column 1: .* must visit each stage once", ""),
    "unknown mode": (changed(("body", "mode both\nbody")), 6, "column 6: .* not one of train, forward", ""),
    "an empty section": (changed(("body", "body\nbody")), 6, "column 1: .* has 0 rank lines", ""),
    "unknown format": (changed(("schedule 2", "schedule 9")), 1, "column 19: format 9 cannot", ""),
    "unknown kind": (changed(("F0.2", "G0.2")), 7, "column 24: 'G' in 'G0.2' is not a kind", "the kinds are F, B,"),
    "unknown word": (changed(("B1.1", "B1,1")), 8, "column 24: 'B1,1' is not an action", "write KIND stage"),
    "too large": (changed(("B1.1", "B1.9999999999")), 8, "column 24: .* too large", "the maximum is 2147483647"),
    "unknown key": (changed(("microbatches", "micro_batches")), 3, "column 1: unknown header", "'microbatches'"),
    "unknown class": (changed(("name mine", "name mine\nclass D")), 3, "'D' is not", "one of A, B, C"),
    "name twice": (changed(("name mine", "name mine\nname own")), 3, "column 1: 'name' appears twice", "remove one"),
    "a word for a number": (
        changed(("batches 4", "batches two")), 3, "column 14: 'two' is not a whole number from 1 to 999,999,999", "",
    ),
    "too many": (changed(("batches 4", "batches 999999999999")), 3, "from 1 to 999,999,999", "write one, in the"),
    "two values": (changed(("name mine", "name my own")), 2, "column 9: unexpected 'own'", "remove it"),
    "stage without a rank": (changed(("stage 1 rank 1", "stage 1")), 5, "column 7: .* no rank", "write 'stage 1 ran"),
    "a gap in the ranks": (changed(("stage 1 rank 1", "stage 1 rank 2")), 4, r"ranks \[0, 2\]", "with no gaps"),
    "uneven updates": (changed(("name mine", "name mine\nupdates 3")), 3, "divided evenly", "change one of the two"),
    "no line of a rank": (MINE[: MINE.index("rank 1:")], 6, "1 rank lines", "add the line 'rank 1: ...'"),
    "a rank line too many": (MINE + "rank 2:\n", 9, "one more", "remove it"),
    # class
    "class of reversed sums": (
        changed(("name mine", "name mine\nclass A"), *BOTH_LAST_SWAPPED), 3,
        r"states class A .* of class C, because stage 0 adds the gradients of micro-batch 2 after .* line 8\)",
        "leave out that line, or write class C",
    ),
    "class of old weights": (
        dumps(order("2bw", 2, 4)).replace("class B", "class A"), 3,
        "states class A .* of class B, because its steps do not end with an empty pipeline", "or write class B",
    ),
}  # fmt: skip


WRONG_WITH_PARAMETERS = {
    # the grammar
    "no colon": (own("0..w: F", "0..w F"), 9, "expected ':' after the range, but found 'F'", ""),
    "no range": (own("in 0..w:", "in w:"), 9, r"expected '\.\.' after the first number, but found ':'", ""),
    "unknown name": (own("let w = min(p", "let w = min(P"), 8, "'P' is not defined", "names here are m, p, r"),
    "name of another block": (own("  for i in w..m: F", "  F"), 10, "'i' is not", "names here are m, p, r, w"),
    "name twice": (own("let w", "let r"), 8, "'r' is already defined", "choose another name"),
    "a word as name": (own("let w", "let min"), 8, "'min' is not a name", "no word of the grammar"),
    "half an expression": (own("{i-w}", "{i-}"), 10, "expected a number, .* but found the end", ""),
    "two expressions": (own("{i-w}", "{i w}"), 10, "unexpected 'w' in the expression {i w}", ""),
    "python": (own("{i-w}", "{i**2}"), 10, r"expected a number, a name or parentheses, but found '\*'", ""),
    "open brace": (own("{i-w}", "{i-w"), 10, "'{' has no partner", "braces enclose an expression"),
    "empty loop": (own("0..w: F{r}.{i}", "0..w:"), 9, "nothing follows the colon", "indent the lines below it"),
    "crooked block": (own("  for i in w", "   for i in w"), 10, "the block starts with line 8", "indent both"),
    "tab": (own("  for i in w", "\tfor i in w"), 10, "indented with a tab", "use spaces"),
    "else alone": (own("  for i in w", "  else: B0.0\n  for i in w"), 10, "else has no if", "below the block of"),
    "a row of one rank": (own("rank r:", "rank 0:"), 7, "'0' is not a name", "use letters"),
    "two rows": (OWN + "rank x: F0.0\n", 12, "one row for all ranks", "indent it below 'rank r:'"),
    "no row": (own("rank r:", "F0.0"), 7, "expected 'rank r:'", ""),
    # parameters
    "a fixed number": (own("ranks p", "ranks 2"), 3, "'2' is not a name for a number", "a fixed file of format 2"),
    "ranks twice": (own("ranks p", "ranks p\nranks q"), 4, "appears twice", "remove one of the two"),
    "unknown option": (own("ranks p", "ranks p\noption depth 2"), 4, "'depth' is not one of chunks", ""),
    "format 2": (own("schedule 3", "schedule 2"), 3, "unknown header line", "with 'megapipe schedule 3'"),
    # values, with 2 ranks and 4 micro-batches
    "not required": (own("body", "require m >= 3*p\nbody"), 6, r"m >= 3\*p is required, but f", "change it"),
    "divided by 0": (own("{i-w}", "{i // (r-r)}"), 10, "1 // 0 has no value with p = 2, m = 4", "change"),
    "negative": (own("{i-w}", "{i-2*w}"), 10, r"{i-2\*w} is -1 with p = 2, m = 4, r = 0, w = 1, i = 1", ""),
    "too many ranks": (own("in 0..p:", "in 0..p+1:"), 3, "2 ranks, but the stages are on ranks 0 to 2", ""),
    "endless": (changed(("0..m", "0..m*99999999"), text=ANY_PIPEDREAM), 13, "has more than", "shorten"),
    # the order
    "no action": (own("{i-w}", "{i-w},"), 10, "'B0.0,' is not an action", "write KIND"),
    "no backward": (own("in m-w..m: B", "in m-w..m-1: B"), 7, "micro-batch 3: it never happens", "add B0.3"),
    "twice": (own("in m-w..m: B", "in m-w-1..m: B"), 11, "micro-batch 2: .* second time", "remove one of the two"),
    "too early": (own("F{r}.{i} B{r}.{i-w}", "B{r}.{i-w} F{r}.{i}"), 10, "needs F.* which comes after it", ""),
    "circle": (
        own("min(p-1-r, m)", "r*(p-r)"), 10,
        r"B0\.0 of rank 0 \(mine\.txt with p = 2, m = 4, line 10\) waits for B1\.0, which .* F1\.1 of", "change",
    ),
}  # fmt: skip
"""With 2 ranks and 4 micro-batches, as the fixed files."""
WRONG = {**WRONG_FIXED, **{f"{name}, with parameters": row for name, row in WRONG_WITH_PARAMETERS.items()}}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_file_is_refused_with_line_and_remedy(tmp_path, capsys, monkeypatch, name):
    text, line, problem, remedy = WRONG[name]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(parameters, "MOST_STEPS", 10_000)
    Path("mine.txt").write_text(text)
    sizes = ("--ranks", "2", "--microbatches", "4") if name.endswith("with parameters") else ()
    assert main(["validate", "mine.txt", *sizes]) == 2
    first, *near = capsys.readouterr().err.splitlines()
    assert re.search(rf"{problem}.*{remedy}", first), first
    assert re.search(rf"mine.txt( with .*)?, line {line}", first), first
    shown = text.splitlines()[line - 1].replace("\t", " ")
    assert f"  > {line:5d} | {shown}" in near
    for other in (line - 1, line + 1):
        assert not 0 < other <= text.count("\n") or any(f"{other:5d} |" in each for each in near)


@pytest.mark.parametrize("text", [MINE, GENERATORS["1f1b"].text, MINE.replace("body", "state 1/0\nbody")])
def test_every_number_must_be_in_ascii_digits(text):
    """Python's int, isdecimal and \\d also take digits of other scripts, which look much like those that are meant."""
    loads(text, sizes=FileParameters(2, 4))
    name_end = text.index("\n", text.index("name"))
    places = [match for match in re.finditer("[0-9]", text) if not text.index("name") < match.start() < name_end]
    assert len(places) >= 4
    for match in places:
        wrong = text[: match.start()] + chr(ord("\uff10") + int(match[0])) + text[match.end() :]
        with pytest.raises(ScheduleError, match=r"line \d+, column \d+: "):
            loads(wrong, sizes=FileParameters(2, 4))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "first line must be"),
        ("schedule 1\n", "first line must be"),
        (changed(("schedule 2", "schedules 2")), "first line must be"),
        (
            changed(("rank 0\n", "rank 0 units 99999999\nstate 0/0-99999998\n")),
            "99,999,999 units .*: use fewer",
        ),
        (changed(("name mine", "")), "lacks 'name'"),
        (changed(("microbatches 4", "")), "lacks 'microbatches'"),
        (HEADER, "the section 'body' is missing"),
    ],
)
def test_incomplete_texts_are_refused(text, message):
    with pytest.raises(ScheduleError, match=message):
        loads(text)


@pytest.mark.parametrize("chain", ["-" * 5000, "1+" * 5000])
def test_long_expressions_are_refused(chain):
    with pytest.raises(ScheduleError, match="more than 200 numbers and signs; name a part with let"):
        loads(own("{i-w}", f"{{{chain}i}}"), sizes=FileParameters(2, 4))


def test_receives_of_another_section_are_refused_with_their_line():
    text = PIPEDREAM.replace("B1.2 F1.3 B1.3", "F1.3 B1.3 B1.2")
    with pytest.raises(ScheduleError, match=r"rank 0 \(schedule, line 14\), .* in the order in which the other rank"):
        lower(loads(text))


def test_excerpts_of_long_lines_show_the_word():
    words = [f"F0.{number}" for number in range(500)]
    line = "\x1b[2Jrank 0: " + " ".join(words)
    for wanted in ("F0.0", "F0.77", "F0.499"):
        column = line.split(wanted + " ")[0].rindex(" ") + 2 if wanted == "F0.499" else line.index(wanted) + 1
        shown, caret, _ = excerpt(["body", line, "rank 1:"], 2, column).splitlines()[1:]
        assert shown[caret.index("^") :].startswith(wanted)
        assert len(shown) < 120
        assert "\x1b" not in shown


def unstated(text: str) -> str:
    return re.sub(r"^class .*\n", "", text, flags=re.MULTILINE)


@pytest.mark.parametrize("name", sorted(GENERATORS))
def test_a_file_has_the_class_of_its_order(name):
    """Without a stated class, files of built-in schedules have the class that these are registered with."""
    assert loads(unstated(dumps(order(name, 2, 6)))).header.numerical_class == GENERATORS[name].numerical_class


def test_reordered_sums_and_copies_are_class_c(tmp_path):
    assert loads(MINE).header.numerical_class == "A"
    assert loads(changed(*BOTH_LAST_SWAPPED)).header.numerical_class == "C"
    copies = MINE.replace("stage 1 rank 1", "stage 1 rank 1 part 0 replica 1\nroute 0\nroute 1")
    copies = copies.replace("F0.1 ", "").replace("F0.3 ", "").replace("B0.1 ", "").replace(" B0.3", "")
    copies = re.sub(r"[FB]1\.[02] ", "", copies)
    path = tmp_path / "copies.txt"
    for text in (copies, copies.replace("name", "class C\nname")):
        path.write_text(text)
        assert validate(load_file(path)).canonical_order
        assert load_file(path).header.numerical_class == "C"
    path.write_text(copies.replace("name", "class B\nname"))
    with pytest.raises(ScheduleError, match="stages 0, 1 all hold part 0 of the model"):
        validate(load_file(path))


def test_a_weaker_class_may_be_stated(tmp_path):
    path = tmp_path / "mine.txt"
    for stated in "ABC":
        path.write_text(changed(("name mine", f"name mine\nclass {stated}")))
        assert validate(load_file(path)).canonical_order
        assert load_file(path).header.numerical_class == stated


def written(tmp_path, text):
    path = tmp_path / "mine.txt"
    path.write_text(text)
    return path


SHARDED = {"data_parallel": True, "states": StateTable.uniform([2, 2], weight_pool=2, gradient_pool=1)}


@pytest.mark.parametrize("mode", ["train", "forward"])
@pytest.mark.parametrize(
    ("name", "how"), [*product(TRAINED, ({"data_parallel": False}, {"data_parallel": True})), ("1f1b", SHARDED)]
)
def test_a_saved_schedule_is_the_named_one(tmp_path, name, how, mode):
    run = {"units_per_stage": [2] * (2 * GENERATORS[name].chunks), "tied_groups": [[0]], **how}
    expected = build(name, 2, 4, mode=mode, receive_ahead=2, **run)
    for saved in (build(name, 2, 4, receive_ahead=2, **run), order(name, 2, 4)):
        schedule = read_file(written(tmp_path, dumps(saved)))
        assert fit_for_training(schedule, 2, 4, mode=mode, receive_ahead=2, **run) == expected


def test_one_file_of_compute_actions_serves_any_depth(tmp_path):
    schedule = read_file(written(tmp_path, MINE))
    for units in ([1, 1], [3, 5]):
        fitted = fit_for_training(schedule, 2, 4, units_per_stage=units, tied_groups=[[0, 1]], data_parallel=True)
        assert fitted.header.units_per_stage == tuple(units)
        assert fitted.header.tied_groups == ((0, 1),)
        assert fitted.header.lowered


@pytest.mark.parametrize(
    ("text", "change", "message"),
    [
        (MINE, {"num_ranks": 4}, "made for pipeline ranks 2, but this run has 4"),
        (MINE, {"num_microbatches": 8}, "made for micro-batches per step 4, but this run has 8"),
        (MINE, {"units_per_stage": [1, 1, 1, 1]}, "made for stages 2, but this run has 4"),
        (MINE.replace("rank 1\n", "rank 1 units 3\n", 1), {}, r"units \(layers\) by stage \[1, 3\], but .* \[2, 2\]"),
        (MINE.replace("body", "tied 0\nbody"), {}, r"tied groups \[\[0\]\], but this run has \[\]"),
        (MINE.replace("body", "data_parallel yes\nbody"), {}, "replicas yes, but this run has no"),
        (dumps(build("1f1b", 2, 4, units_per_stage=[2, 2])), {"data_parallel": True}, "replicas no, but this run"),
        (dumps(build("1f1b", 2, 4, mode="forward")), {}, "mode 'forward', but training needs mode 'train'"),
        (
            dumps(build("1f1b", 2, 4, units_per_stage=[2, 2], **SHARDED)),
            SHARDED | {"states": StateTable.uniform([2, 2], weight_pool=2, gradient_pool=2)},
            "made for gradient_pool 1, but this run has 2",
        ),
        (MINE.replace("body", "route 1 0\nbody"), {}, "leave out routes, parts and replicas"),
        (MINE.replace("rank 1\n", "rank 1 part 0\n", 1), {}, r"parts \[0, 0\]"),
        (MINE.replace("rank 1\n", "rank 1 part 0 replica 1\n", 1), {}, "does not sum the gradients of copies"),
        (
            dumps(build("1f1b", 2, 4, units_per_stage=[2, 2])).replace("RA1.1^1 ", ""),
            {},
            "RECV_ACTIVATION stage 1, micro-batch 1: it never happens",
        ),
    ],
)
def test_files_that_do_not_fit_are_refused(tmp_path, text, change, message):
    run = {"num_ranks": 2, "num_microbatches": 4, "units_per_stage": [2, 2], **change}
    with pytest.raises(ScheduleError, match=message):
        fit_for_training(read_file(written(tmp_path, text)), **run)


def test_versions_are_the_file_s_own(tmp_path):
    saved = order("2bw", 2, 4)
    eager = replace(saved, header=replace(saved.header, gradient_buffers=1))
    fitted = fit_for_training(read_file(written(tmp_path, dumps(eager))), 2, 4, units_per_stage=[1, 1])
    assert fitted == build("2bw", 2, 4, update="eager")
