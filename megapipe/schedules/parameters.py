"""Schedule files with parameters (format 3): one file for any number of ranks and micro-batches, such as::

    megapipe schedule 3
    name my_1f1b
    ranks p                            # p: the run's number of pipeline ranks; any name
    microbatches m                     # m: the run's number of micro-batches per step
    for s in 0..p: stage {s} rank {s}
    body
    rank r:                            # the row of every rank; r is its number
      let w = min(p-1-r, m)
      for i in 0..w: F{r}.{i}
      for i in w..m: F{r}.{i} B{r}.{i-w}
      for i in m-w..m: B{r}.{i}

Header lines and words are those of a fixed file (:mod:`megapipe.schedules.text`), with integer expressions in braces.
``for NAME in FIRST..STOP:`` repeats what follows, on the same line or indented below it, for FIRST up to STOP - 1;
``if EXPRESSION:`` and ``else:`` choose; ``let NAME = EXPRESSION`` names a number in its block; ``require EXPRESSION``
refuses a run for which it is false. ``option NAME NUMBER`` (:data:`OPTIONS`) is a number that a run may set, with its
default. Expressions have integers, names, ``+ - * // %``, ``min(...)``, ``max(...)``, comparisons, ``and``, ``or`` and
parentheses. `expand` gives the lines of a fixed file.
"""

import difflib
import operator
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Final, NamedTuple

from megapipe.schedules.errors import DIGITS, ScheduleError, TextLine, Word
from megapipe.schedules.schedule import SECTIONS

OPTIONS: Final = ("chunks", "group_size", "max_pending")
"""Options that a file may have: numbers that commands and configuration can set."""
MOST_STEPS = 4_000_000
"""Maximum number of statements and words of one expansion."""
DEEPEST: Final = 30
MOST_OPERANDS: Final = 200
"""Numbers, names and signs of an expression, which is computed by nested functions."""
"""Maximum depth of nested parentheses, and of nested blocks."""
_LARGEST: Final = 2**31 - 1
"""Largest absolute value of an expression."""

Values = dict[str, int]
Expression = Callable[[Values], int]
Statement = Callable[[Values], Iterator[tuple[Word, ...]]]
"""A function that runs with the values of names, which it may change, and yields the words of each line that it
makes."""

_TOKEN: Final = re.compile(r"\s*([0-9]+|[A-Za-z_]\w*|\.\.|//|[=!<>]=|[-+*%<>()=:,]|\S)")
_WORD: Final = re.compile(r"(?:\{[^{}]*\}|[^\s{}])+|[{}]")
_NAME: Final = re.compile(r"[A-Za-z_]\w*")
STATEMENTS: Final = ("for", "if", "else:", "let", "require", "option", "ranks")
"""First words of lines that fixed files do not have."""
_KEYWORDS: Final = ("for", "in", "if", "else", "let", "require", "option", "rank", "min", "max", "and", "or")
_SUMS: Final = {"+": operator.add, "-": operator.sub}
_PRODUCTS: Final = {"*": operator.mul, "//": operator.floordiv, "%": operator.mod}
_COMPARISONS: Final = {
    "==": operator.eq, "!=": operator.ne, "<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge
}  # fmt: skip


class FileParameters(NamedTuple):
    """The parameters of a run; 0 for a number of ranks or micro-batches that is not known."""

    ranks: int = 0
    microbatches: int = 0
    options: Mapping[str, object] = {}


UNKNOWN: Final = FileParameters()


