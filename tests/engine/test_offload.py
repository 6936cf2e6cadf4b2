"""Activations, optimizer state and weights in host memory: bytes on the device, and copies alongside the compute."""

import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from typing import Any

import pytest
import torch
from torch import Tensor

from megapipe.config.memory import OffloadConfig
from megapipe.config.run import PretrainConfig
from megapipe.engine.engine import Engine
from megapipe.engine.forwards import Closure
from megapipe.engine.host_memory import Copy, Move, Swaps, ThreadCopies
from megapipe.engine.program import Instruction
from megapipe.engine.step import EngineError, StepInput, StepState
from megapipe.engine.trace import Recorder
from megapipe.engine.transfers import Transfers
from megapipe.layout.stages import VOCABULARY_ALIGNMENT
from megapipe.layout.units import flat_elements
from megapipe.parallel.mesh import Mesh
from megapipe.parallel.unit_state import HostWeights, UnitState, is_allocated
from megapipe.schedules import Kind
from megapipe.schedules.actions import COMPUTE_KINDS
from megapipe.schedules.schedule import SectionName
from megapipe.spec.layers import model_layers
from megapipe.spec.ops import FULL_BYTES
from megapipe.training.loop.replica import Replica
from tests.optim.test_optimizer import SPECS
from tests.spec.sizes import predicted_bytes
from tests.support.gpt_runs import GPT2_SHAPE, load_batches, make_config, write_shard
from tests.support.live_bytes import LiveBytes
from tests.support.meshes import run_threads

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> PretrainConfig:
    corpus = write_shard(tmp_path_factory.mktemp("corpus"))
    base = make_config(corpus, replace(GPT2_SHAPE, num_layers=4, attention="unfused"), schedule={"name": "gpipe"})
    base.offload, base.parallel = OffloadConfig(activations="blocks"), replace(base.parallel, data=1)
    return base


class Progress:
    """How many compute actions have run."""

    def __init__(self) -> None:
        self.done = 0
        self._changed = threading.Condition()

    def advance(self) -> None:
        with self._changed:
            self.done += 1
            self._changed.notify_all()

    def wait_beyond(self, count: int) -> bool:
        with self._changed:
            return self._changed.wait_for(lambda: self.done > count, timeout=60)


class SlowCopies(ThreadCopies):
    """Copies that last until something has been computed since they were started, however long that takes.

    hidden: for each copy, in order, whether an action is computed between its start and its use; the others are fast.
    """

    hidden: Sequence[bool] = (True,)

    def __init__(self, name: str, progress: Progress) -> None:
        super().__init__(name)
        self._progress = progress
        self._starts: deque[int] = deque()
        self._made = 0
        self.overlapped: list[bool] = []

    def start(self, moves: Sequence[Move]) -> Copy:
        self._starts.append(self._progress.done)
        return super().start(moves)

    def copy(self, moves: Sequence[Move]) -> None:
        start, slow = self._starts.popleft(), self.hidden[self._made % len(self.hidden)]
        self._made += 1
        if slow:
            self.overlapped.append(self._progress.wait_beyond(start))
        super().copy(moves)


class CountingRecorder(Recorder):
    """Notifies a Progress of every compute action of a replica that has run."""

    def __init__(self, replica: Replica, progress: Progress) -> None:
        super().__init__(replica.schedule, 0, CPU)
        self.progress = progress
        replica.engine.record(self)

    def instructions(self, section: SectionName, instructions: Iterable[Instruction]) -> list[Instruction]:
        return [
            replace(each, run=self._counted(each.run)) if each.action.kind in COMPUTE_KINDS else each
            for each in super().instructions(section, instructions)
        ]

    def _counted(self, run: Closure) -> Closure:
        def counted(step: StepState) -> None:
            run(step)
            self.progress.advance()

        return counted


def two_steps(replica: Replica, config: PretrainConfig, mesh: Mesh) -> list[StepInput]:
    (batch,) = load_batches(replica, config, mesh)
    return [StepInput(step, batch.contexts, batch.token_counts, 1e-3) for step in range(2)]


def slow_run(mesh: Mesh, config: PretrainConfig) -> tuple[list[float], list[bool], list[str]]:
    progress = Progress()
    out, back = SlowCopies("offload", progress), SlowCopies("reload", progress)
    replica = Replica(config, mesh, Swaps(CPU, out, back))
    recorder = CountingRecorder(replica, progress)
    losses = [replica.engine.run(each).loss for each in two_steps(replica, config, mesh)]
    return losses, out.overlapped + back.overlapped, [event.action for event in recorder.events()]


