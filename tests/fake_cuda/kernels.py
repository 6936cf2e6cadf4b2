"""The project's own kernels on a device that is not there: one operation with its real tensors each."""

import ast
import functools
import inspect
import textwrap
from typing import Any

from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from megapipe.kernels import registry
from megapipe.kernels.triton_backend.launch import Launch
from tests.fake_cuda.mode import Watch
from tests.kernels.launches import arguments

STORES = {"store", "atomic_add", "atomic_max", "atomic_min", "atomic_cas", "atomic_xchg"}


def install(watch: Watch) -> None:
    """Let launches reach the timeline in place of a compiler, for the rest of the process."""

    def run(launch: Launch) -> None:
        stored, loaded = touched_arguments(launch.kernel, frozenset(launch.constants.items()))
        tensors = {name: each for name, each in arguments(launch).items() if isinstance(each, Tensor)}
        reads = [each for name, each in tensors.items() if name in loaded]
        writes = [each for name, each in tensors.items() if name in stored]
        module, name = launch.kernel.fn.__module__.rpartition(".")[2], launch.kernel.fn.__name__.lstrip("_")
        watch.launch(f"triton {module}.{name}", reads, writes)

    Launch._run = run  # type: ignore[method-assign]
    registry._PLAIN = (*registry._PLAIN, FakeTensor)  # type: ignore[misc]  # run as a GPU would, not as a compiler traces


class _Compiled(ast.NodeTransformer):
    """Leaves out the branches that constants rule out, as the compiler does."""

    def __init__(self, constants: dict[str, Any]) -> None:
        self._constants = constants

    def visit_If(self, node: ast.If) -> ast.AST | list[ast.stmt]:
        self.generic_visit(node)
        negated = isinstance(node.test, ast.UnaryOp) and isinstance(node.test.op, ast.Not)
        test = node.test.operand if isinstance(node.test, ast.UnaryOp) else node.test
        if not isinstance(test, ast.Name) or test.id not in self._constants:
            return node
        return node.body if bool(self._constants[test.id]) != negated else node.orelse


@functools.cache
def touched_arguments(kernel: Any, constants: frozenset[tuple[str, Any]]) -> tuple[frozenset[str], frozenset[str]]:
    """The pointer arguments that a Triton kernel stores through and loads through, also in functions that it calls.

    constants: what it is compiled for. Found in its source: of each variable, the parameters that its value is
    computed from.
    """
    function, known = kernel.fn, dict(constants)
    tree = _Compiled(known).visit(ast.parse(textwrap.dedent(inspect.getsource(function))))
    (definition,) = (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef))
    origins = {argument.arg: {argument.arg} for argument in definition.args.args}
    names = function.__globals__

    def sources(node: ast.AST) -> set[str]:
        """Parameters whose address a pointer expression may be; what is loaded through one is a value."""
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "load":
            return set()
        if isinstance(node, ast.Name):
            return origins.get(node.id, set())
        return set().union(*(sources(each) for each in ast.iter_child_nodes(node)), set())

    changed = True
    while changed:  # loops may carry pointers around
        changed = False
        for node in ast.walk(definition):
            targets: list[ast.expr] = []
            if isinstance(node, ast.Assign):
                targets, value = node.targets, node.value
            elif isinstance(node, ast.AugAssign):
                targets, value = [node.target], node.value
            for target in targets:
                for name in (each.id for each in ast.walk(target) if isinstance(each, ast.Name)):
                    more = origins.get(name, set()) | sources(value)
                    changed |= more != origins.get(name, set())
                    origins[name] = more
    stored: set[str] = set()
    loaded: set[str] = set()
    for node in ast.walk(definition):
        if not isinstance(node, ast.Call):
            continue
        if isinstance(node.func, ast.Attribute) and node.func.attr in STORES:
            stored |= sources(node.args[0])
            if node.func.attr != "store":
                loaded |= sources(node.args[0])
        elif isinstance(node.func, ast.Attribute) and node.func.attr == "load":
            loaded |= sources(node.args[0])
        elif isinstance(node.func, ast.Name) and hasattr(names.get(node.func.id), "fn"):
            called = names[node.func.id]
            parameters = list(inspect.signature(called.fn).parameters)
            given = [*zip(parameters, node.args, strict=False), *((each.arg, each.value) for each in node.keywords)]
            passed_on = {
                name: each.value if isinstance(each, ast.Constant) else known[each.id]
                for name, each in given
                if isinstance(each, ast.Constant) or (isinstance(each, ast.Name) and each.id in known)
            }
            inner_stored, inner_loaded = touched_arguments(called, frozenset(passed_on.items()))
            for name, argument in given:
                stored |= sources(argument) if name in inner_stored else set()
                loaded |= sources(argument) if name in inner_loaded else set()
    return frozenset(stored), frozenset(loaded)
