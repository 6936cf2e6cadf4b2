"""A few steps of a run on a layout, with everything that is counted on the way: traffic, state, activations."""

from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from time import sleep
from typing import Any, NamedTuple

from torch import Tensor

from megapipe.config.parallel import DIMENSIONS
from megapipe.config.run import PretrainConfig
from megapipe.engine.host_memory import Swaps
from megapipe.engine.reductions import GradientReduction
from megapipe.layers.context import BertContext
from megapipe.layout.units import StateBytes
from megapipe.parallel.groups import Work
from megapipe.parallel.in_process import InProcessMesh
from megapipe.parallel.mesh import Mesh
from megapipe.parallel.unit_state import UnitState
from megapipe.schedules import Schedule
from megapipe.schedules.actions import Action
from megapipe.training.loop.replica import Replica
from tests.support.counting_groups import Traffic, counted, counted_exchanges, counted_links
from tests.support.gpt_runs import RankRun, keep_first_gradients, load_batches, shards, train_step
from tests.support.live_bytes import LiveBytes

COUNTED_STEP = 1
"""The step whose traffic and activations are counted: the first one after everything has been allocated."""

SETTLING_SECONDS = 0.005
"""gloo's threads let go of a tensor a moment after its exchange has ended."""
SETTLING_BETWEEN_STEPS = 0.1
"""The same before the counted step: memory that is released later would be missing from every difference."""


class Sample(NamedTuple):
    """Bytes alive after one action, in addition to those that live between steps, by kind.

    weights, gradients: whole ones of units whose state replicas share out. summands: other ranks' parts of such
    gradients. reloaded: optimizer state that is on the device for its update. activations: everything else.
    """

    weights: int
    gradients: int
    summands: int
    reloaded: int
    activations: int


@dataclass(frozen=True)
class LayoutRun:
    """The results of one rank, and its counts.

    schedule: what the engine ran. traffic: of one step. state: bytes of the unit states between steps, on the device
    or not. lasting: all bytes that live then. host: those of them in buffers for activations that are away. peak: of
    each part of a `Sample` the most that any action of the step left. together: the most of all parts at once.
    samples: every action of the step, with what it left.
    predictions: of each micro-batch, hidden tokens of a sample that a BERT's head works on; None for other models.
    """

    run: RankRun
    schedule: Schedule
    traffic: Traffic
    state: StateBytes
    lasting: int
    host: int
    peak: Sample
    together: int
    samples: list[tuple[Action, Sample]]
    predictions: list[int] | None


def run_layout(mesh: Mesh, config: PretrainConfig) -> LayoutRun:
    """Train on this rank for two steps as pretrain_gpt.py or pretrain_bert.py would, counting.

    Of ranks that are threads links are not counted, and what their groups hand over counts as activations.
    """
    sizes = {name: mesh.size(name) for name in DIMENSIONS}
    config = replace(config, parallel=replace(config.parallel, **sizes, timeout_seconds=30.0))
    traffic, live = Traffic(), LiveBytes(numbers=False)
    with ExitStack() as counting:
        if not isinstance(mesh, InProcessMesh):
            counting.enter_context(counted_links(traffic))
            counting.enter_context(counted_exchanges(traffic))
        with live:
            replica = Replica(config, counted(mesh, traffic))
        gradients = keep_first_gradients(replica)
        batches = load_batches(replica, config, mesh, 2)
        results, lasting, host = [], 0, 0
        for step, batch in enumerate(batches):
            if step == COUNTED_STEP:
                traffic.clear()
                sleep(SETTLING_BETWEEN_STEPS)
                state, lasting, host = (
                    state_bytes(replica.states()),
                    live.current,
                    replica.assembly.swaps.pool.num_bytes,
                )
                samples = sampled(replica, live)
            with live:
                results.append(train_step(replica, config, batch, step))
            if step == COUNTED_STEP:
                bytes_of_actions = [sample for _, sample in samples]
                peak, together = (
                    Sample(*map(max, zip(*bytes_of_actions, strict=True))),
                    max(map(sum, bytes_of_actions)),
                )
                counted_traffic, hidden = traffic.copy(), hidden_tokens(batch.contexts)
    states = replica.states()
    run = RankRun(results, list(gradients.values()), shards(states, [state.master for state in states]))
    return LayoutRun(run, replica.schedule, counted_traffic, state, lasting, host, peak, together, samples, hidden)


def hidden_tokens(contexts: Sequence[object]) -> list[int] | None:
    """Return each micro-batch's tokens per sample that a BERT's head predicts on this rank, if it has the head."""
    counts = [
        each.positions.shape[1] for each in contexts if isinstance(each, BertContext) and each.positions is not None
    ]
    return counts or None


def sampled(replica: Replica, live: LiveBytes) -> list[tuple[Action, Sample]]:
    """Return a list that receives the bytes alive after every later action, once its messages have left.

    That waiting cannot hang: schedules are proved free of deadlock where every send waits for its receive.
    """
    engine, swaps, states = replica.engine, replica.assembly.swaps, replica.states()
    senders = [*engine.transfers.send_activation.values(), *engine.transfers.send_gradient.values()]
    samples: list[tuple[Action, Sample]] = []

    def now(reductions: Sequence[Work]) -> list[int]:
        kept = state_bytes(states)
        parts = [kept.weights, kept.gradients, summands(reductions), reloaded(swaps, states)]
        return [*parts, live.current - swaps.pool.num_bytes]

    before = now([])

    def sampling(run: Any, action: Action) -> Any:
        def sampled_run(step: Any) -> None:
            run(step)
            for sender in senders:
                sender.drain()
            sleep(SETTLING_SECONDS)
            *parts, total = (current - first for current, first in zip(now(step.reductions), before, strict=True))
            samples.append((action, Sample(*parts, total - sum(parts))))

        return sampled_run

    engine._sections = {
        name: [replace(each, run=sampling(each.run, each.action)) for each in instructions]
        for name, instructions in engine._compiled.items()
    }
    return samples


def state_bytes(states: Sequence[UnitState]) -> StateBytes:
    """Bytes of the buffers of unit states that have memory, views of another not counted."""
    return StateBytes(
        weights=storage_bytes(each for state in states for each in (*state.weights, *state.weight_shards)),
        master=sum(state.master.nbytes for state in states if state.working_copy is not None),
        gradients=storage_bytes(each for state in states for each in (*state.gradients, *state.gradient_shards)),
        moments=sum(each.nbytes for state in states for each in state.moments.values()),
    )


def storage_bytes(tensors: Iterable[Tensor]) -> int:
    """Return the bytes of the storages of tensors, each counted once."""
    storages = {tensor.untyped_storage()._cdata: tensor.untyped_storage() for tensor in tensors}
    return sum(storage.nbytes() for storage in storages.values())


def summands(reductions: Sequence[Work]) -> int:
    """Bytes that sums into shards hold until they are over: gloo takes the other ranks' parts into memory of its own,
    and gradients that travel in another precision are a copy."""
    total = 0
    for each in reductions:
        if isinstance(each, GradientReduction) and each._summing is not None:
            total += each._sent.nbytes // each._shards.size * (each._shards.size - 1)
            total += 0 if each._sent is each._whole else each._sent.nbytes
    return total


def reloaded(swaps: Swaps, states: Sequence[UnitState]) -> int:
    """Bytes of optimizer state that are on the device for an update, on their way there or back."""
    leaving = {id(swaps._leaving.owner)} if swaps._leaving is not None else set()
    here = leaving | swaps._home.keys()
    return sum(each.nbytes for state in states if id(state) in here for each in state.update_buffers().values())