class Scanner:
    """Reads one line from left to right, up to ``stop``. names: those that its expressions may use."""

    def __init__(self, line: TextLine, names: Iterable[str], at: int = 0, stop: int | None = None) -> None:
        self.line, self.names, self.at = line, names, at
        self.content = line.file[line.number - 1].split("#", 1)[0].rstrip()[:stop]
        self.depth, self.operands = 0, 0

    def error(self, problem: str, at: int | None = None) -> ScheduleError:
        """Return an error at a place of the line, by default the next token."""
        column = len(self.content) - len(self.content[self.at :].lstrip()) if at is None else at
        return self.line.error(Word("", column + 1), problem)

    def peek(self) -> str:
        """Return the next token, "" at the end."""
        match = _TOKEN.match(self.content, self.at)
        return match[1] if match else ""

    def take(self, *wanted: str) -> str:
        """Return the next token and move past it if it is one of ``wanted``, else ""."""
        token = self.peek()
        if token not in wanted or not token:
            return ""
        self.at = self.content.index(token, self.at) + len(token)
        return token

    def expect(self, wanted: str, after: str) -> None:
        """Move past a token. Raises ScheduleError if it is not the next one."""
        if not self.take(wanted):
            actual = repr(self.peek()) if self.peek() else "the end of the line"
            raise self.error(f"expected {wanted!r} after {after}, but found {actual}")

    def new_name(self) -> str:
        """Return the next token, which must be a name that is not in use."""
        name = self.peek()
        if not _NAME.fullmatch(name) or name in _KEYWORDS:
            raise self.error(f"{name!r} is not a name; use letters, digits and underscores, no word of the grammar")
        if name in self.names:
            raise self.error(f"{name!r} is already defined; choose another name")
        return self.take(name)

    def expression(self) -> Expression:
        """Return the function that computes the next expression."""
        self.depth += 1
        if self.depth > DEEPEST:
            raise self.error(f"parentheses are nested deeper than {DEEPEST} levels; name a part with let")
        value = self._either("or", lambda: self._either("and", self._comparison))
        self.depth -= 1
        return value

    def _either(self, word: str, operand: Callable[[], Expression]) -> Expression:
        operands = [operand()]
        while self.take(word):
            operands.append(operand())
        if len(operands) == 1:
            return operands[0]
        choose = any if word == "or" else all
        return lambda values: int(choose(each(values) for each in operands))

    def _comparison(self) -> Expression:
        operands, compare = [self._sum()], []
        while sign := self.take(*_COMPARISONS):
            compare.append(_COMPARISONS[sign])
            operands.append(self._sum())
        if not compare:
            return operands[0]

        def value(values: Values) -> int:
            numbers = [each(values) for each in operands]
            return int(all(map(lambda test, a, b: test(a, b), compare, numbers, numbers[1:])))

        return value

    def _sum(self) -> Expression:
        return self._chain(_SUMS, lambda: self._chain(_PRODUCTS, self._factor))

    def _chain(self, signs: Mapping[str, Callable[[int, int], int]], operand: Callable[[], Expression]) -> Expression:
        value = operand()
        while sign := self.take(*signs):
            value = self._applied(signs[sign], sign, value, operand())
        return value

    def _applied(
        self, function: Callable[[int, int], int], sign: str, left: Expression, right: Expression
    ) -> Expression:
        at = self.at - 1

        def value(values: Values) -> int:
            first, second = left(values), right(values)
            if second == 0 and sign in ("//", "%"):
                raise self.error(f"{first} {sign} 0 has no value{_with(values)}; change the divisor", at)
            number = function(first, second)
            if abs(number) > _LARGEST:
                raise self.error(f"{first} {sign} {second} is too large; the maximum is {_LARGEST}", at)
            return number

        return value

    def _factor(self) -> Expression:
        token = self.peek()
        self.operands += 1
        if self.operands > MOST_OPERANDS:
            raise self.error(f"the expressions have more than {MOST_OPERANDS} numbers and signs; name a part with let")
        if self.take("-"):
            inner = self._factor()
            return lambda values: -inner(values)
        if self.take("("):
            inner = self.expression()
            self.expect(")", "the expression")
            return inner
        if self.take("min", "max"):
            self.expect("(", token)
            arguments = [self.expression()]
            while self.take(","):
                arguments.append(self.expression())
            self.expect(")", f"the numbers of {token}")
            choose = min if token == "min" else max
            return lambda values: choose(each(values) for each in arguments)
        if re.fullmatch(DIGITS, token):
            column = len(self.content) - len(self.content[self.at :].lstrip()) + 1
            number = self.line.whole_number(Word(token, column), self.take(token))
            return lambda values: number
        if token not in self.names:
            raise self.error(self._not_a_number(token))
        self.take(token)
        return lambda values: values[token]

    def _not_a_number(self, token: str) -> str:
        if not _NAME.fullmatch(token) or token in _KEYWORDS:
            actual = repr(token) if token else "the end"
            return f"expected a number, a name or parentheses, but found {actual}"
        nearest = difflib.get_close_matches(token, self.names, n=1)
        hint = f"; did you mean {nearest[0]!r}?" if nearest else f"; names here are {', '.join(sorted(self.names))}"
        return f"{token!r} is not defined{hint}"

    def words(self) -> list[tuple[int, list[str | Expression]]]:
        """Return the rest of the line as words: the place of each, and its texts and expressions."""
        words = []
        for match in _WORD.finditer(self.content, self.at):
            parts: list[str | Expression] = []
            for piece in re.finditer(r"\{([^{}]*)\}|[^{}]+|.", match[0]):
                at = match.start() + piece.start()
                if piece[1] is None:
                    if piece[0] in "{}":
                        raise self.error(f"{piece[0]!r} has no partner on this line; braces enclose an expression", at)
                    parts.append(piece[0])
                    continue
                inner = Scanner(self.line, self.names, at + 1, at + len(piece[0]) - 1)
                parts.append(self._not_negative(inner.expression(), piece[0], at))
                if inner.peek():
                    raise inner.error(f"unexpected {inner.peek()!r} in the expression {piece[0]}")
            words.append((match.start(), parts))
        self.at = len(self.content)
        return words

    def _not_negative(self, expression: Expression, text: str, at: int) -> Expression:
        def value(values: Values) -> int:
            number = expression(values)
            if number < 0:
                raise self.error(
                    f"{text} is {number}{_with(values)}; it must be at least 0: change the range or the expression", at
                )
            return number

        return value


