"""Check a run of any number of ranks in one process: rules, schedule, shapes and memory, without computing anything.

Ranks with the same pipeline coordinate are alike, so one of each is built on torch's meta device, whose tensors have
shapes but no memory. Its stages then run one forward and one backward of a micro-batch. This shows that the shapes of
all operations fit together, and that every stage returns the tensors that the next one expects.
"""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from megapipe.config.command_line import Report
from megapipe.config.parallel import MeshShape
from megapipe.config.run import PretrainConfig
from megapipe.engine.assembly import Assembly, Holding, ModelTable
from megapipe.engine.stage import Stage, TensorSpec, described, unit_states
from megapipe.kernels.ops import OPS
from megapipe.layers.context import BertContext, MicrobatchContext
from megapipe.layers.sequence_slices import sliced
from megapipe.layout.batch_plan import data_parallel_size, num_microbatches
from megapipe.layout.lowered import lowered_schedule
from megapipe.layout.prediction import RankPrediction, predict_rank
from megapipe.layout.scheduling import schedule_name
from megapipe.layout.slices import slice_ranges
from megapipe.layout.stages import StageLayout
from megapipe.layout.table import LayoutTable
from megapipe.models.families import family_of
from megapipe.parallel.mesh import Mesh, silent_mesh
from megapipe.parallel.unit_state import UnitState
from megapipe.schedules.schedule import Header
from megapipe.schedules.validation import validate as validate_schedule
from megapipe.training.loop.loader import HeldTokens
from megapipe.training.validation import validate

META = torch.device("meta")


@dataclass(frozen=True)
class Coordinate:
    """Layers and memory of the ranks of one pipeline coordinate.

    ranks: number of these ranks. stages: their stages in the schedule. layers: names of their layers. parameters:
    elements in the buffers of one rank, with padding. state_bytes: persistent state, also in host memory.
    message_bytes: buffers in which messages of other stages arrive, and stay until their backward. peak_bytes: peak of
    a step on the device, with these buffers. kernel_calls: calls of one step, by op of the kernel registry and phase.
    """

    pipeline: int
    ranks: int
    stages: tuple[int, ...]
    layers: tuple[str, ...]
    parameters: int
    state_bytes: int
    message_bytes: int
    peak_bytes: int
    kernel_calls: dict[str, int]


@dataclass(frozen=True)
class DryRun:
    """Result of a dry run. config: the configuration, with parallel.data filled in. actions: number of actions of one
    step, over all pipeline coordinates."""

    config: PretrainConfig
    world_size: int
    microbatches: int
    actions: int
    coordinates: tuple[Coordinate, ...]
    device: str
    seconds: float

    def as_json(self) -> dict[str, Any]:
        """Return the figures for JSON; memory by pipeline coordinate."""
        return {
            "world_size": self.world_size,
            "microbatches": self.microbatches,
            "schedule": schedule_name(self.config),
            "actions": self.actions,
            "device": self.device,
            "seconds": self.seconds,
            "memory_bytes": [each.peak_bytes for each in self.coordinates],
            "coordinates": [vars(each) for each in self.coordinates],
        }


class ShapeError(RuntimeError):
    """Stages do not fit together, or their bytes differ from the prediction: a defect of megapipe, not of a
    configuration."""


def dry_run(
    config: PretrainConfig,
    world_size: int,
    *,
    device: str = "cuda",
    say: Callable[[str], None] = lambda line: None,
    report: Report = lambda share: None,
) -> DryRun:
    """Check a run on `world_size` ranks.

    device: type of its devices, "cpu" or "cuda", on which memory depends. say: prints each part when it is done.
    report: called with the fraction of the pipeline coordinates that are done.

    Raises ConfigError for rules that the configuration breaks, ScheduleError, and ShapeError.
    """
    begin = time.perf_counter()
    validate(config, world_size)
    config = replace(config, parallel=replace(config.parallel, data=data_parallel_size(config, world_size)))
    say(f"configuration: valid on {world_size:,} ranks")
    layout, microbatches = StageLayout.of(config), num_microbatches(config, world_size)
    shape = MeshShape.of(config.parallel)
    schedule = lowered_schedule(config, layout)
    validate_schedule(schedule)
    actions = sum(len(rows) for rows in schedule.sections.body)
    header = schedule.header
    say(
        f"schedule: {header.name}, class {header.numerical_class}, {microbatches:,} micro-batches, "
        f"{actions:,} actions a step, valid"
    )
    first = predict_rank(config, schedule, 0, device=device)
    kernels, holding = OPS.with_overrides(config.kernels.backends), Holding.of(LayoutTable.of(config, layout))
    coordinates = []
    for place in range(shape.sizes["pipeline"]):
        rank = shape.rank_of({"data": 0, "pipeline": place, "context": 0, "tensor": 0})
        mesh = silent_mesh(shape, rank, META)
        model = ModelTable.of(config, layout, mesh, kernels)
        stages = Assembly(model, holding, mesh, schedule.header, kernels=kernels).stages
        _run_shapes(config, stages, HeldTokens.of(config, mesh))
        # The memory of a rank depends only on its pipeline coordinate.
        coordinates.append(_coordinate(replace(first, pipeline_rank=place), mesh, stages, layout))
        report((place + 1) / shape.sizes["pipeline"])
    say(f"shapes: a forward and a backward of every stage fit together ({len(layout.ranges)} in all)")
    return DryRun(config, world_size, microbatches, actions, tuple(coordinates), device, time.perf_counter() - begin)


