"""The library: any torch modules trained through any schedule, on any mesh.

::

    from megapipe import Pipeline, initialize

    mesh = initialize({"pipeline": 2})
    pipeline = Pipeline(layers, mesh, loss=loss, sample=inputs[:4], microbatches=8, schedule="zb_h1")
    for result in pipeline.step(inputs, targets):
        print(result.step, result.loss)
"""

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from numbers import Integral
from pathlib import Path
from typing import Any, Literal, TypeVar, Unpack, cast

import torch
from torch import Tensor

from megapipe.config.memory import OffloadConfig
from megapipe.config.optimizer import OptimizerConfig
from megapipe.config.parallel import ParallelConfig, ScheduleConfig, ZeroConfig, is_schedule_file
from megapipe.engine.assembly import Assembly, Holding
from megapipe.engine.stage import described
from megapipe.engine.step import StepInput, StepResult
from megapipe.engine.user_modules import (
    Layer,
    Loss,
    Microbatch,
    ModelPlan,
    ModuleUnit,
    PipelineError,
    UserModules,
    plan_layers,
)
from megapipe.layers.linear import Recipe, partition_axis
from megapipe.layout.table import LayerChoice
from megapipe.parallel.collectives import unsharded
from megapipe.parallel.mesh import Mesh
from megapipe.schedules import build
from megapipe.schedules.actions import KIND, Kind
from megapipe.schedules.build import check_one_route, fit_for_training, read_file
from megapipe.schedules.building_blocks import balance_layers, check_assignment
from megapipe.schedules.memory import Offload
from megapipe.schedules.parameters import FileParameters
from megapipe.schedules.registry import Options, find_generator
from megapipe.schedules.schedule import Schedule
from megapipe.schedules.states import StateTable
from megapipe.spec.parameters import LayerSpec, ParameterSpec, tied_stages
from megapipe.spec.token_order import Share

Result = TypeVar("Result")

Tensors = Tensor | Sequence[Tensor]