def _with(values: Values) -> str:
    return " with " + ", ".join(f"{name} = {value}" for name, value in values.items())


class BlockReader:
    """Reads the statements of some lines. checked: whether ``require`` refuses anything."""

    def __init__(self, lines: Sequence[TextLine], checked: bool = True) -> None:
        self._lines, self._checked = lines, checked
        self._next = self._steps = self._depth = 0

    def block(self, names: set[str], parent: int = -1) -> tuple[Statement, ...]:
        """Return the statements of the next lines, those that are indented more than ``parent``. ``let`` adds to
        ``names``."""
        statements: list[Statement] = []
        first = None
        while self._next < len(self._lines) and _indent(self._lines[self._next]) > parent:
            line = self._lines[self._next]
            first = line if first is None else first
            if _indent(line) != _indent(first):
                raise line.error(line.words[0], f"the block starts with line {first.number}; indent both equally")
            self._next += 1
            statements.append(self._statement(Scanner(line, names, _indent(line)), names))
        return tuple(statements)

    def _statement(self, scanner: Scanner, names: set[str]) -> Statement:
        kinds = {"let": self._let, "for": self._for, "if": self._if, "require": self._require}
        if kind := scanner.take(*kinds):
            return kinds[kind](scanner, names)
        if scanner.peek() == "else":
            raise scanner.error("else has no if; put it below the block of an if, indented equally")
        words = scanner.words()

        def run(values: Values) -> Iterator[tuple[Word, ...]]:
            self._count(scanner, len(words))
            number = scanner.line.number
            yield tuple(
                Word("".join(each if isinstance(each, str) else str(each(values)) for each in parts), at + 1, number)
                for at, parts in words
            )

        return run

    def _let(self, scanner: Scanner, names: set[str]) -> Statement:
        name = scanner.new_name()
        scanner.expect("=", name)
        expression = self._whole(scanner)
        names.add(name)

        def run(values: Values) -> Iterator[tuple[Word, ...]]:
            values[name] = expression(values)
            yield from ()

        return run

    def _require(self, scanner: Scanner, names: set[str]) -> Statement:
        start = scanner.at
        expression = self._whole(scanner)
        text = scanner.content[start:].strip()

        def run(values: Values) -> Iterator[tuple[Word, ...]]:
            if self._checked and not expression(values):
                raise scanner.error(f"{text} is required, but false{_with(values)}; change it or the run", start + 1)
            yield from ()

        return run

    def _whole(self, scanner: Scanner) -> Expression:
        expression = scanner.expression()
        if scanner.peek():
            raise scanner.error(f"unexpected {scanner.peek()!r} at the end; remove it")
        return expression

    def _for(self, scanner: Scanner, names: set[str]) -> Statement:
        name = scanner.new_name()
        scanner.expect("in", name)
        first = scanner.expression()
        scanner.expect("..", "the first number")
        stop = scanner.expression()
        body = self._body(scanner, names | {name}, "the range")

        def run(values: Values) -> Iterator[tuple[Word, ...]]:
            for value in range(first(values), stop(values)):
                self._count(scanner, 1)
                values[name] = value
                for statement in body:
                    yield from statement(values)
            values.pop(name, None)

        return run

    def _if(self, scanner: Scanner, names: set[str]) -> Statement:
        condition = scanner.expression()
        chosen, other = self._body(scanner, set(names), "the condition"), tuple[Statement, ...]()
        if self._next < len(self._lines):
            line = self._lines[self._next]
            after = Scanner(line, names, _indent(line))
            if _indent(line) == _indent(scanner.line) and after.take("else"):
                self._next += 1
                other = self._body(after, set(names), "else")

        def run(values: Values) -> Iterator[tuple[Word, ...]]:
            for statement in chosen if condition(values) else other:
                yield from statement(values)

        return run

    def _body(self, scanner: Scanner, names: set[str], after: str) -> tuple[Statement, ...]:
        """Return what a colon introduces: the rest of the line, or the block below it."""
        scanner.expect(":", after)
        self._depth += 1
        if self._depth > DEEPEST:
            raise scanner.error(f"blocks are nested deeper than {DEEPEST} levels")
        if scanner.peek():
            inner = Scanner(scanner.line, names, scanner.at)
            body: tuple[Statement, ...] = (self._statement(inner, names),)
        else:
            body = self.block(names, _indent(scanner.line))
        if not body:
            raise scanner.error("nothing follows the colon; continue the line, or indent the lines below it")
        self._depth -= 1
        return body

    def rows(self, names: set[str], num_ranks: int, values: Values) -> Iterator[tuple[TextLine, list[Word]]]:
        """Yield the row of each rank, from the only statement of a section, ``rank r:``, and its line."""
        line, self._next = self._lines[0], 1
        scanner = Scanner(line, names, _indent(line))
        if not scanner.take("rank"):
            raise scanner.error("expected 'rank r:', which is the row of every rank r, and its actions below it")
        name = scanner.new_name()
        body = self._body(scanner, names | {name}, f"rank {name}")
        if self._next < len(self._lines):
            after = self._lines[self._next]
            raise after.error(after.words[0], f"a section has one row for all ranks; indent it below 'rank {name}:'")
        for rank in range(num_ranks):
            inner = values | {name: rank}
            words = [each for statement in body for row in statement(inner) for each in row]
            yield line, [line.words[0], Word(f"{rank}:", line.words[0].column), *words]

    def _count(self, scanner: Scanner, steps: int) -> None:
        self._steps += steps
        if self._steps > MOST_STEPS:
            raise scanner.error(f"the file has more than {MOST_STEPS:,} actions and repetitions; shorten ranges", 0)


