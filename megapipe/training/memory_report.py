"""Out of memory: in which unit, and what was alive.

Everything is counted after the fact, from the state that the failed step left, so that a run pays nothing for it.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from megapipe.engine.compute import Piece
from megapipe.engine.errors import EngineError
from megapipe.engine.stage import Stage
from megapipe.parallel.unit_state import UnitState

CPU_ALLOCATOR = "can't allocate memory"
"""How torch's CPU allocator words it; the error is a plain RuntimeError."""

ADVICE = (
    "what helps: a smaller batch.micro_size or data.sequence_length, more ranks in parallel.pipeline or "
    "parallel.tensor, training.precision bf16"
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


def out_of_memory_report(error: EngineError, stages: Mapping[int, Stage]) -> str | None:
    """The story of a failed step, None when memory was not the reason. stages: this rank's."""
    if error.action is None or error.state is None or not is_out_of_memory(error.__cause__):
        return None
    stage, key = stages.get(error.action.stage), (error.action.stage, error.action.microbatch)
    unit = error.unit
    if stage is not None and unit is None:
        unit = _unit_in_backward(stage, error.state.pieces.get(key, []))
    where = f"unit {stage.states[unit].name}" if stage is not None and unit in stage.states else "a step"
    weights = {tensor.untyped_storage().data_ptr() for state in _states(stages) for tensor in state.weights}
    rows: list[Row] = [
        (f"stage {stage_id}, micro-batch {microbatch}", (saved_bytes(pieces, weights),))
        for (stage_id, microbatch), pieces in sorted(error.state.pieces.items())
    ]
    messages = [*error.state.activations.values(), *error.state.gradients.values()]
    rows.append(("between stages", (sum(tensor.nbytes for tensors in messages for tensor in tensors),)))
    return "\n".join(
        [
            f"out of memory in {where}: {error}",
            *_table("unit", ("weights", "master", "gradients", "moments"), [_state_row(s) for s in _states(stages)]),
            *_table("activations kept for the backward", ("saved",), rows),
            *_device_lines(_states(stages)),
            ADVICE,
        ]
    )


def saved_bytes(pieces: Iterable[Piece], weights: set[int]) -> int:
    """Bytes of the storages that autograd keeps for the backward of these pieces, each once.

    weights: addresses of storages that are not counted. Integer tensors, the micro-batch's own, are not either.
    """
    storages = {}
    for piece in pieces:
        for node in _nodes(piece):
            for tensor in _saved_tensors(node) or ():
                storage = tensor.untyped_storage()
                if tensor.is_floating_point() or tensor.dtype == torch.bool:
                    storages[storage.data_ptr()] = storage.nbytes()
    return sum(size for address, size in storages.items() if address not in weights)


def _unit_in_backward(stage: Stage, pieces: list[Piece]) -> int | None:
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
        for piece in pieces[-1:]
        for node in _nodes(piece)
        if _saved_tensors(node)
        for following, _ in node.next_functions
        if id(variable := getattr(following, "variable", None)) in owner
    ]
    return max(waiting, default=None)


def _nodes(piece: Piece) -> Iterator[Any]:
    """The autograd nodes between a piece's outputs and its leaves."""
    waiting = [output.grad_fn for output in piece.outputs if output.grad_fn is not None]
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


def _states(stages: Mapping[int, Stage]) -> list[UnitState]:
    """Every state once: stages share tied ones."""
    return list({id(state): state for stage in stages.values() for state in stage.states.values()}.values())


def _state_row(state: UnitState) -> Row:
    weights = {tensor.data_ptr(): tensor.nbytes for tensor in state.weights}
    master = 0 if state.master.data_ptr() in weights else state.master.nbytes
    gradients, moments = (sum(t.nbytes for t in tensors) for tensors in (state.gradients, state.moments.values()))
    return state.name, (sum(weights.values()), master, gradients, moments)


def _table(heading: str, columns: tuple[str, ...], rows: list[Row]) -> list[str]:
    """Lines of MiB, with a total under several rows."""
    if len(rows) > 1:
        rows = [*rows, ("total", tuple(sum(values) for values in zip(*(row for _, row in rows), strict=True)))]
    width = max(len(heading), *(len(name) for name, _ in rows))
    lines = [f"  {heading:<{width}}" + "".join(f"{column + ', MiB':>16}" for column in columns)]
    for name, values in rows:
        lines.append(f"  {name:<{width}}" + "".join(f"{value / 2**20:>16,.1f}" for value in values))
    return lines


def _device_lines(states: list[UnitState]) -> list[str]:
    """What the allocator of a GPU says of itself; the CPU's keeps no count."""
    device = states[0].master.device
    if device.type != "cuda":
        return []
    free, total = torch.cuda.mem_get_info(device)
    allocated, reserved = torch.cuda.memory_allocated(device), torch.cuda.memory_reserved(device)
    return [
        f"  {device}: {total / 2**20:,.0f} MiB, {free / 2**20:,.0f} free, {reserved / 2**20:,.0f} reserved by this "
        f"process, {allocated / 2**20:,.0f} of it in tensors"
    ]
