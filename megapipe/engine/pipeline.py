"""The library: any torch modules trained through any schedule, on any mesh of pipeline and data ranks.

::

    mesh = initialize({"pipeline": 2})
    pipeline = Pipeline(layers, mesh, loss=loss, sample=inputs[:4], microbatches=8, schedule="zb_h1")
    for result in pipeline.step(inputs, targets):
        print(result.step, result.loss)
"""

import math
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TypeVar, Unpack

import torch
from torch import Tensor

from megapipe.config.optimizer import OptimizerConfig
from megapipe.config.schedule import ScheduleConfig
from megapipe.engine.engine import Engine
from megapipe.engine.errors import PipelineError
from megapipe.engine.groups import communicators, counted_states
from megapipe.engine.module_stages import ModuleStages
from megapipe.engine.plan_layers import Layer, ModelPlan, plan_layers
from megapipe.engine.reductions import Communicators, Reductions
from megapipe.engine.stage import described
from megapipe.engine.step import StepInput, StepResult
from megapipe.engine.units import Loss, Microbatch
from megapipe.engine.wiring import LinkPool, connect
from megapipe.optim.clipping import clip_coefficient
from megapipe.optim.make import make_optimizer
from megapipe.parallel.mesh import Mesh
from megapipe.schedules import build
from megapipe.schedules.balance import balance_layers, check_assignment
from megapipe.schedules.generators.registry import Options, find_generator, is_file_name
from megapipe.schedules.load_file import fit_for_training, read_file
from megapipe.schedules.schedule import Schedule
from megapipe.spec.parameters import tied_stages

Result = TypeVar("Result")

Tensors = Tensor | Sequence[Tensor]


