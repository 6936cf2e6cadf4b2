"""Measure the times of layers, updates and the engine's own work in real training steps, action by action.

Every layer is a separate stage, so that the engine's recorder distinguishes layers. Kernels, autograd, gradient
accumulators, the optimizer and the order of the steps are the same as in training. A layer is measured on one rank
alone, and on all ranks that share it.
"""

import itertools
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, fields, replace
from statistics import median
from typing import Literal

import numpy as np
import numpy.typing as npt
import torch

from megapipe.config import ConfigError
from megapipe.config.parallel import MeshShape, ScheduleConfig
from megapipe.config.run import BatchConfig, PretrainConfig
from megapipe.engine.step import StepInput
from megapipe.engine.trace import Recorder
from megapipe.layout.hardware.description import LAYER_KINDS, LayerKind, LayerRow, MeasuredLayer
from megapipe.parallel.launch import connected_mesh
from megapipe.parallel.mesh import Mesh, silent_mesh
from megapipe.schedules.actions import COMPUTE_STREAM, Action, Kind
from megapipe.schedules.registry import find_generator
from megapipe.training.device import wait_for
from megapipe.training.loop.batches import Samples, open_loader, open_samples
from megapipe.training.loop.replica import Replica


class RandomSamples:
    """An unlimited number of samples of random tokens. Each sample depends only on its number."""

    def __init__(self, sequence_length: int, vocabulary_size: int) -> None:
        self.sequence_length = sequence_length
        self._vocabulary_size = vocabulary_size

    def __len__(self) -> int:
        return 2**31

    def num_labels(self, ordinals: npt.ArrayLike) -> np.ndarray:
        return np.full(np.shape(ordinals), self.sequence_length, dtype=np.int64)

    def tokens(self, ordinals: npt.ArrayLike) -> np.ndarray:
        """Return the tokens of samples: int64 [..., sequence_length + 1]."""
        numbers = np.asarray(ordinals)
        drawn = [
            np.random.default_rng(each).integers(0, self._vocabulary_size, self.sequence_length + 1, dtype=np.int64)
            for each in numbers.ravel().tolist()
        ]
        return np.stack(drawn).reshape(*numbers.shape, self.sequence_length + 1)

    def boundaries(self, ordinals: npt.ArrayLike) -> list[np.ndarray]:
        """Return one document boundary per sample, in its middle."""
        middle = np.array([max(1, self.sequence_length // 2)], dtype=np.int64)
        return [middle for _ in np.ravel(ordinals)]


def samples_for(config: PretrainConfig) -> Samples:
    """Return random samples for a GPT, whose times do not depend on the tokens, and the training samples for a BERT.

    Raises:
        ConfigError: a BERT run without data. DataError: shards that cannot be used.
    """
    if config.kind == "gpt":
        return RandomSamples(config.data.sequence_length, config.model.vocabulary_size)
    if not any(config.data.prefixes):
        raise ConfigError(
            "data.prefix is empty, and masked pairs for a BERT cannot be generated; "
            "set it to the shard that the run will train on"
        )
    return open_samples(config, "train")


BLOCKS = 4
"""Maximum number of transformer blocks of the measured model, enough for one layer to evict another from the
caches."""
MICROBATCHES = 2
WARM_UP = 1
"""Number of initial steps that are not measured, because they allocate memory."""
NANOSECOND = 1e-9

Halves = Literal["whole", "apart"]


@dataclass(frozen=True)
class Cell:
    """One combination of sizes to measure: tensor and context ranks that share a layer, samples of a micro-batch."""

    tensor: int
    context: int
    micro_size: int

    @property
    def ranks(self) -> int:
        """Number of ranks that share the layer."""
        return self.tensor * self.context


@dataclass(frozen=True)
class StepTimes:
    """Median seconds over steps. seconds: (kind of action, kind of layer) -> time of one action. update: time per step
    of the optimizer update and the gradient norm, for `elements` parameters. action: remaining time of a step, divided
    by the number of compute actions."""

    seconds: Mapping[tuple[Kind, str], float]
    update: float
    elements: int
    action: float


def measured_config(config: PretrainConfig, cell: Cell, halves: Halves) -> PretrainConfig:
    """Return the configuration of the measured run: one pipeline rank, one layer per stage, few blocks."""
    blocks = min(config.model.num_layers, BLOCKS)
    apart = halves == "apart"
    # The halves of a backward take the same time with recomputation, so both are measured in one run.
    method = config.recompute.method
    method = "full" if apart and method != "selective" else method
    return replace(
        config,
        model=replace(config.model, num_layers=blocks),
        batch=BatchConfig(global_size=MICROBATCHES * cell.micro_size, micro_size=cell.micro_size),
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
        recompute=replace(
            config.recompute, method=method, every=1, num_blocks=None, logits=config.recompute.logits and not apart
        ),
    )


class LayerRun:
    """Training of a model with the sizes of one cell on one rank, step by step, to measure its times.

    mesh: the ranks that share the layers; by default one rank whose peers are absent (`silent_mesh`).
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
        shape = MeshShape({"tensor": cell.tensor, "context": cell.context})
        self.mesh = silent_mesh(shape, 0, device) if mesh is None else mesh
        self.replica = Replica(self.config, self.mesh)
        loader = open_loader(self.config, self.mesh, self.replica, samples_for(self.config))
        self._batch = loader.load(0)
        self._step = 0

    def step(self) -> float:
        """Run a training step with learning rate 0, and return its time in seconds."""
        wait_for(self.mesh.device)
        start = time.perf_counter()
        step_input = StepInput(self._step, self._batch.contexts, self._batch.token_counts, learning_rate=0.0)
        self.replica.engine.run(step_input)
        wait_for(self.mesh.device)
        self._step += 1
        return time.perf_counter() - start

    def times(self, steps: int) -> StepTimes:
        """Return the times of every kind of action, measured over `steps` steps."""
        for _ in range(WARM_UP):
            self.step()
        seconds: dict[tuple[Kind, str], list[float]] = defaultdict(list)
        updates, remaining = [], []
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
            remaining.append((whole - compute - update) / count)
        self.replica.engine.record(None)
        elements = sum(state.table.num_elements for state in self.replica.states())
        medians = {key: median(values) for key, values in seconds.items()}
        return StepTimes(medians, median(updates), elements, max(0.0, median(remaining)))

    def _layer(self, action: Action) -> str:
        layout = self.replica.layout
        return layout.layers[layout.ranges[action.stage][0]].kind


def measure_cell(
    config: PretrainConfig, cell: Cell, device: torch.device, steps: int, mesh: Mesh | None = None
) -> tuple[list[MeasuredLayer], StepTimes]:
    """Return one row per kind of layer, and all times of the run whose backwards are not split. mesh: see
    `LayerRun`."""
    whole = LayerRun(config, cell, device, mesh=mesh).times(steps)
    apart = LayerRun(config, cell, device, "apart", mesh).times(steps)
    rows = [
        MeasuredLayer(
            kind,
            cell.tensor,
            cell.context,
            cell.micro_size,
            forward=whole.seconds[Kind.FORWARD, kind],
            backward=whole.seconds[Kind.BACKWARD, kind],
            backward_input=apart.seconds[Kind.BACKWARD_INPUT, kind],
            backward_weight=apart.seconds[Kind.BACKWARD_WEIGHT, kind],
            recompute=apart.seconds.get((Kind.RECOMPUTE, kind), 0.0),
        )
        for kind in LAYER_KINDS
    ]
    return rows, whole


def cells(tensor_sizes: Sequence[int], context_sizes: Sequence[int], micro_sizes: Sequence[int]) -> list[Cell]:
    """Return every combination of sizes, in increasing order."""
    ascending = (sorted(set(sizes)) for sizes in (tensor_sizes, context_sizes, micro_sizes))
    return [Cell(*sizes) for sizes in itertools.product(*ascending)]


def shared_cells(cells: Sequence[Cell], ranks: int) -> dict[int, list[Cell]]:
    """Return the cells whose layers several ranks share, at most `ranks`, by their number of ranks."""
    counts = dict.fromkeys(cell.ranks for cell in cells if 1 < cell.ranks <= ranks)
    return {count: [cell for cell in cells if cell.ranks == count] for count in counts}


def measure_shared(mesh: Mesh, config: PretrainConfig, cells: Sequence[Cell], steps: int) -> list[MeasuredLayer]:
    """Return rows of layers that include the time for which ranks wait for each other: means over the ranks. A
    collective call.

    Times of single collectives do not include most of it: in a layer, a different rank is late each time, and all
    others wait for it. cells: all need the number of ranks of the mesh.
    """
    means: list[MeasuredLayer] = []
    for cell in cells:
        shared = connected_mesh(MeshShape({"tensor": cell.tensor, "context": cell.context}), mesh.device)
        layers, _ = measure_cell(config, cell, mesh.device, steps, shared)
        rank_layers = mesh.world.all_gather_object(layers)
        means += [_mean(rows) for rows in zip(*rank_layers, strict=True)]
    return means


def waits(alone: Sequence[MeasuredLayer], together: Sequence[MeasuredLayer], factor: float) -> list[LayerRow]:
    """Return the additional time of each layer on several ranks, relative to the same work on one rank.

    factor: slowdown of work while this number of ranks is busy. Times are divided by it, because predictions multiply
    times by it.
    """
    by_place = {_place(row): row for row in alone}

    def excess(row: MeasuredLayer, name: str) -> float:
        return float(max(0.0, getattr(row, name) / factor - getattr(by_place[_place(row)], name)))

    return [
        LayerRow(*_place(row), *(excess(row, each.name) for each in fields(LayerRow)[len(_PLACE) :]))
        for row in together
    ]


_PLACE = ("kind", "tensor", "context", "micro_size")


def _place(row: MeasuredLayer) -> tuple[LayerKind, int, int, int]:
    return row.kind, row.tensor, row.context, row.micro_size


def _mean(rows: Sequence[MeasuredLayer]) -> MeasuredLayer:
    """Return the mean times of a layer over all ranks."""
    times = [astuple(row)[len(_PLACE) :] for row in rows]
    return MeasuredLayer(*_place(rows[0]), *(sum(each) / len(rows) for each in zip(*times, strict=True)))
