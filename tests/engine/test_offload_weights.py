"""Weights in host memory: the bytes of them on the device, and copies that run alongside the compute."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from megapipe.config.memory import OffloadConfig
from megapipe.config.run import PretrainConfig
from megapipe.engine.engine import Engine
from megapipe.engine.host_memory import Copy, Move, Swaps, ThreadCopies
from megapipe.engine.step import EngineError, StepInput
from megapipe.engine.transfers import Transfers
from megapipe.layout.stages import VOCABULARY_ALIGNMENT
from megapipe.layout.units import flat_elements
from megapipe.parallel.mesh import Mesh
from megapipe.parallel.unit_state import HostWeights, UnitState, is_allocated
from megapipe.schedules import Kind
from megapipe.schedules.actions import COMPUTE_KINDS
from megapipe.spec.layers import model_layers
from megapipe.spec.ops import FULL_BYTES
from megapipe.training.loop.replica import Replica
from tests.engine.test_offload import CPU, CountingRecorder, Progress, SlowCopies, two_steps
from tests.optim.test_optimizer import SPECS
from tests.support.gpt_runs import GPT2_SHAPE, make_config, write_shard
from tests.support.live_bytes import LiveBytes
from tests.support.meshes import run_threads

LAYERS = 4
WEIGHT_BYTES = {"fp32": 4, "bf16": 2}
STATE_BYTES = {"fp32": 8, "bf16": 12}
"""Bytes per element that updates change: Adam's two moments, and the fp32 master weight of bf16."""
ONE_COEFFICIENT = 4
"""Bytes of what gradients are multiplied by where nothing is clipped."""


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> PretrainConfig:
    corpus = write_shard(tmp_path_factory.mktemp("corpus"))
    model = replace(GPT2_SHAPE, num_layers=LAYERS, tie_embeddings=False)
    base = make_config(corpus, model, schedule={"name": "gpipe"})
    base.parallel = replace(base.parallel, data=1)
    base.offload = OffloadConfig(optimizer=True, weights=True)
    return base


class Counted(ThreadCopies):
    """Counts the bytes of its copies, and looks at something whenever one starts: memory has been made for it then."""

    num_bytes = 0
    look: Callable[[], None] | None = None

    def start(self, moves: Sequence[Move]) -> Copy:
        self.num_bytes += sum(target.nbytes for target, _ in moves)
        if self.look is not None:
            self.look()
        return super().start(moves)


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


def counted_run(mesh: Mesh, config: PretrainConfig) -> Found:
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
    config = replace(
        config,
        model=replace(config.model, tie_embeddings=tied),
        training=replace(config.training, precision=precision),  # type: ignore[arg-type]
        offload=replace(config.offload, weight_buffers=buffers),
    )
    counts = run_threads({}, counted_run, config)[0]
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


@pytest.mark.parametrize(("dtype", "precision"), [(torch.float32, "fp32"), (torch.bfloat16, "bf16")])
def test_updates_use_two_units_weights_and_reach_the_host(dtype: torch.dtype, precision: str) -> None:
    swaps, states = Swaps(CPU), [HostWeights(f"layer{index}", SPECS, compute_dtype=dtype) for index in range(4)]
    for state in states:
        state.initialize(0)
        for name in ("first", "second"):
            state.add_moment(name, slice(0, state.table.num_elements))
    before, homes = states[0].master.clone(), [state.weight_shards[0] for state in states]
    with LiveBytes() as live:
        swaps.reload_state(states[0])
        for index, state in enumerate(states):
            for following in states[index + 1 : index + 2]:
                swaps.reload_state(following)
            swaps.arrive(state)
            assert state.weight_shards[0] is not homes[index]
            state.begin_update(1).add_(0.5)
            state.publish()
            swaps.offload_state(state)
        swaps.end_section()
        assert live.current == 0
        assert live.peak == 2 * flat_elements(SPECS) * (WEIGHT_BYTES[precision] + STATE_BYTES[precision])
    for state, home in zip(states, homes, strict=True):
        assert state.weight_shards[0] is home
        state.gather_weights(0, swaps)
        state.await_weights(0)
        assert torch.equal(state.weights[0], (before + 0.5).to(dtype))
        state.release_weights(0)


class PrefetchedCopies(SlowCopies):
    """Slow copies, except those that no compute can hide.

    hidden: for each copy, in order, whether an action is computed between its start and its use.
    """

    hidden: Sequence[bool] = ()

    def __init__(self, name: str, progress: Progress) -> None:
        super().__init__(name, progress)
        self._made = 0

    def copy(self, moves: Sequence[Move]) -> None:
        slow = self.hidden[self._made % len(self.hidden)]
        self._made += 1
        if slow:
            super().copy(moves)
        else:
            self._starts.popleft()
            ThreadCopies.copy(self, moves)


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


def slow_run(mesh: Mesh, config: PretrainConfig) -> tuple[list[float], list[bool], list[bool], list[Tensor]]:
    progress = Progress()
    back = PrefetchedCopies("reload", progress)
    replica = Replica(config, mesh, Swaps(CPU, None, back))
    back.hidden = copies_in(replica)
    recorder = CountingRecorder(replica.schedule, 0, CPU)
    recorder.progress = progress
    replica.engine.record(recorder)
    steps = two_steps(replica, config, mesh)
    losses = [replica.engine.run(each).loss for each in steps]
    back.hidden = [False]
    return losses, back.overlapped, copies_in(replica), evaluated(replica, steps[0])


def evaluated(replica: Replica, step: StepInput) -> list[Tensor]:
    return [output for outputs in replica.forward_engine().run(step).outputs for output in outputs]


def plain_run(mesh: Mesh, config: PretrainConfig) -> tuple[list[float], list[Tensor]]:
    replica = Replica(replace(config, offload=OffloadConfig()), mesh)
    steps = two_steps(replica, config, mesh)
    return [replica.engine.run(each).loss for each in steps], evaluated(replica, steps[0])


@pytest.mark.parametrize("schedule", ["gpipe", "zb_h1"])
def test_weights_come_while_the_unit_before_computes(config: PretrainConfig, schedule: str) -> None:
    """A copy ends only once an action that follows its start has run: were it waited for, the run would hang. Only a
    step's first gather has no compute to hide it. Evaluation brings weights the same way."""
    config = replace(config, schedule=replace(config.schedule, name=schedule))
    losses, overlapped, hidden, outputs = run_threads({}, slow_run, config)[0]
    gathers = hidden[: hidden.index(False, 1)]
    assert gathers == [False] + [True] * (len(gathers) - 1)
    assert overlapped == [True] * (2 * (len(gathers) - 1))
    expected, expected_outputs = run_threads({}, plain_run, config)[0]
    assert losses == expected
    assert all(torch.equal(*pair) for pair in zip(outputs, expected_outputs, strict=True))


def test_an_engine_without_swaps_refuses_weights_in_host_memory(config: PretrainConfig) -> None:
    def bare(mesh: Mesh) -> None:
        replica = Replica(config, mesh)
        schedule = replica.forward_engine().schedule
        Engine(schedule, 0, replica.stages, Transfers({}, {}, {}, {}), replica.engine.reductions)

    with pytest.raises(EngineError, match="gpipe copies to host memory, but this engine was created without swaps"):
        run_threads({}, bare)