class Pipeline:
    """One model over the ranks of a mesh. Every rank makes it with the same arguments and calls the same methods.

    Attributes:
        schedule: the lowered schedule, good for validating, simulating and drawing.
        stages: this rank's stages, with the unit states that hold weights, gradients and moments.
        optimizer: what updates them.
        is_first, is_last: this rank reads the inputs; the targets.
    """

    def __init__(
        self,
        layers: Sequence[Layer],
        mesh: Mesh,
        *,
        loss: Loss,
        sample: Tensors,
        microbatches: int,
        schedule: str = ScheduleConfig.name,
        optimizer: OptimizerConfig | None = None,
        layers_per_stage: Sequence[int] | None = None,
        count: Callable[..., float] | None = None,
        seed: int = 0,
        timeout: float = 600.0,
        **options: Unpack[Options],
    ) -> None:
        """Split the layers into stages, create those of this rank, and connect them. A collective call.

        Args:
            layers: the model as a sequence of modules; each takes what the one before it returns, a tensor or a tuple
                of tensors. The modules are copied, not changed: their weights are the start, and `state_dict` has the
                result. A function that creates the module may replace it; then a rank creates only its own modules.
                A parameter that several layers have is tied: it stays one weight.
            mesh: of pipeline and data ranks.
            loss: (the last layer's outputs, then a micro-batch's targets) -> loss summed over the micro-batch, 0-dim.
            sample: inputs of one micro-batch; only their shapes and dtypes are used.
            microbatches: micro-batches of a step on each data-parallel replica.
            schedule: a name of `megapipe.schedules.GENERATORS`, or the path of a schedule file (docs/schedules.md): a
                name with a suffix or a folder.
            optimizer: its settings, including clipping; default: AdamW with its defaults.
            layers_per_stage: number of layers of each stage; default: as even as possible.
            count: targets of a micro-batch -> its part of the number that the loss sum is divided by; default: rows.
            seed: for layers that are created here.
            timeout: seconds that a rank waits for another one.
            options: options of a named schedule, such as `chunks`; see
                `megapipe.schedules.generators.registry.Options`. A file takes none.

        Raises:
            PipelineError: the layers or settings cannot be used.
            ScheduleError: a schedule that does not exist, cannot run that many micro-batches, or is a file made for
                something else.
        """
        self._mesh = mesh
        self._config = _checked_settings(mesh, optimizer or OptimizerConfig(), timeout)
        self._sample = as_tensors(sample)
        self._microbatches = microbatches
        plan = _agreed(mesh, plan_layers(layers, _checked_sample(self._sample)))
        ranks = mesh.size("pipeline")
        given = _from_file(schedule, options) if is_file_name(schedule) else None
        if given is None:
            num_stages = ranks * find_generator(schedule).number_of_chunks(options)
        else:
            num_stages = len(given.header.stages)
        ranges = _ranges(len(layers), num_stages, ranks, layers_per_stage)
        units, tied = [len(members) for members in ranges], tied_stages(plan.specs, ranges)
        replicated = mesh.size("data") > 1
        if given is None:
            self.schedule = build(
                schedule,
                ranks,
                microbatches,
                units_per_stage=units,
                tied_groups=tied,
                data_parallel=replicated,
                **options,
            )
        else:
            self.schedule = fit_for_training(
                given, ranks, microbatches, units_per_stage=units, tied_groups=tied, data_parallel=replicated
            )
        if self.schedule.header.updates_per_step > 1 and self._config.clip_norm is not None:
            raise PipelineError(
                f"schedule {self.schedule.header.name} updates after every micro-batch, before the norm of the "
                "step's gradients is known; turn clipping off with OptimizerConfig(clip_norm=None)"
            )
        self._modules = ModuleStages(layers, plan, ranges, mesh, self.schedule, loss, seed)
        self.stages = self._modules.stages
        self.is_first = 0 in self.stages
        self.is_last = len(ranges) - 1 in self.stages
        self.optimizer = make_optimizer(self._config)
        self._count = count if count is not None else lambda *targets: float(self._sample[0].shape[0])
        groups = communicators(mesh, self.schedule, self.stages)
        self._modules.initialize(groups)
        self._engine = self._connected(plan, groups, timeout)
        self._next_step = 0
        self._under_way = False
        self._rehearsed = mesh.device.type != "cuda" or ranks == 1

    def step(
        self, inputs: Tensors | None = None, targets: Tensors | None = None, learning_rate: float | None = None
    ) -> tuple[StepResult, ...]:
        """Train on one batch: forward, backward, and the update of all weights.

        On GPUs the first call runs the modules twice: once without messages and update, so that no kernel has to be
        loaded while a message is awaited (docs/nccl.md).

        Returns the steps that ended. A schedule that flushes ends every step; one that never does ends the step
        before, so that the first call returns none and `drain` the last one. Results are the same on all ranks.

        Args:
            inputs: this replica's batch, `microbatches` times as many rows as the sample; read where `is_first`.
            targets: the same for the loss; read where `is_last`.
            learning_rate: of this step; the optimizer's setting without.

        Raises:
            PipelineError: a batch that does not fit.
            EngineError: naming rank, step and action around whatever went wrong.
        """
        batch = self._batch(inputs, targets)
        counts = [self._counted(each) if self.is_last else 0.0 for each in batch]
        rate = self._config.learning_rate if learning_rate is None else learning_rate
        step_input = StepInput(self._next_step, batch, counts, rate)
        if not self._rehearsed:
            device = self._mesh.device
            with torch.random.fork_rng([device] if device.type == "cuda" else []):  # modules may draw numbers
                self._or_close(lambda: self._engine.rehearse(step_input))
            self._rehearsed = True
        results = self._or_close(lambda: self._engine.feed(step_input))
        self._next_step += 1
        self._under_way = not self.schedule.flushes
        return results

    def drain(self) -> tuple[StepResult, ...]:
        """End the step under way and return it; none where the schedule flushes every step."""
        self._under_way = False
        return self._or_close(self._engine.drain)

    def state_dict(self) -> dict[str, Tensor]:
        """The whole model's newest weights and buffers, on the CPU, for `torch.nn.Sequential(*layers)`. Collective.

        Raises PipelineError where a step is under way.
        """
        if self._under_way:
            raise PipelineError(f"step {self._next_step - 1} is in progress; call drain before state_dict")
        own: dict[int, dict[str, Tensor]] = {}
        newest = max(stage.newest for stage in self.stages.values())
        for index, twins in self._modules.units().items():
            weights = twins[newest % len(twins)].module.state_dict(prefix=f"{index}.")
            own[index] = {name: value.detach().to("cpu", copy=True) for name, value in weights.items()}
        layers: dict[int, dict[str, Tensor]] = {}
        for part in self._mesh.group("pipeline").all_gather_object(own):
            layers |= part
        return {name: value for index in sorted(layers) for name, value in layers[index].items()}

    def close(self) -> None:
        """Give back links, with their memory and file descriptors; no step runs after that. A failed step does it.

        Without this they go with the pipeline itself, whenever Python finds that nobody needs it.
        """
        self._links.close()

    def _or_close(self, run: Callable[[], Result]) -> Result:
        """Return the result of `run`. If it fails, close the links, so that no peer waits for ever."""
        try:
            return run()
        except BaseException:
            self.close()
            raise

    def _counted(self, microbatch: Microbatch) -> float:
        count = float(self._count(*microbatch.targets))
        if not 0.0 <= count < math.inf:
            raise PipelineError(
                f"count gave {count} for the targets {described(microbatch.targets)}; it is added to the number "
                "that the loss sum is divided by, and must be finite and at least 0"
            )
        return count

    def _connected(self, plan: ModelPlan, groups: Communicators, timeout: float) -> Engine:
        limit = self._config.clip_norm
        reductions = Reductions(
            counted_states(self.stages, groups),
            [spec.name for layer in plan.specs for spec in layer.parameters.values()],
            groups,
            partial(clip_coefficient, limit=limit) if limit is not None else torch.ones_like,
            self.optimizer,
            self._mesh.device,
            hidden=not self.schedule.flushes,
        )
        self._links = LinkPool(self._mesh, "auto", timeout)
        transfers = connect(self.schedule, self._mesh, self.stages, self._links)
        return Engine(self.schedule, self._mesh.coordinate("pipeline"), self.stages, transfers, reductions)

    def _batch(self, inputs: Tensors | None, targets: Tensors | None) -> list[Microbatch]:
        parts = [Microbatch() for _ in range(self._microbatches)]
        if self.is_first:
            if inputs is None:
                raise PipelineError("this rank runs the first stage (is_first); give it the batch's inputs")
            rows = self._cut(as_tensors(inputs), "inputs")
            if described(rows[0]) != described(self._sample):
                raise PipelineError(
                    f"a micro-batch of the inputs is {described(rows[0])}, but the pipeline was built for "
                    f"{described(self._sample)}; pass a batch with {self._microbatches} times the rows of the "
                    "sample"
                )
            parts = [Microbatch(inputs=part) for part in rows]
        if self.is_last and targets is not None:
            cut = self._cut(as_tensors(targets), "targets")
            parts = [Microbatch(part.inputs, rows) for part, rows in zip(parts, cut, strict=True)]
        return parts

    def _cut(self, tensors: Sequence[Tensor], what: str) -> list[tuple[Tensor, ...]]:
        """Rows of every tensor, micro-batch by micro-batch, on this rank's device."""
        for tensor in tensors:
            if tensor.dim() == 0 or tensor.shape[0] % self._microbatches:
                raise PipelineError(
                    f"{what} of shape {list(tensor.shape)} cannot be split into {self._microbatches} micro-batches "
                    "with equal numbers of rows; change the batch, or microbatches"
                )
        columns = [tensor.to(self._mesh.device).chunk(self._microbatches) for tensor in tensors]
        return [tuple(column[part] for column in columns) for part in range(self._microbatches)]


