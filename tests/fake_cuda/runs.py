"""Runs of the product on devices that are not there. Only forks of the fake server import this module.

It is imported before any stand-in is in place; `connected` puts them there.
"""

import functools
import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch._dynamo  # FakeTensorMode imports it and what follows at its first use, which would be in every fork
import torch.distributed.tensor
from torch import nn
from torch._dynamo.utils import counters
from torch.utils._python_dispatch import _disable_current_modes

from megapipe.checkpoint.tensor_file import TensorFile
from megapipe.config.optimizer import OptimizerConfig
from megapipe.config.parallel import DIMENSIONS, MeshShape
from megapipe.config.run import PretrainConfig
from megapipe.engine import engine
from megapipe.engine.pipeline import Pipeline
from megapipe.engine.program import Instruction
from megapipe.engine.stage import CompiledForward
from megapipe.engine.trace import DeviceClock
from megapipe.inference.generation import Limits, generate
from megapipe.inference.settings import SamplingSettings
from megapipe.inference.trained_model import LoadedModel
from megapipe.layers import embedding
from megapipe.parallel import launch, unit_state
from megapipe.parallel.in_process import Deposit
from megapipe.parallel.mesh import Mesh
from megapipe.schedules.actions import Action
from megapipe.spec import linear
from megapipe.training.loop import replica as replica_module
from megapipe.training.loop.batches import open_loader, open_samples
from megapipe.training.loop.replica import Replica
from megapipe.training.loop.steps import Evaluator
from megapipe.training.pretrain import pretrain, rehearse
from megapipe.training.validation import kernel_choices
from tests.fake_cuda import kernels
from tests.fake_cuda.communicators import Exchanged, Nccl
from tests.fake_cuda.device import Device
from tests.fake_cuda.mode import Watch
from tests.fake_cuda.pairs import Order, Pair
from tests.fake_cuda.timeline import Timeline
from tests.support.gpt_runs import train_step


@dataclass
class Phase:
    """Counts of one part of a run. launches, moved: operations and bytes by name. syncs: (reason, place) -> times."""

    launches: Counter[str]
    moved: Counter[str]
    syncs: Counter[tuple[str, str]]

    @property
    def waits(self) -> int:
        """Times that the host waited for the device."""
        return self.syncs.total()


@dataclass
class Report:
    """The report of one rank's run. faults: in words. log: exchanges. peak: bytes. waits: places at which
    the program lets a stream or the host wait. results: what the run returned."""

    phases: dict[str, Phase] = field(default_factory=dict)
    faults: list[str] = field(default_factory=list)
    log: list[Exchanged] = field(default_factory=list)
    peak: int = 0
    waits: list[str] = field(default_factory=list)
    results: list[Any] = field(default_factory=list)
    graphs: int = 0
    pairs: dict[Any, Pair] = field(default_factory=dict)
    within: list[tuple[Action, int]] = field(default_factory=list)


class FakeRank:
    """One rank on its fake device."""

    def __init__(self) -> None:
        self.rank, self.ranks = int(os.environ["FAKE_CUDA_RANK"]), int(os.environ["FAKE_CUDA_RANKS"])
        self.timeline = Timeline()
        self.device = Device(self.timeline)
        self.watch = Watch(self.timeline, self.device)
        self.nccl = Nccl(self.watch, self.rank, self.ranks, Path(os.environ["FAKE_CUDA_FOLDER"]))
        self.report = Report()

    def install(self) -> None:
        """Put every stand-in in place. A launcher would have set the variables."""
        self.device.install(self.ranks)
        kernels.install_triton(self.watch)
        kernels.install_attention(self.watch)
        self.nccl.install()
        self.watch.install()
        unit_state.fill_box = _no_weights  # type: ignore[assignment]
        TensorFile.whole = _without_modes(TensorFile.whole)  # type: ignore[method-assign]
        torch.set_num_threads(1)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Count what happens in the block under this name."""
        timeline = self.timeline
        timeline.launches, timeline.moved, timeline.syncs = Counter(), Counter(), Counter()
        yield
        self.report.phases[name] = Phase(timeline.launches, timeline.moved, timeline.syncs)

    def mesh(self, sizes: Mapping[str, int]) -> Mesh:
        """This rank's mesh, as `launch.initialize` makes it."""
        device = launch.choose_device("cuda", self.rank)
        if self.ranks > 1:
            torch.distributed.init_process_group("nccl", device_id=device)
        return launch.connected_mesh(MeshShape(sizes), device)

    def end(self) -> Report:
        """The report, once nothing is under way."""
        if self.ranks > 1:
            launch.shutdown()
        self.report.faults = [str(each) for each in self.timeline.faults]
        self.report.log = self.nccl.log
        self.report.peak = self.timeline.peak_total
        self.report.waits = sorted(self.timeline.waits)
        return self.report