class Pipeline:
    """One model over the ranks of a mesh. Every rank creates it with the same arguments and calls the same methods.

    Attributes:
        schedule: the lowered schedule, which can be validated, simulated and drawn.
        stages: this rank's stages, with the unit states that hold weights, gradients and moments.
        optimizer: updates them.
        is_first, is_last: whether this rank reads the inputs, and the targets.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> from megapipe import Pipeline, initialize
        >>> mesh = initialize({"pipeline": 1}, device="cpu")
        >>> layers, inputs = [nn.Linear(4, 8), nn.Linear(8, 1)], torch.ones(8, 4)
        >>> loss = nn.MSELoss(reduction="sum")
        >>> pipeline = Pipeline(layers, mesh, loss=loss, sample=inputs[:2], microbatches=4, recompute=True)
        >>> [result.step for result in pipeline.step(inputs, torch.ones(8, 1))]
        [0]
        >>> pipeline.close()
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
        zero: int | ZeroConfig = 0,
        recompute: bool | Collection[int] = False,
        offload: OffloadConfig | None = None,
        fp8: Literal["none"] | Recipe = "none",
        matrices: Collection[str] | None = None,
        **options: Unpack[Options],
    ) -> None:
        """Split the layers into stages, create those of this rank, and connect them. A collective call.

        Args:
            layers: the model as a sequence of modules; each takes what the previous one returns, a tensor or a tuple
                of tensors. The modules are copied, not changed: they have the initial weights, and `state_dict`
                returns the trained ones. A layer may also be a function that creates the module; then a rank creates
                only its own modules. A parameter that several layers have is tied: it stays one weight.
            mesh: of pipeline, data, context and tensor ranks. Tensor ranks shard each `megapipe.ColumnLinear` and
                `RowLinear` within the layers; everything else is replicated on them. Context ranks hold parts of every
                sample, whose tokens are in axis 1; only `megapipe.DotProductAttention` may mix tokens.
            loss: (the last layer's outputs, then a micro-batch's targets) -> loss summed over the micro-batch, 0-dim.
            sample: inputs of one micro-batch; only their shapes and dtypes are used.
            microbatches: micro-batches of a step on each data-parallel replica.
            schedule: a registered name, or the path of a schedule file, with a suffix or a folder (docs/schedules.md).
            optimizer: its settings, including clipping; default: AdamW with its defaults.
            layers_per_stage: number of layers of each stage; default: as even as possible.
            count: targets of a micro-batch -> its part of the number that the loss sum is divided by; default: rows.
            seed: for layers that are created by functions.
            timeout: seconds that a rank waits for another one.
            zero: what replicas shard: 0 nothing, 1 optimizer state, 2 gradients too, 3 weights too; or a ZeroConfig.
            recompute: layers whose forward is rerun before their backward, from their saved inputs; True for all.
                Random numbers are the same both times.
            offload: what is moved to host memory: activations "blocks" (here every layer that is not recomputed),
                optimizer state, weights.
            fp8: "tensorwise" or "rowwise" multiplies in fp8 within every `ColumnLinear` and `RowLinear`.
            matrices: names of the weights that optimizer muon updates by Muon, such as "1.into.weight"; AdamW updates
                the rest. Default: all 2-D weights of the layers between the first and the last.
            options: options of the schedule, such as `chunks`; see `megapipe.schedules.registry.Options`. A file takes
                those that it declares.

        Raises:
            PipelineError: the layers or settings cannot be used.
            ScheduleError: a schedule that does not exist, cannot run that many micro-batches, or is a file made for
                something else.
        """
        self._mesh = mesh
        self._config = _checked_settings(optimizer, timeout, loss, count)
        self._microbatches = microbatches
        parts, replicas = mesh.size("context"), mesh.size("data") * mesh.size("context")
        self._sample = _own_sample(as_tensors(sample, "the sample"), parts)
        plan = _agreed(mesh, plan_layers(layers, self._sample, shared=parts > 1))
        _check_mesh(mesh, plan, fp8)
        self._tokens = _tokens_in_hand(mesh, plan, self._sample[0].shape[1] * parts) if parts > 1 else None
        if self._config.name == "muon":
            plan = _with_matrices(plan, matrices)
        rerun = set(range(len(layers)) if recompute is True else recompute or ())
        zero = ZeroConfig(stage=zero) if isinstance(zero, int) else zero  # type: ignore[arg-type]
        choice = LayerChoice(zero.stage, fp8=fp8 != "none")
        holding = Holding(
            [choice._replace(recompute="full" if index in rerun else "none") for index in range(len(layers))],
            zero,
            offload or OffloadConfig(),
            self._config,
            ParallelConfig(timeout_seconds=timeout),
            fp8=fp8,
            seed=seed,
        )
        _check_holding(holding, rerun, replicas)
        self.schedule, ranges = _schedule(plan, holding, mesh, schedule, microbatches, layers_per_stage, options)
        splits = any((rows[:, KIND] == Kind.BACKWARD_INPUT).any() for rows in self.schedule.sections.body)
        modules = UserModules(layers, plan, mesh, loss, seed, rerun)
        self._assembly = Assembly(modules.table(ranges, splits=splits), holding, mesh, self.schedule.header)
        self.stages, self.optimizer = self._assembly.stages, self._assembly.optimizer
        self.is_first = 0 in self.stages
        self.is_last = len(ranges) - 1 in self.stages
        self._count = count
        modules.initialize(self._assembly, self.schedule.header, self._assembly.communicators(self.schedule))
        self._engine = self._assembly.engine(self.schedule)
        self._next_step = 0
        self._under_way = False
        self._rehearsed = mesh.device.type != "cuda" or mesh.size("pipeline") == 1

    def step(
        self, inputs: Tensors | None = None, targets: Tensors | None = None, learning_rate: float | None = None
    ) -> tuple[StepResult, ...]:
        """Train on one batch: forward, backward, and the update of all weights.

        On GPUs the first call runs the modules twice: once without messages and update, so that no kernel has to be
        loaded while a message is awaited (docs/nccl.md).

        Returns the steps that ended. A schedule that flushes ends every step. A schedule that never flushes ends the
        previous step: the first call returns none, and `drain` returns the last one. Results are the same on all
        ranks.

        Args:
            inputs: this replica's batch, with `microbatches` times the rows of the sample; only read if `is_first`.
                Context ranks and tensor ranks of a replica get the same batch of whole samples.
            targets: the same for the loss; only read if `is_last`.
            learning_rate: of this step; by default the optimizer's setting.

        Raises:
            PipelineError: a batch that does not fit.
            EngineError: a step failed; the message names rank, step and action.
        """
        batch = self._batch(inputs, targets)
        counts = [self._counted(each) if self.is_last else 0.0 for each in batch]
        rate = self._config.learning_rate if learning_rate is None else learning_rate
        if not isinstance(rate, int | float) or not 0 <= rate < math.inf:
            raise PipelineError(f"learning_rate is {rate!r}; it must be finite and at least 0")
        step_input = StepInput(self._next_step, batch, counts, rate)
        if not self._rehearsed:
            device = self._mesh.device
            # Modules may draw random numbers.
            with torch.random.fork_rng([device] if device.type == "cuda" else []):
                self._or_close(lambda: self._engine.rehearse(step_input))
            self._rehearsed = True
        results = self._or_close(lambda: self._engine.feed(step_input))
        self._next_step += 1
        self._under_way = not self.schedule.flushes
        return results

    def drain(self) -> tuple[StepResult, ...]:
        """End the step in progress and return its result; an empty tuple if the schedule flushes every step."""
        self._under_way = False
        return self._or_close(self._engine.drain)

    def state_dict(self) -> dict[str, Tensor]:
        """Return the whole model's newest weights and buffers, on the CPU, for `torch.nn.Sequential(*layers)`.
        Collective.

        Raises PipelineError if a step is in progress.
        """
        if self._under_way:
            raise PipelineError(f"step {self._next_step - 1} is in progress; call drain first")
        own: dict[int, dict[str, Tensor]] = {}
        tensor = self._mesh.group("tensor")
        for index, unit in self._assembly.whole_layers():
            module = cast(ModuleUnit, unit).module
            own[index] = {
                f"{index}.{path}": unsharded(value, tensor, partition_axis(module, path)).detach().to("cpu", copy=True)
                for path, value in module.state_dict().items()
            }
        layers: dict[int, dict[str, Tensor]] = {}
        for part in self._mesh.group("pipeline").all_gather_object(own):
            layers |= part
        return dict(item for index in sorted(layers) for item in layers[index].items())

    def close(self) -> None:
        """Release the links, with their memory and file descriptors. No step can run after that. A failed step
        releases them too.

        Without this call they are released when Python collects the pipeline.
        """
        self._assembly.close()

    def _or_close(self, run: Callable[[], Result]) -> Result:
        """Return the result of `run`. If it fails, close the links, so that no peer waits for ever."""
        try:
            return run()
        except BaseException:
            self.close()
            raise

    def _counted(self, microbatch: Microbatch) -> float:
        if self._count is None:
            return self._sample[0].shape[0] / self._mesh.size("context")
        count = float(self._count(*microbatch.targets))
        if not 0.0 <= count < math.inf:
            raise PipelineError(
                f"count gave {count} for the targets {described(microbatch.targets)}; "
                "the loss sum is divided by it, so it must be finite and at least 0"
            )
        return count

    def _batch(self, inputs: Tensors | None, targets: Tensors | None) -> list[Microbatch]:
        parts = [Microbatch() for _ in range(self._microbatches)]
        if self.is_first:
            if inputs is None:
                raise PipelineError("this rank runs the first stage; give it the inputs")
            cut = self._cut(as_tensors(inputs, "inputs"), "inputs")
            if described(cut[0]) != described(self._sample):
                raise PipelineError(
                    f"a micro-batch of the inputs is {described(cut[0])}, "
                    f"but the pipeline was built for {described(self._sample)}; "
                    f"pass a batch with {self._microbatches} times the rows of the sample"
                )
            parts = [Microbatch(inputs=part) for part in cut]
        if self.is_last and targets is not None:
            cut = self._cut(as_tensors(targets, "targets"), "targets")
            rows = self._sample[0].shape[0]
            if self._count is None and any(each.shape[0] % rows for each in cut[0]):
                raise PipelineError(
                    f"a micro-batch of the targets is {described(cut[0])}, "
                    f"but one of the inputs has {rows} rows, by which the loss is divided; "
                    "pass targets for each row, or set count"
                )
            parts = [Microbatch(part.inputs, own) for part, own in zip(parts, cut, strict=True)]
        return parts

    def _cut(self, tensors: Sequence[Tensor], what: str) -> list[tuple[Tensor, ...]]:
        """Return the rows of every tensor by micro-batch, on this rank's device."""
        for tensor in tensors:
            if tensor.dim() == 0 or tensor.shape[0] % self._microbatches:
                raise PipelineError(
                    f"{what} of shape {list(tensor.shape)} cannot be split into {self._microbatches} micro-batches "
                    "with equal numbers of rows; change the batch, or microbatches"
                )
        held = tensors if self._tokens is None else [self._held(tensor, self._tokens, what) for tensor in tensors]
        columns = [tensor.to(self._mesh.device).chunk(self._microbatches) for tensor in held]
        return [tuple(each[part] for each in columns) for part in range(self._microbatches)]

    def _held(self, tensor: Tensor, tokens: Tensor, what: str) -> Tensor:
        """Return the tokens of whole samples that this context rank holds."""
        length = len(tokens) * self._mesh.size("context")
        if tensor.dim() < 2 or tensor.shape[1] != length:
            raise PipelineError(
                f"{what} of shape {list(tensor.shape)} do not have {length} tokens in axis 1; "
                "pass whole samples, of which each context rank takes its part"
            )
        return tensor[:, tokens.to(tensor.device)]