def as_tensors(tensors: Tensors) -> tuple[Tensor, ...]:
    """One tensor or several, as a tuple."""
    return (tensors,) if isinstance(tensors, Tensor) else tuple(tensors)


def _checked_settings(mesh: Mesh, config: OptimizerConfig, timeout: float) -> OptimizerConfig:
    if not timeout > 0:
        raise PipelineError(f"timeout is {timeout}; it must be above 0 seconds")
    for dimension in ("tensor", "context"):
        if mesh.size(dimension) > 1:
            raise PipelineError(
                f"the mesh has {mesh.size(dimension)} {dimension} ranks, but a rank holds its modules completely; "
                "use only the pipeline and data dimensions of the mesh"
            )
    if config.name == "muon":
        raise PipelineError(
            "optimizer muon is for hidden matrices only, and the library does not know which matrices of a module are "
            "embeddings or heads; use adamw or sgd"
        )
    problems = config.problems()
    if problems:
        raise PipelineError("; ".join(problems))
    return config


def _checked_sample(sample: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    if not sample or any(tensor.dim() == 0 for tensor in sample):
        raise PipelineError(f"the sample is {described(sample)}; it must be tensors whose first axis is rows")
    return sample


def _agreed(mesh: Mesh, plan: ModelPlan) -> ModelPlan:
    """The plan, if all ranks have the same."""
    for rank, other in enumerate(mesh.world.all_gather_object(plan)):
        if other != plan:
            raise PipelineError(
                f"rank {mesh.rank} was given other layers or another sample than rank {rank}; pass the same on "
                "every rank"
            )
    return plan


def _from_file(path: str, options: Options) -> Schedule:
    if options:
        raise PipelineError(
            f"schedule {path} is a file, which takes no options, but {', '.join(options)} was given; leave it out, "
            "or name a schedule"
        )
    return read_file(Path(path))


def _ranges(num_layers: int, num_stages: int, num_ranks: int, by_hand: Sequence[int] | None) -> tuple[range, ...]:
    if num_layers < num_stages:
        raise PipelineError(
            f"{num_layers} layers cannot fill {num_stages} stages ({num_ranks} pipeline ranks, "
            f"{num_stages // num_ranks} each); cut the model into more layers, or use fewer ranks or chunks"
        )
    if by_hand is None:
        bounds = balance_layers([1.0] * num_layers, num_stages)
    else:
        bounds = check_assignment(by_hand, num_layers, num_stages)
    return tuple(range(first, stop) for first, stop in bounds)
