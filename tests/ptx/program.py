"""PTX text as a list of instructions, with the control-flow facts that divergent branches need."""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property

_COMMENT = re.compile(r"//.*|/\*.*?\*/")
_LABEL = re.compile(r"([$\w]+)\s*:(?!:)")
_INSTRUCTION = re.compile(r"(?:@(!?)([%$\w]+)\s+)?([a-z][\w.:]*)\s*(.*)", re.DOTALL)
_PARAMETER = re.compile(r"\.param\s+\.(\w+)\s+(?:\.ptr\s+[^,)]*?)?(\w+)\s*[,)\n]")
_SHARED = re.compile(r"\.extern\s+\.shared\s+(?:\.align\s+\d+\s+)?\.\w+\s+(\w+)\[\]")
_REGISTERS = re.compile(r"\.reg\s+\.(\w+)\s+([^;]+);")


class PtxError(Exception):
    """PTX that the interpreter cannot run, or that breaks a rule while it runs. The message starts with the line."""


@dataclass(frozen=True)
class Instruction:
    """One statement.

    line: number in the text, from 1. text: as written, without comments. guard: name of the predicate register, empty
    without one. inverted: whether the guard is `@!`. opcode: with its modifiers. operands: as written, vectors in one.
    """

    line: int
    text: str
    guard: str
    inverted: bool
    opcode: str
    operands: tuple[str, ...]

    @cached_property
    def parts(self) -> tuple[str, ...]:
        """The opcode, split at its dots."""
        return tuple(self.opcode.split("."))

    def error(self, reason: str) -> PtxError:
        """An exception that names this line."""
        return PtxError(f"line {self.line}: {self.text}: {reason}")

    def unknown(self) -> PtxError:
        """An exception for an opcode that is not supported."""
        return self.error(f"opcode {self.opcode} is not known")


@dataclass
class Program:
    """One kernel.

    parameters: (PTX type, name) in order. threads: per block. widths: register prefix -> bits, 1 for predicates.
    shared: names of the extern array, whose size the launch gives. labels: name -> index of the instruction that
    follows.
    """

    threads: int
    parameters: list[tuple[str, str]]
    instructions: list[Instruction] = field(default_factory=list)
    labels: dict[str, int] = field(default_factory=dict)
    widths: dict[str, int] = field(default_factory=dict)
    shared: list[str] = field(default_factory=list)

    def bits_of(self, register: str) -> int:
        """Declared width of a register. Raises KeyError where it was not declared."""
        return self.widths[re.sub(r"\d+$", "", register)]

    @cached_property
    def reconvergence(self) -> dict[int, int]:
        """Index of each branch -> index of the instruction at which its paths meet again, or the number of
        instructions where they meet at the end only: the immediate post-dominator (Fung et al. 2007, MICRO)."""
        end = len(self.instructions)
        # Post-dominator sets as bit masks: of an instruction, itself and what all its successors have in common.
        sets = [(1 << end + 1) - 1] * end + [1 << end]
        changed = True
        while changed:
            changed = False
            for index in reversed(range(end)):
                common = -1
                for successor in self._successors(index):
                    common &= sets[successor]
                common |= 1 << index
                if common != sets[index]:
                    sets[index], changed = common, True
        meeting = {}
        for index, instruction in enumerate(self.instructions):
            if instruction.parts[0] == "bra":
                others = sets[index] & ~(1 << index)
                # All the others post-dominate the nearest one, so that they are its own set.
                meeting[index] = sets.index(others) if others in sets else end
        return meeting

    def _successors(self, index: int) -> set[int]:
        instruction = self.instructions[index]
        successors = set()
        if instruction.parts[0] == "bra":
            successors.add(self.labels[instruction.operands[0]])
        if instruction.opcode == "ret":
            successors.add(len(self.instructions))
        if instruction.guard or not successors:
            successors.add(index + 1)
        return successors


def parse(text: str) -> Program:
    """The only kernel of a PTX module. Raises PtxError where there is not exactly one."""
    entries = re.findall(r"\.entry\s+\w+\s*\((.*?)\)", text, re.DOTALL)
    threads = re.search(r"\.reqntid\s+(\d+)(?:\s*,\s*1)*\s*\n", text)
    if len(entries) != 1 or threads is None or re.search(r"^\s*(\.visible\s+)?\.func\b", text, re.MULTILINE):
        raise PtxError("PTX must hold one kernel (.entry with .reqntid) and no functions; inline the functions")
    program = Program(int(threads[1]), [(kind, name) for kind, name in _PARAMETER.findall(entries[0] + "\n")])
    _declare(program, text)
    statement, first = "", 0
    body = False
    for number, line in enumerate(text.split("\n"), 1):
        rest = _COMMENT.sub("", line).strip()
        while rest:
            if not statement:
                if rest[0] in "{}":
                    body, rest = True, rest[1:].strip()
                    continue
                if not body or rest[0] == ".":
                    break
                label = _LABEL.match(rest)
                if label:
                    program.labels[label[1]] = len(program.instructions)
                    rest = rest[label.end() :].strip()
                    continue
                first = number
            head, semicolon, rest = rest.partition(";")
            statement, rest = f"{statement} {head.strip()}".strip(), rest.strip()
            if semicolon:
                program.instructions.append(_instruction(first, statement))
                statement = ""
    return program


def _declare(program: Program, text: str) -> None:
    for kind, names in _REGISTERS.findall(text):
        bits = 1 if kind == "pred" else int(re.sub(r"\D", "", kind))
        for name in names.split(","):
            program.widths[re.sub(r"<\d+>$", "", name.strip())] = bits
    program.shared = _SHARED.findall(text)


def _instruction(line: int, text: str) -> Instruction:
    match = _INSTRUCTION.fullmatch(text)
    if match is None:
        raise PtxError(f"line {line}: {text}: not an instruction")
    inverted, guard, opcode, operands = match.groups()
    return Instruction(line, text, guard or "", bool(inverted), opcode, tuple(_split(operands)))


def _split(text: str) -> Iterator[str]:
    depth, current = 0, ""
    for letter in text:
        depth += (letter in "{[(") - (letter in "}])")
        if letter == "," and depth == 0:
            yield current.strip()
            current = ""
        else:
            current += letter
    if current.strip():
        yield current.strip()
