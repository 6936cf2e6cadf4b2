"""Failures of a run: the message, the rank that prints it, the exit status, and the report of a step that did not fit
in memory.
"""

import signal
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megapipe.config import InputError
from megapipe.engine.stage import WHOLE, SavedGraph, Stage, graph_nodes, unit_states
from megapipe.engine.step import EngineError, StepState
from megapipe.optim.scaling import LossScaleError
from megapipe.parallel.groups import CommunicationError, LaunchError
from megapipe.parallel.rendezvous import Start
from megapipe.parallel.unit_state import HostWeights, UnitState
from megapipe.training.observe.records import print_error
from megapipe.training.resilience.guards import NonFiniteError, ReplicasDifferError, SpikeError
from megapipe.training.resilience.signals import ExitCode
from megapipe.training.resilience.watchdog_process import record_reason

CPU_ALLOCATOR = "can't allocate memory"
"""Part of the message of torch's CPU allocator, which raises a plain RuntimeError."""

ADVICE = (
    "what helps: a smaller batch.micro_size or data.sequence_length, "
    "recompute.method auto or full, more ranks in parallel.pipeline, "
    "parallel.context or parallel.tensor, parallel.sequence together with parallel.tensor, "
    "zero.stage 1 to 3 if there are replicas, a schedule that keeps fewer "
    "micro-batches (1f1b), training.precision bf16, offload.activations, "
    "offload.optimizer or offload.weights; on the last stage recompute.logits"
)

Row = tuple[str, tuple[int, ...]]
"""Row of a table: a name and the bytes in each column."""


class OutOfMemory(RuntimeError):
    """A step ran out of memory. The message names the unit, and lists the tensors that were alive on this rank."""


def is_out_of_memory(error: BaseException | None) -> bool:
    """Return whether an allocator raised the error or one of its causes."""
    while error is not None:
        if isinstance(error, torch.OutOfMemoryError | MemoryError) or CPU_ALLOCATOR in str(error):
            return True
        error = error.__cause__
    return False


@contextmanager
def out_of_memory_reported(stages: Mapping[int, Stage]) -> Iterator[None]:
    """Turn an EngineError in the block into OutOfMemory if an allocator failed. stages: the stages of this rank."""
    try:
        yield
    except EngineError as error:
        report = out_of_memory_report(error, stages)
        if report is None:
            raise
        raise OutOfMemory(report) from error


def out_of_memory_report(error: EngineError, stages: Mapping[int, Stage]) -> str | None:
    """Return the report of a failed step; None if memory was not the reason. stages: the stages of this rank.

    All figures are computed from the state that the failed step left, so a run that does not fail pays nothing.
    """
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
    """Return the storages that autograd keeps for the backward of these pieces: address -> bytes.

    They include weights. Integer tensors, which belong to the micro-batch, are not counted.
    """
    kept: list[Tensor] = []
    for piece in pieces:
        kept += piece.tape.kept if piece.tape is not None else []
        for node in graph_nodes(edge.node for edge in piece.edges):
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
    """Return the unit that the backward of a chain had reached: the last one whose parameters it still needs.

    Autograd runs from the last unit to the first, and frees the tensors that a node saved once the node has run.
    """
    owner = {
        id(parameter): index
        for index, versions in enumerate(stage.units)
        for version in versions
        if isinstance(version, nn.Module)
        for parameter in version.parameters()
    }
    pending = [
        owner[id(variable)]
        for node in graph_nodes(edge.node for edge in piece.edges)
        if _saved_tensors(node)
        for following, _ in node.next_functions
        if id(variable := getattr(following, "variable", None)) in owner
    ]
    return max(pending, default=None)


def _saved_tensors(node: Any) -> list[Tensor] | None:
    """Return the tensors that a node saves for its backward; None if the node has run and freed them."""
    values: list[Any] = []
    try:
        values += getattr(node, "saved_tensors", ())
        for name in dir(node):
            if name.startswith("_saved_"):
                value = getattr(node, name)
                values += value if isinstance(value, list | tuple) else [value]
    except RuntimeError:
        return None
    return [tensor for tensor in values if isinstance(tensor, Tensor)]


def _storages(tensors: Iterable[Tensor]) -> dict[int, int]:
    return {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}


def _state_row(state: UnitState) -> Row:
    weights_in_host = state.in_host and isinstance(state, HostWeights)
    weights = _storages([*state.weights, *([] if weights_in_host else state.weight_shards)])
    master = {} if state.in_host else _storages([state.master])
    sizes = (
        sum(weights.values()),
        sum(master[address] for address in master.keys() - weights.keys()),
        sum(_storages([*state.gradients, *state.gradient_shards]).values()),
        0 if state.in_host else sum(_storages(state.moments.values()).values()),
    )
    return state.name, sizes


