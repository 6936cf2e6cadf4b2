"""Out of memory: in which unit, and what was alive.

Everything is counted after the fact, from the state that the failed step left, so that a run pays nothing for it.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from megapipe.engine.compute import WHOLE, SavedGraph
from megapipe.engine.errors import EngineError
from megapipe.engine.groups import unit_states
from megapipe.engine.stage import Stage
from megapipe.engine.step import StepState
from megapipe.parallel.host_weights import HostWeights
from megapipe.parallel.unit_state import UnitState

CPU_ALLOCATOR = "can't allocate memory"
"""How torch's CPU allocator words it; the error is a plain RuntimeError."""

ADVICE = (
    "what helps: a smaller batch.micro_size or data.sequence_length, recompute.method auto or full, more ranks in "
    "parallel.pipeline, parallel.context or parallel.tensor, parallel.sequence together with parallel.tensor, "
    "zero.stage 1 to 3 if there are replicas, a schedule that keeps fewer micro-batches (1f1b), training.precision "
    "bf16, offload.activations, offload.optimizer or offload.weights; on the last stage recompute.logits"
)

Row = tuple[str, tuple[int, ...]]
"""A name and its bytes by column."""


class OutOfMemory(RuntimeError):
    """A step did not fit. The message names the unit and tells what was alive on this rank."""


def is_out_of_memory(error: BaseException | None) -> bool:
    """Whether the error, or one that it was raised from, is an allocator's."""
    while error is not None:
        if isinstance(error, torch.OutOfMemoryError | MemoryError) or CPU_ALLOCATOR in str(error):
            return True
        error = error.__cause__
    return False


@contextmanager
def out_of_memory_told(stages: Mapping[int, Stage]) -> Iterator[None]:
    """Turn an engine's failure for want of memory, within the block, into OutOfMemory. stages: this rank's."""
    try:
        yield
    except EngineError as error:
        report = out_of_memory_report(error, stages)
        if report is None:
            raise
        raise OutOfMemory(report) from error


def out_of_memory_report(error: EngineError, stages: Mapping[int, Stage]) -> str | None:
    """The story of a failed step, None when memory was not the reason. stages: this rank's."""
    if error.action is None or not error.states or not is_out_of_memory(error.__cause__):
        return None
    states = unit_states(stages)
    return "\n".join(
        [
            f"out of memory in {_failed_unit(error, stages)}: {error}",
            *_table("alive by unit", ("weights", "master", "gradients", "moments"), [_state_row(s) for s in states]),
            *_table("saved for later backwards", ("saved",), _activation_rows(error.states, states)),
            *_device_lines(states[0].weights[0].device),
            ADVICE,
        ]
    )


def saved_bytes(pieces: Iterable[SavedGraph]) -> dict[int, int]:
    """Storages that autograd keeps for the backward of these pieces: address -> bytes.

    Weights are among them. Integer tensors, the micro-batch's own, are not counted.
    """
    kept: list[Tensor] = []
    for piece in pieces:
        kept += piece.tape.kept if piece.tape is not None else []
        for node in _nodes(piece):
            kept += _saved_tensors(node) or []
    return _storages(tensor for tensor in kept if tensor.is_floating_point() or tensor.dtype == torch.bool)


def _failed_unit(error: EngineError, stages: Mapping[int, Stage]) -> str:
    action, unit = error.action, error.unit
    assert action is not None
    if action.stage not in stages:
        return action.kind.name
    stage = stages[action.stage]
    if unit is None and action.unit != WHOLE:
        unit = action.unit
    key = (action.stage, action.microbatch, action.unit)
    pieces = [state.pieces[key] for state in error.states if key in state.pieces]
    if unit is None and pieces:
        unit = _unit_in_backward(stage, pieces[0])
    return f"unit {stage.states[unit].name}" if unit in stage.states else f"stage {action.stage}"


def _unit_in_backward(stage: Stage, piece: SavedGraph) -> int | None:
    """The unit that a whole chain's backward had come to: the last one whose parameters it still needs.

    Autograd runs from the last unit to the first and frees what a node saved once it has run.
    """
    owner = {
        id(parameter): index
        for index, versions in enumerate(stage.units)
        for version in versions
        if isinstance(version, nn.Module)
        for parameter in version.parameters()
    }
    waiting = [
        owner[id(variable)]
        for node in _nodes(piece)
        if _saved_tensors(node)
        for following, _ in node.next_functions
        if id(variable := getattr(following, "variable", None)) in owner
    ]
    return max(waiting, default=None)