def as_tensors(tensors: Tensors, what: str) -> tuple[Tensor, ...]:
    """Return one or several tensors as a tuple. Raises PipelineError, which names `what`, for anything else."""
    parts = tuple(tensors) if isinstance(tensors, Sequence) else (tensors,)
    for part in parts:
        if not isinstance(part, Tensor):
            raise PipelineError(
                f"{what} of type {type(tensors).__name__} contains {type(part).__name__}; "
                "pass a tensor, or a tuple of tensors"
            )
    return parts


def _checked_settings(
    optimizer: OptimizerConfig | None, timeout: float, loss: Loss, count: Callable[..., float] | None
) -> OptimizerConfig:
    config = OptimizerConfig() if optimizer is None else optimizer
    if not isinstance(config, OptimizerConfig):
        raise PipelineError(f"optimizer is {config!r}; it must be settings, such as OptimizerConfig(name='adamw')")
    # The default of torch's losses is a mean.
    if count is None and getattr(loss, "reduction", None) == "mean":
        name = type(loss).__name__
        raise PipelineError(
            f"the loss is {name}(reduction='mean'), but must return a micro-batch's sum, "
            f"which is divided by the rows of the global batch; use {name}(reduction='sum')"
        )
    if not timeout > 0:
        raise PipelineError(f"timeout is {timeout}; it must be above 0 seconds")
    problems = config.problems()
    if problems:
        raise PipelineError("; ".join(problems))
    return config