def _activation_rows(steps: Sequence[StepState], states: list[UnitState]) -> list[Row]:
    """Return a row per step, stage and micro-batch. Each storage counts in its first row; weights do not count."""
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
    """Return the bytes of the storages that are not in `counted`, and add them to it."""
    new = storages.keys() - counted
    counted |= new
    return sum(storages[address] for address in new)


def _table(heading: str, columns: tuple[str, ...], rows: list[Row]) -> list[str]:
    """Return the lines of a table in MiB, with a total."""
    rows = [*rows, ("total", tuple(sum(values) for values in zip(*(row for _, row in rows), strict=True)))]
    width = max(len(heading), *(len(name) for name, _ in rows))
    lines = [f"  {heading:<{width}}" + "".join(f"{column + ', MiB':>16}" for column in columns)]
    for name, values in rows:
        lines.append(f"  {name:<{width}}" + "".join(f"{value / 2**20:>16,.1f}" for value in values))
    return lines


def _device_lines(device: torch.device) -> list[str]:
    """Return the figures of a GPU's allocator. The allocator of CPUs has none."""
    if device.type != "cuda":
        return []
    free, total = torch.cuda.mem_get_info(device)
    allocated, reserved = torch.cuda.memory_allocated(device), torch.cuda.memory_reserved(device)
    return [
        f"  {device}: {total / 2**20:,.0f} MiB, {free / 2**20:,.0f} free, {reserved / 2**20:,.0f} reserved by this "
        f"process, {allocated / 2**20:,.0f} of it in tensors"
    ]


_STATUSES: dict[type[Exception], ExitCode] = {
    InputError: ExitCode.WRONG_INPUT,
    LossScaleError: ExitCode.NOT_FINITE,
    NonFiniteError: ExitCode.NOT_FINITE,
    SpikeError: ExitCode.SPIKES,
    ReplicasDifferError: ExitCode.REPLICAS_DIFFER,
    OutOfMemory: ExitCode.FAILED,
}
"""Errors whose message says all that a user needs."""

PATIENCE_SECONDS = 10.0
"""Time that a rank waits for the report of the first rank that failed."""


def status_of(error: Exception, start: Start | None = None) -> ExitCode:
    """Report an error on stderr and to torchrun, and return the exit status.

    All ranks give their reason to torchrun, and the first rank that fails prints it. Another rank prints its own
    reason if it is a different one, unless this rank only lost a peer that failed before.

    start: the ranks of this start; None for one process, or if the ranks have not met.
    """
    # torchrun sends SIGTERM to all ranks as soon as one ends; ignore it, so that each ends with its own status.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    starting = start is not None and not start.is_over
    if start is not None and starting:
        error = _end_start_of_all(error, start)
    status = next((code for kind, code in _STATUSES.items() if isinstance(error, kind)), None)
    lost = status is None and _lost_a_peer(error)
    words = str(error) if status is not None or lost else "".join(traceback.format_exception(error)).rstrip()
    record_reason(words)

    def say() -> None:
        if status is not None:
            print_error("\n".join(f"error: {line}" for line in words.splitlines()))
        else:
            print_error(words)

    if start is None:
        say()
    else:
        _report_once(start, words, lost, say, same_reason=starting or status not in (None, ExitCode.FAILED))
    if status is None:
        return ExitCode.PEER_LOST if lost else ExitCode.FAILED
    return status


def _end_start_of_all(error: Exception, start: Start) -> Exception:
    """End the start of all ranks because of an error on this one, and return the error that all ranks report."""
    is_known = isinstance(error, tuple(_STATUSES))
    try:
        start.fail(str(error) if is_known else f"{type(error).__name__}: {error}")
    except LaunchError as reported:
        return reported if is_known else error


def _report_once(start: Start, words: str, lost: bool, say: Callable[[], None], *, same_reason: bool) -> None:
    """Print on the first rank that calls this; the other ranks wait until it has printed.

    same_reason: all ranks fail for the same reason.
    """
    try:
        if start.reports_first():
            say()
            start.publish_report(words)
        else:
            report = start.first_report(PATIENCE_SECONDS)
            if report is None or (report != words and not lost):
                say()
        if same_reason:
            start.leave()
    except dist.DistError:
        # The process that served the store has ended, and the report may be lost.
        say()


def _lost_a_peer(error: BaseException | None) -> bool:
    while error is not None:
        if isinstance(error, CommunicationError):
            return True
        error = error.__cause__ if isinstance(error, EngineError) else None
    return False