def _nodes(piece: SavedGraph) -> Iterator[Any]:
    """The autograd nodes between where gradients enter a piece and its leaves."""
    waiting: list[Any] = [edge.node for edge in piece.edges]
    seen = set(waiting)
    while waiting:
        node = waiting.pop()
        yield node
        new = {following for following, _ in node.next_functions if following is not None} - seen
        seen |= new
        waiting += new


def _saved_tensors(node: Any) -> list[Tensor] | None:
    """What a node keeps for its backward; None once it has run and let go of it."""
    found: list[Any] = []
    try:
        found += getattr(node, "saved_tensors", ())
        for name in dir(node):
            if name.startswith("_saved_"):
                value = getattr(node, name)
                found += value if isinstance(value, list | tuple) else [value]
    except RuntimeError:
        return None
    return [tensor for tensor in found if isinstance(tensor, Tensor)]


def _storages(tensors: Iterable[Tensor]) -> dict[int, int]:
    return {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}


def _state_row(state: UnitState) -> Row:
    away = state.in_host and isinstance(state, HostWeights)
    weights = _storages([*state.weights, *([] if away else state.weight_shards)])
    master = {} if state.in_host else _storages([state.master])
    sizes = (
        sum(weights.values()),
        sum(master[address] for address in master.keys() - weights.keys()),
        sum(_storages([*state.gradients, *state.gradient_shards]).values()),
        0 if state.in_host else sum(_storages(state.moments.values()).values()),
    )
    return state.name, sizes


def _activation_rows(steps: Sequence[StepState], states: list[UnitState]) -> list[Row]:
    """By step, stage and micro-batch, each storage in the first row that keeps it; weights are not counted."""
    counted = set(_storages(tensor for each in states for tensor in each.weights))
    rows: list[Row] = []
    messages: list[tuple[Tensor, ...]] = []
    for step in steps:
        for key in sorted({(stage, microbatch) for stage, microbatch, _ in (*step.pieces, *step.tapes, *step.kept)}):
            storages = saved_bytes(piece for place, piece in step.pieces.items() if place[:2] == key)
            storages |= _storages(t for place, tape in step.tapes.items() if place[:2] == key for t in tape.kept)
            storages |= _storages(t for place, inputs in step.kept.items() if place[:2] == key for t in inputs)
            name = f"stage {key[0]}, micro-batch {key[1]}"
            rows.append(
                (f"step {step.input.step}, {name}" if len(steps) > 1 else name, (_new_bytes(storages, counted),))
            )
        messages += [*step.activations.values(), *step.gradients.values()]
    storages = _storages(tensor for tensors in messages for tensor in tensors)
    rows.append(("in transit between stages", (_new_bytes(storages, counted),)))
    return rows


def _new_bytes(storages: Mapping[int, int], counted: set[int]) -> int:
    """Bytes of the storages that were not counted yet; marks them as counted."""
    new = storages.keys() - counted
    counted |= new
    return sum(storages[address] for address in new)


def _table(heading: str, columns: tuple[str, ...], rows: list[Row]) -> list[str]:
    """Lines of MiB with a total."""
    rows = [*rows, ("total", tuple(sum(values) for values in zip(*(row for _, row in rows), strict=True)))]
    width = max(len(heading), *(len(name) for name, _ in rows))
    lines = [f"  {heading:<{width}}" + "".join(f"{column + ', MiB':>16}" for column in columns)]
    for name, values in rows:
        lines.append(f"  {name:<{width}}" + "".join(f"{value / 2**20:>16,.1f}" for value in values))
    return lines


def _device_lines(device: torch.device) -> list[str]:
    """What a GPU's allocator says of itself; the CPU's keeps no count."""
    if device.type != "cuda":
        return []
    free, total = torch.cuda.mem_get_info(device)
    allocated, reserved = torch.cuda.memory_allocated(device), torch.cuda.memory_reserved(device)
    return [
        f"  {device}: {total / 2**20:,.0f} MiB, {free / 2**20:,.0f} free, {reserved / 2**20:,.0f} reserved by this "
        f"process, {allocated / 2**20:,.0f} of it in tensors"
    ]