def _check_mesh(mesh: Mesh, plan: ModelPlan, fp8: str) -> None:
    size = mesh.size("tensor")
    split = [spec for spec in _parameters(plan.specs) if spec.partition_axis is not None]
    if (size > 1 or fp8 != "none") and not split:
        raise PipelineError(
            f"the mesh has {size} tensor ranks and fp8 is {fp8}, but no layer contains a "
            "megapipe.layers.ColumnLinear or RowLinear; use them to split or multiply in fp8"
        )
    for spec in split:
        axis = spec.partition_axis or 0
        if spec.shape[axis] % size:
            raise PipelineError(
                f"parameter {spec.name} has {spec.shape[axis]} elements along axis {axis}, "
                f"which {size} tensor ranks do not divide; change its size or the mesh"
            )


def _parameters(layers: Sequence[LayerSpec]) -> list[ParameterSpec]:
    return [spec for layer in layers for spec in layer.parameters.values()]


def _check_holding(holding: Holding, rerun: Collection[int], replicas: int) -> None:
    zero, offload, count = holding.zero, holding.offload, len(holding.choices)
    problems = [*zero.problems(), *offload.problems()]
    if zero.stage in range(4):
        problems += zero.replica_problems(replicas)
    else:
        problems.append(f"zero is {zero.stage}; it must be from 0 to 3")
    unknown = sorted(index for index in rerun if not 0 <= index < count)
    if unknown:
        problems.append(f"recompute names layers {unknown}; the layers are 0 to {count - 1}")
    if offload.activations == "auto":
        problems.append(
            "offload.activations is auto, which needs costs of blocks, and modules "
            "of your own have none; set offload.activations to blocks"
        )
    if offload.activations == "blocks" and len(rerun) == count:
        problems.append("offload.activations blocks has nothing to move, because every layer is recomputed")
    if offload.weights and zero.stage:
        problems.append(f"offload.weights cannot be combined with zero stage {zero.stage}; use one of the two")
    limits = (zero.weight_memory, zero.gradient_memory, offload.weight_memory)
    if any(limit is not None for limit in limits):
        problems.append("limits in GiB are for configured models; set weight_buffers and gradient_buffers instead")
    if problems:
        raise PipelineError("; ".join(problems))