def expand(
    lines: Sequence[TextLine], source: str, sizes: FileParameters, header_only: bool = False
) -> tuple[list[TextLine], TextLine]:
    """Return the lines of the fixed file into which a file with parameters expands for a run, and the line of the file
    that names the number of ranks.

    Args:
        lines: of the file.
        source: name of the file, for messages.
        sizes: of the run.
        header_only: leave out the sections, and do not refuse what ``require`` does not allow.

    Raises:
        ScheduleError: lines that are not in the grammar, or parameters that the file needs or does not have.
    """
    starts = [number for number, line in enumerate(lines) if line.words[0].text in SECTIONS]
    end = starts[0] if starts else len(lines)
    declared = _declarations(lines[1:end], source)
    values = _values(declared, source, sizes)
    names, run = set(values), f"{source}{_with(values)}"

    def fixed_line(line: TextLine, words: Sequence[Word]) -> TextLine:
        text = " ".join(word.text for word in words)
        return TextLine(run, words[0].line or line.number, tuple(words), text, line.file)

    line = declared["microbatches"]
    fixed_lines = [lines[0], fixed_line(line, [line.words[0], line.words[1]._replace(text=str(sizes.microbatches))])]
    header = BlockReader([each for each in lines[1:end] if each not in declared.values()], not header_only)
    for statement in header.block(names):
        fixed_lines += [fixed_line(lines[0], words) for words in statement(values)]
    for start, stop in pairwise([*starts, len(lines)]) if not header_only else ():
        fixed_lines.append(fixed_line(lines[start], lines[start].words))
        if start + 1 < stop:
            rows = BlockReader(lines[start + 1 : stop]).rows(set(names), sizes.ranks, values)
            fixed_lines += [fixed_line(line, words) for line, words in rows]
    return fixed_lines, declared["ranks"]