def _run_shapes(config: PretrainConfig, stages: Mapping[int, Stage], held: HeldTokens) -> None:
    """Run a forward and a backward of each stage, and compare the shapes with its declared inputs and outputs."""
    terms = len(family_of(config).loss_terms)
    context = _context(config, held)
    for number, stage in stages.items():
        inputs = [spec.allocate(META).requires_grad_(spec.requires_grad) for spec in stage.inputs]
        outputs: tuple[Tensor, ...] = tuple(inputs)
        for unit in stage.units:
            outputs = unit[0](*outputs, context=context)
        if not stage.outputs:
            wanted = described([torch.empty((terms,) if terms > 1 else (), dtype=torch.float32, device=META)])
        else:
            wanted = described(stage.outputs)
        if described(outputs) != wanted:
            raise ShapeError(f"stage {number} returns {described(outputs)}, but {wanted} is expected")
        torch.autograd.backward(outputs, [torch.empty_like(each) for each in outputs])
        for each in inputs:
            if each.grad is None or each.grad.shape != each.shape:
                raise ShapeError(f"stage {number} returns no gradient of shape {list(each.shape)}")


def _context(config: PretrainConfig, held: HeldTokens) -> MicrobatchContext:
    """Return the context of a micro-batch as the loader of the run makes it, on the meta device."""
    size, whole = config.batch.micro_size, config.data.sequence_length
    tokens = whole // config.parallel.context
    shared: dict[str, Any] = {
        "ordinals": torch.empty(size, dtype=torch.int64, device=META),
        "tokens": torch.empty((size, tokens), dtype=torch.int64, device=META),
        "seed": config.training.seed,
        "token_numbers": None if held.numbers is None else torch.empty(tokens, dtype=torch.int64, device=META),
    }
    predictions = family_of(config).predictions
    if predictions is not None:
        return BertContext(
            **shared,
            labels=torch.empty((size, predictions), dtype=torch.int64, device=META),
            loss_mask=torch.empty((size, predictions), device=META),
            lengths=torch.empty(size, dtype=torch.int64, device=META),
            token_types=torch.empty((size, tokens), dtype=torch.int64, device=META),
            positions=torch.empty((size, predictions), dtype=torch.int64, device=META),
            sentence_labels=torch.empty(size, dtype=torch.int64, device=META),
            sentence_weights=torch.empty(size, device=META),
        )
    starts = torch.empty((size, tokens), dtype=torch.int64, device=META) if config.data.isolate_documents else None
    whole_starts = torch.empty((size, whole), dtype=torch.int64, device=META) if held.gathers else None
    whole_sample = MicrobatchContext(
        **shared,
        labels=torch.empty((size, tokens), dtype=torch.int64, device=META),
        loss_mask=torch.empty((size, tokens), device=META),
        document_starts=starts,
        whole_document_starts=whole_starts if starts is not None else None,
    )
    return sliced(whole_sample, slice_ranges(config))[0]


def _coordinate(predicted: RankPrediction, mesh: Mesh, stages: Mapping[int, Stage], layout: StageLayout) -> Coordinate:
    """Return the predicted memory of a rank. Raises ShapeError if the buffers that were built have other sizes."""
    states = unit_states(dict(stages))
    said, built = predicted.state(), [_bytes(state) for state in states]
    for name in ("weights", "master", "gradients"):
        total = sum(each[name] for each in built)
        if total != getattr(said, name):
            raise ShapeError(
                f"rank {mesh.rank} was built with {total} bytes of {name}, but the formulas predict {said}"
            )
    messages = _message_bytes(predicted.schedule.header, stages)
    if messages != predicted.messages:
        raise ShapeError(
            f"rank {mesh.rank} has {messages} bytes of message slots, but the formulas predict {predicted.messages}"
        )
    return Coordinate(
        pipeline=predicted.pipeline_rank,
        ranks=mesh.world_size // mesh.size("pipeline"),
        stages=tuple(stages),
        layers=tuple(layout.layers[index].name for stage in stages for index in layout.ranges[stage]),
        parameters=sum(state.table.num_elements for state in states),
        state_bytes=said.total,
        message_bytes=messages,
        peak_bytes=predicted.device_bytes(),
        kernel_calls={f"{op} {phase}": calls for (op, phase), calls in sorted(predicted.kernel_calls().items())},
    )


def _bytes(state: UnitState) -> dict[str, int]:
    """Return the persistent bytes of a unit, without optimizer moments."""
    weights = state.weight_shards if state.weights_come_and_go else state.weights
    gradients = state.gradient_shards if state.sharding.gradients else state.gradients
    return {
        "weights": sum(each.numel() * each.element_size() for each in weights),
        "master": 0 if state.working_copy is None else state.master.numel() * state.master.element_size(),
        "gradients": sum(each.numel() * each.element_size() for each in gradients),
    }


def _message_bytes(header: Header, stages: Mapping[int, Stage]) -> int:
    """Return the bytes of the slots in which these stages receive from other ranks, as `engine.transfers.connect`
    allocates them. Vocabulary shards have no slots."""
    total, ranks = 0, header.stage_ranks
    for number, stage in stages.items():
        if number >= header.num_routed:
            continue
        if stage.inputs and ranks[number - 1] != ranks[number]:
            total += header.activation_slots[number] * _spec_bytes(stage.inputs)
        if stage.outputs and ranks[number + 1] != ranks[number]:
            total += header.gradient_slots[number] * _spec_bytes(stage.outputs)
    return total


def _spec_bytes(specs: Sequence[TensorSpec]) -> int:
    return sum(math.prod(spec.shape) * spec.dtype.itemsize for spec in specs)