def _run_of(holding: Holding, ranges: Sequence[range], replicas: int) -> dict[str, Any]:
    """Return the arguments of `build` that describe state and memory."""
    zero, offload = holding.zero, holding.offload
    rerun = {index for index, choice in enumerate(holding.choices) if choice.recompute == "full"}
    units = [len(members) for members in ranges]
    stage = zero.stage if zero.num_shards(replicas) > 1 else 0
    weights = offload.weight_buffers if offload.weights else zero.weight_buffers if stage >= 3 else 0
    kept = [[unit for unit, index in enumerate(members) if index not in rerun] for members in ranges]
    moved = [own[:: offload.every][: offload.num_blocks] for own in kept] if offload.activations == "blocks" else ()
    again = [[range(unit, unit + 1) for unit, index in enumerate(each) if index in rerun] for each in ranges]
    return {
        "units_per_stage": units,
        "data_parallel": replicas > 1,
        "states": StateTable.uniform(
            units,
            weight_pool=weights,
            gradient_pool=zero.gradient_buffers if stage >= 2 else 0,
            weights="host" if offload.weights else "sharded",
        ),
        "recompute": again if rerun else (),
        "offload": Offload(tuple(map(tuple, moved)), offload.prefetch or 1, offload.optimizer),
    }


def _with_matrices(plan: ModelPlan, names: Collection[str] | None) -> ModelPlan:
    """Return the plan with only the matrices marked that Muon updates. names: None for the default."""
    known = {spec.name for spec in _parameters(plan.specs) if spec.matrix}
    if names is None:
        names = known - {spec.name for spec in _parameters((plan.specs[0], plan.specs[-1]))}
    if unknown := sorted(set(names) - known):
        raise PipelineError(f"matrices names {', '.join(unknown)}, but the 2-D weights are {', '.join(sorted(known))}")
    if not names:
        raise PipelineError(
            "optimizer muon has no matrix to update: no layer between the first and the last "
            "has a 2-D weight; name some in matrices, or use adamw"
        )

    def marked(layer: LayerSpec) -> LayerSpec:
        parameters = {path: replace(spec, matrix=spec.name in names) for path, spec in layer.parameters.items()}
        return replace(layer, parameters=parameters)

    return replace(plan, specs=tuple(map(marked, plan.specs)))


