"""Copies run alongside the compute, and a rank holds on its device what its schedule says."""

import threading
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import accumulate

import pytest
import torch

from megapipe.config.memory import OffloadConfig
from megapipe.config.run import PretrainConfig
from megapipe.engine.engine import Engine
from megapipe.engine.forwards import Closure
from megapipe.engine.host_memory import Copy, Move, Swaps, ThreadCopies
from megapipe.engine.program import Instruction
from megapipe.engine.step import EngineError, StepInput, StepState
from megapipe.engine.trace import Recorder
from megapipe.engine.transfers import Transfers
from megapipe.parallel.mesh import Mesh
from megapipe.parallel.unit_state import UnitState
from megapipe.schedules import Kind
from megapipe.schedules.actions import COMPUTE_KINDS
from megapipe.schedules.schedule import SectionName
from megapipe.spec.layers import model_layers
from megapipe.training.loop.batches import open_loader, split_samples
from megapipe.training.loop.replica import Replica
from tests.optim.test_optimizer import SPECS
from tests.spec.sizes import predicted_bytes
from tests.support.gpt_runs import GPT2_SHAPE, make_config, write_shard
from tests.support.live_bytes import LiveBytes
from tests.support.meshes import run_threads

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> PretrainConfig:
    corpus = write_shard(tmp_path_factory.mktemp("corpus"))
    base = make_config(corpus, replace(GPT2_SHAPE, num_layers=4, attention="unfused"), schedule={"name": "gpipe"})
    base.offload = OffloadConfig(activations="blocks")
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
    """Copies that last until something has been computed since they were started, however long that takes."""

    def __init__(self, name: str, progress: Progress) -> None:
        super().__init__(name)
        self._progress = progress
        self._starts: deque[int] = deque()
        self.overlapped: list[bool] = []

    def start(self, moves: Sequence[Move]) -> Copy:
        self._starts.append(self._progress.done)
        return super().start(moves)

    def copy(self, moves: Sequence[Move]) -> None:
        self.overlapped.append(self._progress.wait_beyond(self._starts.popleft()))
        super().copy(moves)


class CountingRecorder(Recorder):
    """Notifies a Progress of every compute action that has run."""

    progress: Progress

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
    batch = open_loader(config, mesh, replica, split_samples(config, "train")).load(0)
    return [StepInput(step, batch.contexts, batch.token_counts, 1e-3) for step in range(2)]


def slow_run(mesh: Mesh, config: PretrainConfig) -> tuple[list[float], list[bool], list[str]]:
    config = replace(config, parallel=replace(config.parallel, data=1))
    progress = Progress()
    out, back = SlowCopies("offload", progress), SlowCopies("reload", progress)
    replica = Replica(config, mesh, Swaps(CPU, out, back))
    recorder = CountingRecorder(replica.schedule, 0, CPU)
    recorder.progress = progress
    replica.engine.record(recorder)
    losses = [replica.engine.run(each).loss for each in two_steps(replica, config, mesh)]
    return losses, out.overlapped + back.overlapped, [event.action for event in recorder.events()]


def plain_run(mesh: Mesh, config: PretrainConfig) -> list[float]:
    config = replace(config, offload=OffloadConfig(), parallel=replace(config.parallel, data=1))
    replica = Replica(config, mesh)
    return [replica.engine.run(each).loss for each in two_steps(replica, config, mesh)]


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "zb_h1"])
def test_compute_goes_on_while_copies_are_under_way(config: PretrainConfig, schedule: str) -> None:
    """A copy ends only once an action that follows its start has run: were it waited for, the run would hang."""
    config = replace(config, schedule=replace(config.schedule, name=schedule))
    losses, overlapped, events = run_threads({}, slow_run, config)[0]
    moved = sum(event.startswith(("OF", "RE")) for event in events)
    assert moved == len(overlapped) > 2 * 2 * 8
    assert all(overlapped)
    assert losses == run_threads({}, plain_run, config)[0]


def counted_run(mesh: Mesh, config: PretrainConfig) -> tuple[int, int, int]:
    """Return the peak bytes allocated in the second step, bytes of host memory, and the most units away at once."""
    config = replace(config, parallel=replace(config.parallel, data=1))
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


def states(count: int, dtype: torch.dtype) -> list[UnitState]:
    made = [UnitState(f"layer{index}", SPECS, compute_dtype=dtype, in_host=True) for index in range(count)]
    for state in made:
        state.initialize(0)
        for name in ("first", "second"):
            state.add_moment(name, slice(0, state.table.num_elements))
    return made


@pytest.mark.parametrize(("dtype", "buffers"), [(torch.float32, 2), (torch.bfloat16, 3)], ids=["fp32", "bf16"])
def test_two_states_are_on_device_and_updates_reach_host(dtype: torch.dtype, buffers: int) -> None:
    """buffers: moments, and the master of bf16."""
    swaps, made = Swaps(CPU), states(5, dtype)
    at_home = [state.update_buffers() for state in made]
    masters = [state.master.clone() for state in made]
    with LiveBytes() as live:
        swaps.reload_state(made[0])
        for index, state in enumerate(made):
            if index + 1 < len(made):
                swaps.reload_state(made[index + 1])
            swaps.arrive(state)
            assert not state.in_host
            state.moments["first"].add_(index + 1)
            state.master.add_(0.5)
            swaps.offload_state(state)
        swaps.end_section()
    assert live.current == 0
    assert live.peak == 2 * buffers * made[0].table.num_elements * 4
    for index, state in enumerate(made):
        assert state.in_host
        assert all(state.update_buffers()[name] is buffer for name, buffer in at_home[index].items())
        assert torch.equal(state.moments["first"], torch.full_like(state.moments["first"], index + 1))
        assert torch.equal(state.master, (masters[index].float() + 0.5).to(state.master.dtype))


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
    config = replace(config, parallel=replace(config.parallel, data=1))
    replica = Replica(config, mesh, Swaps(CPU, BrokenCopies("offload")))
    with pytest.raises(EngineError) as error:
        replica.engine.run(two_steps(replica, config, mesh)[0])
    return str(error.value)


def test_failed_copies_name_the_action_that_waited(config: PretrainConfig) -> None:
    message = run_threads({}, broken_run, config)[0]
    assert "OFFLOAD stage 0 unit 2 microbatch 0" in message
    assert message.endswith("the copy engine has failed")


def test_an_engine_without_swaps_refuses_a_schedule_that_moves(config: PretrainConfig) -> None:
    def bare(mesh: Mesh) -> None:
        replica = Replica(replace(config, parallel=replace(config.parallel, data=1)), mesh)
        Engine(replica.schedule, 0, replica.stages, Transfers({}, {}, {}, {}), replica.engine.reductions)

    with pytest.raises(EngineError, match="gpipe copies to host memory, but this engine was created without swaps"):
        run_threads({}, bare)