def _declarations(header: Sequence[TextLine], source: str) -> dict[str, TextLine]:
    """Return the lines that declare parameters, by their keys; those of options by the options' names."""
    declarations: dict[str, TextLine] = {}
    for line in header:
        key = line.words[0].text
        if key not in ("ranks", "microbatches", "option"):
            continue
        line.expect_length(3 if key == "option" else 2)
        name = line.words[1].text
        if key == "option":
            key = line.one_of(1, OPTIONS)
            line.number_at(2)
        if not _NAME.fullmatch(name) or name in _KEYWORDS:
            raise line.error(
                line.words[1],
                f"{name!r} is not a name for a number of the run; write '{key} n', or make a fixed file of format 2",
            )
        if key in declarations or name in (each.words[1].text for each in declarations.values()):
            raise line.error(line.words[1], f"{key!r} or {name!r} appears twice; remove one of the two lines")
        declarations[key] = line
    for key, usual in (("ranks", "p"), ("microbatches", "m")):
        if key not in declarations:
            raise ScheduleError(f"{source}: the header lacks {key!r}; add '{key} {usual}'")
    return declarations


def _values(declared: Mapping[str, TextLine], source: str, sizes: FileParameters) -> Values:
    """Return the value of each parameter: of ranks, of micro-batches, then of options."""
    values = {}
    for key, size in (("ranks", sizes.ranks), ("microbatches", sizes.microbatches)):
        if size < 1:
            raise ScheduleError(f"{source} is for any number of {key}, and needs one of at least 1; pass --{key}")
        values[declared[key].words[1].text] = size
    options = {key: line for key, line in declared.items() if key in OPTIONS}
    for name in sizes.options:
        if name not in options:
            remedy = f"add the line 'option {name} 1'" if name in OPTIONS else "leave it out"
            raise ScheduleError(f"{source} does not declare the option {name!r}; {remedy}")
    for name, line in options.items():
        value = sizes.options.get(name, line.number_at(2))
        if not isinstance(value, int) or value < 0:
            raise ScheduleError(f"{source}: the option {name} is {value!r}; it must be a whole number")
        values[name] = value
    return values


def _indent(line: TextLine) -> int:
    text = line.file[line.number - 1]
    indent = len(text) - len(text.lstrip())
    if "\t" in text[:indent]:
        raise line.error(line.words[0], "the line is indented with a tab; use spaces")
    return indent