def evaluated(replica: Replica, step: StepInput) -> list[Tensor]:
    return [output for outputs in replica.forward_engine().run(step).outputs for output in outputs]


def plain_run(mesh: Mesh, config: PretrainConfig) -> tuple[list[float], list[Tensor]]:
    replica = Replica(replace(config, offload=OffloadConfig()), mesh)
    steps = two_steps(replica, config, mesh)
    return [replica.engine.run(each).loss for each in steps], evaluated(replica, steps[0])


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "zb_h1"])
def test_compute_goes_on_while_copies_are_under_way(config: PretrainConfig, schedule: str) -> None:
    """A copy ends only once an action that follows its start has run: were it waited for, the run would hang."""
    config = replace(config, schedule=replace(config.schedule, name=schedule))
    losses, overlapped, events = run_threads({}, slow_run, config)[0]
    moved = sum(event.startswith(("OF", "RE")) for event in events)
    assert moved == len(overlapped) > 2 * 2 * 8
    assert all(overlapped)
    assert losses == run_threads({}, plain_run, config)[0][0]


def counted_run(mesh: Mesh, config: PretrainConfig) -> tuple[int, int, int]:
    """Return the peak bytes allocated in the second step, bytes of host memory, and the most units away at once."""
    replica = Replica(config, mesh, swaps := Swaps(CPU))
    first, second = two_steps(replica, config, mesh)
    replica.engine.run(first)
    with LiveBytes() as live:
        replica.engine.run(second)
    moves = [a.kind for a in replica.schedule.actions("body", 0) if a.kind in (Kind.OFFLOAD, Kind.RELOAD)]
    away = max(accumulate((1 if kind == Kind.OFFLOAD else -1 for kind in moves), initial=0))
    return live.peak, swaps.pool.num_bytes, away


@pytest.mark.parametrize("prefetch", [1, 2])
def test_moved_activations_leave_the_device_for_the_host(config: PretrainConfig, prefetch: int) -> None:
    """gpipe on one rank: of all blocks but the last micro-batch's last ones the activations leave; on the device are
    all heads', and of the blocks the one in use, those that wait and those that never left."""
    config = replace(config, offload=OffloadConfig(activations="blocks", prefetch=prefetch))
    shape = config.batch.micro_size, config.data.sequence_length
    layers = model_layers(config.model)
    kept = {layer.kind: predicted_bytes(config.model, layer, *shape, "fp32", "unfused") for layer in layers}
    peak, host, away = run_threads({}, counted_run, config)[0]
    microbatches = config.batch.global_size // config.batch.micro_size
    assert away == 4 * microbatches
    assert host == away * kept["block"]
    expected = microbatches * kept["head"] + (1 + prefetch) * kept["block"]
    everything = microbatches * (kept["head"] + 4 * kept["block"])
    assert 0.9 * expected < peak < 1.1 * expected + 2 * kept["block"] < 0.5 * everything


