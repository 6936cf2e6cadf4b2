"""Times of layers, of updates and of the engine's own work: real steps of one rank, action by action.

Every layer is a stage of its own, so that the engine's recorder tells them apart. Nothing is imitated: kernels,
autograd, gradient accumulators, the optimizer and the order of the steps are those of training.
"""

import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Literal

import torch

from megapipe.calibration.samples import samples_for
from megapipe.calibration.silent_group import silent_mesh
from megapipe.config.run import PretrainConfig
from megapipe.config.schedule import ScheduleConfig
from megapipe.engine.step import StepInput
from megapipe.engine.trace import Recorder
from megapipe.layout.hardware.measured import LAYER_KINDS, MeasuredLayer
from megapipe.parallel.mesh import Mesh
from megapipe.schedules.actions import COMPUTE_STREAM, Action, Kind
from megapipe.schedules.generators.registry import find_generator
from megapipe.training.families import family_of
from megapipe.training.replica import Replica
from megapipe.training.sources import open_loader

BLOCKS = 4
"""Transformer blocks of the model that is run, at most: enough for one layer to push another out of the caches."""
MICROBATCHES = 2
WARM_UP = 1
"""Steps that are not counted: the first one allocates."""
NANOSECOND = 1e-9

Halves = Literal["whole", "apart"]


@dataclass(frozen=True)
class Cell:
    """What is measured at once: how many ranks share a layer, and samples of a micro-batch."""

    tensor: int
    context: int
    micro_size: int

    @property
    def ranks(self) -> int:
        """That share the layer."""
        return self.tensor * self.context


@dataclass(frozen=True)
class StepTimes:
    """Medians over steps. seconds: (kind of action, kind of layer) -> of one action. update: of a step's optimizer
    update and gradient norm, for `elements` of the rank. action: what else a step takes, for each compute action."""

    seconds: Mapping[tuple[Kind, str], float]
    update: float
    elements: int
    action: float


def measured_config(config: PretrainConfig, cell: Cell, halves: Halves) -> PretrainConfig:
    """The run of one rank with every layer a stage, a few blocks and micro-batches, nothing beside its steps."""
    blocks = min(config.model.num_layers, BLOCKS)
    apart = halves == "apart"
    # Halves are measured along with recomputation, which leaves them as they are.
    again = "full" if apart and config.recompute.method != "selective" else config.recompute.method
    return replace(
        config,
        model=replace(config.model, num_layers=blocks),
        batch=replace(
            config.batch,
            global_size=MICROBATCHES * cell.micro_size,
            micro_size=cell.micro_size,
            ramp_start=None,
            ramp_samples=0,
        ),
        parallel=replace(
            config.parallel,
            data=1,
            tensor=cell.tensor,
            context=cell.context,
            pipeline=1,
            layers_per_stage=[1] * (blocks + 2),
            sequence=config.parallel.sequence and cell.tensor > 1,
            sequence_chunks=config.parallel.sequence_chunks if cell.tensor > 1 else 1,
        ),
        schedule=ScheduleConfig(
            name=find_generator(ScheduleConfig.name).looped,
            chunks=blocks + 2,
            two_bp=apart,
            receive_ahead=config.schedule.receive_ahead,
        ),
        zero=type(config.zero)(),
        offload=type(config.offload)(),
        recompute=replace(config.recompute, method=again, every=1, num_blocks=None, logits=_logits(config, apart)),
    )  # fmt: skip


def _logits(config: PretrainConfig, apart: bool) -> bool:
    return config.recompute.logits and not apart


class LayerRun:
    """A rank that trains a model of one cell, ready to be timed.

    mesh: of the ranks that share the layers, by default one in the place of all (`silent_mesh`).
    """

    def __init__(
        self,
        config: PretrainConfig,
        cell: Cell,
        device: torch.device,
        halves: Halves = "whole",
        mesh: Mesh | None = None,
    ) -> None:
        self.config = measured_config(config, cell, halves)
        self.mesh = silent_mesh(cell.tensor, cell.context, device) if mesh is None else mesh
        self.replica = Replica(self.config, self.mesh, family_of(self.config).layers)
        loader = open_loader(self.config, self.mesh, self.replica, samples_for(self.config))
        self._batch = loader.load(0)
        self._step = 0

    def step(self) -> float:
        """Seconds of one training step, at the learning rate 0."""
        self._wait()
        start = time.perf_counter()
        given = StepInput(self._step, self._batch.contexts, self._batch.token_counts, learning_rate=0.0)
        self.replica.engine.run(given)
        self._wait()
        self._step += 1
        return time.perf_counter() - start

    def times(self, steps: int) -> StepTimes:
        """Of every kind of action, over that many steps."""
        for _ in range(WARM_UP):
            self.step()
        seconds: dict[tuple[Kind, str], list[float]] = defaultdict(list)
        updates, others = [], []
        actions = list(self.replica.schedule.actions("body", 0))
        for _ in range(steps):
            recorder = Recorder(self.replica.schedule, 0, self.mesh.device)
            self.replica.engine.record(recorder)
            whole = self.step()
            update = compute = 0.0
            count = 0
            for event in recorder.events():
                action, took = actions[event.position], (event.end - event.start) * NANOSECOND
                if action.kind in COMPUTE_STREAM:
                    seconds[action.kind, self._layer(action)].append(took)
                    compute += took
                    count += 1
                elif action.kind in (Kind.UPDATE, Kind.REDUCE_SCALARS):
                    update += took
            updates.append(update)
            others.append((whole - compute - update) / count)
        self.replica.engine.record(None)
        elements = sum(state.table.num_elements for state in self.replica.states())
        medians = {key: median(values) for key, values in seconds.items()}
        return StepTimes(medians, median(updates), elements, max(0.0, median(others)))

    def _layer(self, action: Action) -> str:
        layout = self.replica.layout
        return layout.layers[layout.ranges[action.stage][0]].kind

    def _wait(self) -> None:
        if self.mesh.device.type == "cuda":
            torch.cuda.synchronize(self.mesh.device)


def measure_cell(
    config: PretrainConfig, cell: Cell, device: torch.device, steps: int, mesh: Mesh | None = None
) -> tuple[list[MeasuredLayer], StepTimes]:
    """Rows of a cell, a layer kind each, and what the run with whole backwards took besides. mesh: of `LayerRun`."""
    whole = LayerRun(config, cell, device, mesh=mesh).times(steps)
    apart = LayerRun(config, cell, device, "apart", mesh).times(steps)

    def row(kind: str) -> MeasuredLayer:
        again = apart.seconds.get((Kind.RECOMPUTE, kind), 0.0)
        return MeasuredLayer(
            kind=kind,  # type: ignore[arg-type]
            tensor=cell.tensor,
            context=cell.context,
            micro_size=cell.micro_size,
            forward=whole.seconds[Kind.FORWARD, kind],
            backward=whole.seconds[Kind.BACKWARD, kind],
            backward_input=apart.seconds[Kind.BACKWARD_INPUT, kind],
            backward_weight=apart.seconds[Kind.BACKWARD_WEIGHT, kind],
            recompute=again,
        )

    return [row(kind) for kind in LAYER_KINDS], whole


def cells(tensor_sizes: Sequence[int], context_sizes: Sequence[int], micro_sizes: Sequence[int]) -> list[Cell]:
    """Every combination, the plainest first."""
    return [
        Cell(tensor, context, micro)
        for tensor in sorted(set(tensor_sizes))
        for context in sorted(set(context_sizes))
        for micro in sorted(set(micro_sizes))
    ]