def _without_modes(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function whose tensors are real: a file's."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        with _disable_current_modes():
            return function(*args, **kwargs)

    return call


_ZERO = np.zeros(1, np.float32)


def _no_weights(name: str, shape: Any, box: Any, init: Any, seed: int) -> np.ndarray:
    """Initial weights that take no memory: nothing looks at them."""
    return np.lib.stride_tricks.as_strided(_ZERO, box.shape, [0] * len(box.shape))


def on_fake_device(function: Callable[..., None]) -> Callable[..., Report]:
    """Decorate `function(fake, ...)` so that the server can run it on a rank."""

    def run(rank: int, *args: Any, **named: Any) -> Report:
        fake = FakeRank()
        fake.install()
        with fake.watch.entered():
            function(fake, *args, **named)
        return fake.end()

    run.__module__, run.__qualname__ = function.__module__, function.__qualname__
    return run


SPARE = 2**16
"""Bytes that a step of a small model may have in addition to its rehearsal's."""


def _capture_graphs(watch: Watch) -> None:
    """Let torch.compile capture graphs and run them as they are, since nothing can be compiled without a device.

    It calls functions of constants outside of all modes.
    """
    forward = CompiledForward.__init__
    CompiledForward.__init__ = (  # type: ignore[method-assign]
        lambda self, **options: forward(self, **options, backend="eager")
    )
    tables = embedding._cached_tables

    @functools.lru_cache(maxsize=8)
    def within_modes(*constants: Any) -> Any:
        with watch.entered():
            return tables(*constants)

    embedding._cached_tables = within_modes


def _watch_actions(replica: Replica, fake: FakeRank) -> None:
    """Report the bytes within every later action of the replica's engine."""
    timeline, engine = fake.timeline, replica.engine

    def watched(instruction: Instruction) -> Instruction:
        def run(step: Any) -> None:
            before, timeline.peak_total = timeline.peak_total, timeline.live_total
            instruction.run(step)
            fake.report.within.append((instruction.action, timeline.peak_total - timeline.live_total))
            timeline.peak_total = max(before, timeline.peak_total)

        return replace(instruction, run=run)

    engine._sections = engine._compiled = {name: [*map(watched, each)] for name, each in engine._compiled.items()}


@on_fake_device
def train(
    fake: FakeRank,
    config: PretrainConfig,
    steps: int = 2,
    evaluate: bool = False,
    dropped: str | None = None,
    rehearsed: bool = True,
    spare: int = SPARE,
    chunk_bytes: int | None = None,
    pairs_in_order: bool = False,
) -> None:
    """Train as pretrain_gpt.py and pretrain_bert.py would.

    The first step is counted as phase `first step`, the last one as `step`.

    dropped: a place, `file:line`, whose waits are left out. rehearsed: as pipelines are. spare: more bytes of a step.
    chunk_bytes: of logits that the backward recomputes, in place of `linear.CHUNK_BYTES`. pairs_in_order: run the
    halves of pairs one after the other.
    """
    if chunk_bytes is not None:
        linear.CHUNK_BYTES = chunk_bytes
    engine.SPARE = (spare,)
    fake.timeline.dropped = dropped
    installs = {"cuda": kernels.install_csrc, "apex": kernels.install_apex}
    for backend in installs.keys() & set(config.kernels.backends.values()):
        installs[backend](fake.watch)
    sizes = {name: getattr(config.parallel, name) or 1 for name in DIMENSIONS}
    fake.watch.expert_ranks = sizes["tensor"]
    mesh = fake.mesh(sizes)
    if config.training.compile:
        _capture_graphs(fake.watch)
    if pairs_in_order:
        replica_module.pair_overlap = lambda *_: (False, None)  # type: ignore[assignment]
    order = Order(fake.timeline, fake.watch)
    Replica._recording = lambda replica, schedule: order.marks(schedule, replica.rank)  # type: ignore[method-assign]
    with fake.phase("build"):
        replica = Replica(config, mesh)
        kernel_choices(config, mesh.device, replica.kernels)
        samples = open_samples(config, "train")
        loader = open_loader(config, mesh, replica, samples)
        evaluation = Evaluator(config, mesh, replica, open_samples(config, "validation")) if evaluate else None
        _watch_actions(replica, fake)
    if rehearsed and mesh.size("pipeline") > 1:
        with fake.phase("rehearsal"):
            rehearse(config, mesh, replica, samples, evaluation, 0, lambda line: None)
    for step in range(steps):
        with fake.phase("load"):
            batch = loader.load(step * config.batch.global_size)
        with fake.phase("step"):
            fake.report.results.append(train_step(replica, config, batch, step))
        fake.report.phases.setdefault("first step", fake.report.phases["step"])
    fake.report.graphs = counters["stats"]["unique_graphs"]
    fake.report.pairs = order.pairs
    for state in replica.states():  # as pretrain does
        state.await_all_weights()
    if evaluation is not None:
        with fake.phase("evaluation"):
            fake.report.results.append(evaluation.run(steps))


@on_fake_device
def pretrain_and_resume(fake: FakeRank, config: PretrainConfig, *ports: int) -> None:
    """pretrain_gpt.py twice, as a launcher starts it: to half of the steps, then from the checkpoint to the end."""
    os.environ |= dict.fromkeys(("RANK", "LOCAL_RANK"), str(fake.rank))
    os.environ |= {"WORLD_SIZE": str(fake.ranks), "MASTER_ADDR": "localhost"}
    starts = {"first start": config.training.steps // 2, "second start": config.training.steps}
    for (name, steps), port in zip(starts.items(), ports, strict=True):
        os.environ["MASTER_PORT"] = str(port)
        until = replace(config, training=replace(config.training, stop_at=steps))
        environment = launch.LaunchEnvironment.read(os.environ)
        with fake.phase(name):
            fake.report.results.append(pretrain(until, environment, environment.meet(60.0)))


@on_fake_device
def generate_texts(fake: FakeRank, config: PretrainConfig, prompts: Sequence[Sequence[int]]) -> None:
    """Continue prompts as `megapipe generate` does; decoding is counted as phase `generate`."""
    # Stages in a line that only run forwards: a rank that waits for a receive does not block the sender.
    fake.timeline.loads_wait = False
    mesh = fake.mesh({name: getattr(config.parallel, name) or 1 for name in DIMENSIONS})
    model = LoadedModel(config, mesh, lambda states: None)
    limits = Limits(max_new_tokens=4, vocabulary_size=config.model.vocabulary_size)
    with fake.phase("generate"):
        texts = generate(model, prompts, 1, SamplingSettings(temperature=0.0), limits)
    fake.report.results.append([len(text.generated) for text in texts])


@on_fake_device
def library(fake: FakeRank, schedule: str, pipeline: int) -> None:
    """examples/library_pipeline.py on GPUs: the modules of a user, through a schedule."""
    engine.SPARE = (SPARE,)
    mesh = fake.mesh({"pipeline": pipeline, "data": fake.ranks // pipeline})
    layers = [lambda: nn.Sequential(nn.Linear(16, 16), nn.LayerNorm(16), nn.GELU()) for _ in range(4)]
    optimizer = OptimizerConfig(clip_norm=None)  # some schedules update before the norm is known
    how = {"schedule": schedule, "optimizer": optimizer, "microbatches": 4}
    loss = nn.MSELoss(reduction="sum")
    pipelined = Pipeline(layers, mesh, loss=loss, sample=torch.randn(4, 16), **how)  # type: ignore[arg-type]
    for _ in range(2):
        with fake.phase("step"):
            pipelined.step(torch.randn(16, 16), torch.randn(16, 16), learning_rate=1e-3)
    pipelined.drain()


@on_fake_device
def clock(fake: FakeRank) -> None:
    """Whether the host knows that the origin of a device's clock has passed when it reads its own."""
    x = torch.ones(1000, device="cuda")
    started = DeviceClock(torch.device("cuda", 0))
    event = started._origin._clock
    fake.report.results.append(all(fake.timeline.host.get(stream, 0) >= tick for stream, tick in event.items()))
    del x


@on_fake_device
def hands_over(fake: FakeRank) -> None:
    """A tensor of one stream is given to another, as ranks that are threads do, and dropped at once."""
    ours, theirs = torch.cuda.Stream(), torch.cuda.Stream()
    with torch.cuda.stream(ours):
        deposit = Deposit(torch.ones(1000, device="cuda"))
    with torch.cuda.stream(theirs):
        y = deposit.take() + 1
    del deposit
    torch.cuda.synchronize()
    del y