def _own_sample(sample: tuple[Tensor, ...], parts: int) -> tuple[Tensor, ...]:
    """Return the part of the sample that one of `parts` context ranks holds; only shapes and dtypes are right."""
    if not sample or any(tensor.dim() == 0 for tensor in sample):
        raise PipelineError(f"the sample is {described(sample)}; it must be tensors whose first axis is rows")
    if parts == 1:
        return sample
    tokens = {tensor.shape[1] if tensor.dim() > 1 else 0 for tensor in sample}
    if len(tokens) > 1 or min(tokens) == 0 or min(tokens) % parts:
        raise PipelineError(
            f"the sample is {described(sample)}; with {parts} context ranks, "
            f"axis 1 of each tensor must be tokens, of the same number, a multiple of {parts}"
        )
    return tuple(tensor[:, : tensor.shape[1] // parts] for tensor in sample)


def _tokens_in_hand(mesh: Mesh, plan: ModelPlan, length: int) -> Tensor:
    """Return the positions of this rank's tokens, int64 [tokens of this rank], in samples of `length` tokens."""
    group = mesh.group("context")
    try:
        return torch.from_numpy(Share(plan.order, group.rank, group.size).numbers(length))
    except ValueError as error:
        raise PipelineError(str(error)) from error


def _agreed(mesh: Mesh, plan: ModelPlan) -> ModelPlan:
    """Return the plan, if all ranks have the same one."""
    for rank, other in enumerate(mesh.world.all_gather_object(plan)):
        if other != plan:
            raise PipelineError(
                f"rank {mesh.rank} was given other layers or another sample than rank {rank}; "
                "pass the same on every rank"
            )
    return plan


def _schedule(
    plan: ModelPlan,
    holding: Holding,
    mesh: Mesh,
    name: str,
    microbatches: int,
    layers_per_stage: Sequence[int] | None,
    options: Options,
) -> tuple[Schedule, tuple[range, ...]]:
    """Return the lowered schedule, and the layers of each stage."""
    if not isinstance(microbatches, Integral):
        raise PipelineError(f"microbatches is {microbatches!r}; it must be a whole number")
    ranks = mesh.size("pipeline")
    given = (
        read_file(Path(name), FileParameters(ranks, microbatches, dict(options))) if is_schedule_file(name) else None
    )
    if given is None:
        stages, routes = find_generator(name).placed(ranks, options)
        check_one_route(name, len(routes))
    num_stages = len(stages if given is None else given.header.stages)
    ranges = _ranges(len(plan.specs), num_stages, ranks, layers_per_stage)
    run = _run_of(holding, ranges, mesh.size("data") * mesh.size("context")) | {
        "tied_groups": tied_stages(plan.specs, ranges)
    }
    if given is None:
        schedule = build(name, ranks, microbatches, **run, **options)
    else:
        schedule = fit_for_training(given, ranks, microbatches, **run)
    header = schedule.header
    if header.slices > 1:
        raise PipelineError(
            f"schedule {header.name} passes sequences in {header.slices} slices, over which "
            "only megapipe's own models attend; use a schedule of whole samples, such as 1f1b"
        )
    if header.updates_per_step > 1 and holding.optimizer.clip_norm is not None:
        raise PipelineError(
            f"schedule {header.name} updates after every micro-batch, before the norm of the "
            "step's gradients is known; turn clipping off: OptimizerConfig(clip_norm=None)"
        )
    return schedule, ranges


def _ranges(num_layers: int, num_stages: int, num_ranks: int, by_hand: Sequence[int] | None) -> tuple[range, ...]:
    if num_layers < num_stages:
        raise PipelineError(
            f"{num_layers} layers cannot fill {num_stages} stages ({num_ranks} pipeline "
            f"ranks, {num_stages // num_ranks} each); cut the model into more layers, or use fewer ranks or chunks"
        )
    if by_hand is None:
        bounds = balance_layers([1.0] * num_layers, num_stages)
    else:
        bounds = check_assignment(by_hand, num_layers, num_stages)
    return tuple(range(first, stop) for first, stop in bounds)