@pytest.mark.parametrize("weights", [False, True], ids=["optimizer", "weights"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_two_states_are_on_device_and_updates_reach_host(dtype: torch.dtype, weights: bool) -> None:
    """Moments, the master of bf16, and weights if they too are in host memory."""
    kind: Any = HostWeights if weights else partial(UnitState, in_host=True)
    swaps, states = Swaps(CPU), [kind(f"layer{index}", SPECS, compute_dtype=dtype) for index in range(5)]
    for state in states:
        state.initialize(0)
        for name in ("first", "second"):
            state.add_moment(name, slice(0, state.table.num_elements))
    at_home = [state.update_buffers() for state in states]
    masters = [state.master.clone() for state in states]
    with LiveBytes() as live:
        swaps.reload_state(states[0])
        for index, state in enumerate(states):
            for following in states[index + 1 : index + 2]:
                swaps.reload_state(following)
            swaps.arrive(state)
            assert not any(buffer is at_home[index][name] for name, buffer in state.update_buffers().items())
            state.moments["first"].add_(index + 1)
            state.begin_update(1).add_(0.5)
            state.publish()
            swaps.offload_state(state)
        swaps.end_section()
    assert live.current == 0
    moved = (8 if dtype == torch.float32 else 12) + (dtype.itemsize if weights else 0)
    assert live.peak == 2 * moved * states[0].table.num_elements
    for index, state in enumerate(states):
        assert state.in_host
        assert all(state.update_buffers()[name] is buffer for name, buffer in at_home[index].items())
        assert torch.equal(state.moments["first"], torch.full_like(state.moments["first"], index + 1))
        updated = (masters[index].float() + 0.5).to(state.master.dtype)
        assert torch.equal(state.master, updated)
        if weights:
            state.gather_weights(0, swaps)
            state.await_weights(0)
            assert torch.equal(state.weights[0], updated.to(dtype))
            state.release_weights(0)


def test_state_on_the_device_leaves_at_its_first_update() -> None:
    swaps = Swaps(CPU)
    state = UnitState("layer", SPECS, compute_dtype=torch.bfloat16)
    swaps.reload_state(state)
    swaps.arrive(state)
    state.moments = {"first": torch.ones(state.table.num_elements)}
    on_device = state.update_buffers()
    swaps.offload_state(state)
    swaps.end_section()
    assert state.in_host
    for name, buffer in state.update_buffers().items():
        assert buffer is not on_device[name]
        assert torch.equal(buffer, on_device[name])


class BrokenCopies(ThreadCopies):
    def copy(self, moves: Sequence[Move]) -> None:
        raise RuntimeError("the copy engine has failed")


def broken_run(mesh: Mesh, config: PretrainConfig) -> str:
    replica = Replica(config, mesh, Swaps(CPU, BrokenCopies("offload")))
    with pytest.raises(EngineError) as error:
        replica.engine.run(two_steps(replica, config, mesh)[0])
    return str(error.value)


def test_failed_copies_name_the_action_that_waited(config: PretrainConfig) -> None:
    message = run_threads({}, broken_run, config)[0]
    assert "OFFLOAD stage 0 unit 2 microbatch 0" in message
    assert message.endswith("the copy engine has failed")


# Weights in host memory.


WEIGHT_BYTES = {"fp32": 4, "bf16": 2}
STATE_BYTES = {"fp32": 8, "bf16": 12}
"""Bytes per element that updates change: Adam's two moments, and the fp32 master weight of bf16."""
ONE_COEFFICIENT = 4
"""Bytes of what gradients are multiplied by where nothing is clipped."""


class Counted(ThreadCopies):
    """Counts the bytes of its copies, and looks at something whenever one starts: memory has been made for it then."""

    num_bytes = 0
    look: Callable[[], None] | None = None

    def start(self, moves: Sequence[Move]) -> Copy:
        self.num_bytes += sum(target.nbytes for target, _ in moves)
        if self.look is not None:
            self.look()
        return super().start(moves)


def with_weights(config: PretrainConfig) -> PretrainConfig:
    offload = OffloadConfig(optimizer=True, weights=True)
    return replace(config, model=replace(config.model, tie_embeddings=False), offload=offload)


@dataclass
class Found:
    """Counts of one replica. units, weights: most units whose weights were on the device at once in a second step, and
    most bytes of these. gathered: bytes of the step's gathers. copied_in, copied_out: of all its copies. created: live
    bytes of a new replica, new_home those of them in host memory, and home those after the step."""

    created: int
    new_home: int
    units: int = 0
    weights: int = 0
    gathered: int = 0
    copied_in: int = 0
    copied_out: int = 0
    home: int = 0


def counted_weights(mesh: Mesh, config: PretrainConfig) -> Found:
    out, back = Counted("offload"), Counted("reload")
    with LiveBytes() as live:
        replica = Replica(config, mesh, Swaps(CPU, out, back))
        created = live.current
    states = replica.states()
    moving = [state.weights[0] for state in states if isinstance(state, HostWeights)]
    counts = Found(created, home_bytes(states))
    first, second = two_steps(replica, config, mesh)
    replica.engine.run(first)
    copied_in, copied_out = back.num_bytes, out.num_bytes

    def look() -> None:
        there = [weights.nbytes for weights in moving if is_allocated(weights)]
        counts.units, counts.weights = max(counts.units, len(there)), max(counts.weights, sum(there))

    back.look = look
    replica.engine.run(second)
    assert not any(is_allocated(weights) for weights in moving)
    counts.copied_in, counts.copied_out = back.num_bytes - copied_in, out.num_bytes - copied_out
    counts.home = home_bytes(states)
    gathers = [action for action in replica.schedule.actions("body", 0) if action.kind == Kind.GATHER_WEIGHTS]
    counts.gathered = sum(replica.stages[each.stage].states[each.unit].weights[0].nbytes for each in gathers)
    return counts


def home_bytes(states: Sequence[UnitState]) -> int:
    return sum(buffer.nbytes for state in states for buffer in state.update_buffers().values() if state.in_host)


@pytest.mark.parametrize(("precision", "buffers", "tied"), [("fp32", 2, False), ("bf16", 1, True), ("bf16", 3, False)])
def test_no_more_units_than_buffers_are_on_the_device(
    config: PretrainConfig, precision: str, buffers: int, tied: bool
) -> None:
    config = with_weights(config)
    config = replace(
        config,
        model=replace(config.model, tie_embeddings=tied),
        training=replace(config.training, precision=precision),  # type: ignore[arg-type]
        offload=replace(config.offload, weight_buffers=buffers),
    )
    counts = run_threads({}, counted_weights, config)[0]
    layers = model_layers(config.model)
    table = layers[0].parameters["word.weight"]
    units = [[each for each in layer.parameters.values() if not tied or each.name != table.name] for layer in layers]
    sizes = [flat_elements(unit, alignment=VOCABULARY_ALIGNMENT) for unit in units]
    shared = flat_elements([table], alignment=VOCABULARY_ALIGNMENT) if tied else 0
    weight, state = WEIGHT_BYTES[precision], STATE_BYTES[precision]
    gradients, home = FULL_BYTES * (sum(sizes) + 2 * shared), (weight + state) * sum(sizes) + state * shared
    assert (counts.units, counts.weights) == (buffers, weight * sum(sorted(sizes)[-buffers:]))
    assert counts.created == gradients + weight * shared + counts.new_home + ONE_COEFFICIENT
    assert (counts.home, counts.copied_out) == (home, home)
    assert counts.copied_in == home + counts.gathered


def copies_in(replica: Replica) -> list[bool]:
    """For each copy in of a step, whether something is computed before it is used; updates compute nothing."""
    actions = list(replica.schedule.actions("body", 0))
    rows = []
    for at, action in enumerate(actions):
        if action.kind == Kind.RELOAD:
            rows.append(False)
        elif action.kind == Kind.GATHER_WEIGHTS:
            following = next(each for each in actions[at:] if each.kind in COMPUTE_KINDS)
            rows.append(following[1:3] != action[1:3])
    return rows


def slow_weights(mesh: Mesh, config: PretrainConfig) -> tuple[list[float], list[bool], list[bool], list[Tensor]]:
    progress = Progress()
    back = SlowCopies("reload", progress)
    replica = Replica(config, mesh, Swaps(CPU, None, back))
    back.hidden = copies_in(replica)
    CountingRecorder(replica, progress)
    steps = two_steps(replica, config, mesh)
    losses = [replica.engine.run(each).loss for each in steps]
    back.hidden = [False]
    return losses, back.overlapped, copies_in(replica), evaluated(replica, steps[0])


@pytest.mark.parametrize("schedule", ["gpipe", "zb_h1"])
def test_weights_come_while_the_unit_before_computes(config: PretrainConfig, schedule: str) -> None:
    """A copy ends only once an action that follows its start has run: were it waited for, the run would hang. Only a
    step's first gather has no compute to hide it. Evaluation brings weights the same way."""
    config = replace(with_weights(config), schedule=replace(config.schedule, name=schedule))
    losses, overlapped, hidden, outputs = run_threads({}, slow_weights, config)[0]
    gathers = hidden[: hidden.index(False, 1)]
    assert gathers == [False] + [True] * (len(gathers) - 1)
    assert overlapped == [True] * (2 * (len(gathers) - 1))
    expected, expected_outputs = run_threads({}, plain_run, config)[0]
    assert losses == expected
    assert all(torch.equal(*pair) for pair in zip(outputs, expected_outputs, strict=True))


@pytest.mark.parametrize("offload", [OffloadConfig(activations="blocks"), OffloadConfig(optimizer=True, weights=True)])
def test_an_engine_without_swaps_refuses_a_schedule_that_moves(config: PretrainConfig, offload: OffloadConfig) -> None:
    """Weights come even in a forward."""

    def bare(mesh: Mesh) -> None:
        replica = Replica(replace(config, offload=offload), mesh)
        schedule = replica.forward_engine().schedule if offload.weights else replica.schedule
        Engine(schedule, 0, replica.stages, Transfers({}, {}, {}, {}), replica.engine.reductions)

    with pytest.raises(EngineError, match="gpipe copies to host memory, but this engine was created without swaps"):
        run_threads({}, bare)
