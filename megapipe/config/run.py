"""The configuration of a training run: model, data, batch, layout, schedule, optimizer and duration."""

from dataclasses import dataclass, field
from typing import ClassVar, Literal

from megapipe.config.between_steps import CheckpointConfig, EvaluationConfig, ProfileConfig, TrackingConfig
from megapipe.config.data import DataConfig
from megapipe.config.feature_rules import expert_problems, fp8_problems
from megapipe.config.loss_scale import LossScaleConfig
from megapipe.config.model import ModelConfig
from megapipe.config.offload import OffloadConfig
from megapipe.config.optimizer import OptimizerConfig
from megapipe.config.parallel import ParallelConfig
from megapipe.config.recompute import RecomputeConfig
from megapipe.config.reliability import ReliabilityConfig, SpikesConfig, WatchdogConfig
from megapipe.config.schedule import ScheduleConfig
from megapipe.config.zero import ZeroConfig


@dataclass(kw_only=True)
class BatchConfig:
    """Batch sizes: samples per optimizer step and per micro-batch."""

    global_size: int = 8
    """Samples per optimizer step, over all data-parallel replicas."""
    micro_size: int = 1
    """Samples per micro-batch, that is, per forward and backward pass of one replica."""
    ramp_start: int | None = None
    """Samples per step at the start of the run, if the batch is to grow: it rises linearly to global_size over
    ramp_samples samples, in multiples of ramp_start. null means a constant batch size."""
    ramp_samples: int = 0
    """Number of samples after which a growing batch reaches global_size."""

    def problems(self) -> list[str]:
        """Return one message for each broken rule of the ramp; rules that depend on the layout are checked later."""
        if self.ramp_start is None:
            if self.ramp_samples:
                return [
                    f"batch.ramp_samples is {self.ramp_samples} but batch.ramp_start is null; set batch.ramp_start to "
                    "the first batch size, or leave both out"
                ]
            return []
        found = []
        if not 1 <= self.ramp_start <= self.global_size:
            found.append(
                f"batch.ramp_start is {self.ramp_start}; it must be at least 1 and at most batch.global_size "
                f"{self.global_size}"
            )
        if self.ramp_samples < 1:
            found.append(
                f"batch.ramp_samples is {self.ramp_samples}; a ramp from batch.ramp_start {self.ramp_start} needs at "
                "least 1, or leave batch.ramp_start out"
            )
        return found


@dataclass(kw_only=True)
class TrainingConfig:
    """Duration, precision, reproducibility and output."""

    steps: int = 100
    """Optimizer steps of the whole run. The learning rate schedule spans them."""
    stop_at: int | None = None
    """Stop after this step (evaluate, save), and resume later without any change to the learning rate schedule; null
    means to run all steps."""
    seed: int = 1234
    """Seed of initial weights, dropout and data order."""
    precision: Literal["auto", "fp32", "bf16", "fp16"] = "fp32"
    """Precision of the computation. bf16 and fp16 keep weights, gradients and moments in fp32 as well; fp16 also
    scales the loss. auto measures bf16 and fp32 at the start and uses the faster one."""
    master_weights: bool = True
    """Keep an fp32 copy of bf16 weights. false, only for bf16, rounds updates stochastically to bf16 instead and saves
    4 bytes per parameter."""
    fp8: Literal["none", "tensorwise", "rowwise"] = "none"
    """Multiply the matrices of the transformer blocks in fp8, with one scale per tensor or per row. On CPUs the
    rounding is emulated."""
    fp8_first_kept: int = 0
    """With fp8: number of blocks at the start of the model that stay in `precision`."""
    fp8_last_kept: int = 0
    """With fp8: number of blocks at the end of the model that stay in `precision`."""
    compile: bool = False
    """Compile every transformer block with torch.compile, which takes about a minute at the start of a run."""
    deterministic: bool = False
    """Allow only operations whose results are reproducible on the same device, and raise an error for others; slower
    on GPUs."""
    memory_check: Literal["refuse", "warn"] = "refuse"
    """What to do when the predicted memory of a run exceeds the free memory of a device or host: refuse to start, or
    warn and train regardless."""
    log_every: int = 10
    """Steps between log lines."""
    directory: str = "runs/default"
    """Folder for metrics, the loss curve and checkpoints."""

    @property
    def last_step(self) -> int:
        """Last step of this start of the run."""
        return self.steps if self.stop_at is None else min(self.steps, self.stop_at)


@dataclass(kw_only=True)
class KernelsConfig:
    """Which implementation runs each operation; the start of a run prints the choice and the reason."""

    backends: dict[str, str] = field(default_factory=dict)
    """Backend to use for an operation, such as {rms_norm: triton}; backends are reference, triton, cuda and apex.
    Operations that are not listed use the fastest backend that is available."""


@dataclass(kw_only=True)
class PretrainConfig:
    """A complete pretraining run."""

    kind: ClassVar[str] = "gpt"
    """Kind of model, as in --kind."""

    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    batch: BatchConfig = field(default_factory=BatchConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    zero: ZeroConfig = field(default_factory=ZeroConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    loss_scale: LossScaleConfig = field(default_factory=LossScaleConfig)
    training: TrainingConfig = field(default_factory=TrainingConfig)
    kernels: KernelsConfig = field(default_factory=KernelsConfig)
    recompute: RecomputeConfig = field(default_factory=RecomputeConfig)
    offload: OffloadConfig = field(default_factory=OffloadConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    tracking: TrackingConfig = field(default_factory=TrackingConfig)
    profile: ProfileConfig = field(default_factory=ProfileConfig)
    watchdog: WatchdogConfig = field(default_factory=WatchdogConfig)
    spikes: SpikesConfig = field(default_factory=SpikesConfig)
    reliability: ReliabilityConfig = field(default_factory=ReliabilityConfig)
    init_from: str = ""
    """Folder with initial weights: a megapipe checkpoint, or a Hugging Face folder of the same model family."""

    def problems(self) -> list[str]:
        """Return one message for each rule that the fields break; `megapipe.training.validate` adds further checks."""
        found = []
        at_least_one = {
            "data.sequence_length": self.data.sequence_length,
            "batch.global_size": self.batch.global_size,
            "batch.micro_size": self.batch.micro_size,
            "parallel.tensor": self.parallel.tensor,
            "parallel.pipeline": self.parallel.pipeline,
            "parallel.context": self.parallel.context,
            "parallel.data": self.parallel.data,
            "schedule.receive_ahead": self.schedule.receive_ahead,
            **{
                f"schedule.{name}": 1 if value is None else value
                for name, value in vars(self.schedule).items()
                if name in ("chunks", "group_size", "max_pending")
            },
            "training.steps": self.training.steps,
            "training.stop_at": 1 if self.training.stop_at is None else self.training.stop_at,
            "training.log_every": self.training.log_every,
            "evaluation.every": self.evaluation.every,
            "evaluation.samples": self.evaluation.samples,
            "profile.first_step": self.profile.first_step,
            "profile.steps": self.profile.steps,
        }
        found += [
            f"{name} is {value}; it must be at least 1"
            for name, value in at_least_one.items()
            if value is not None and value < 1
        ]
        found += self.data.problems(self.model.vocabulary_size)
        found += self.parallel.sequence_problems(self.data.sequence_length)
        if self.data.sequence_length > self.model.max_positions:
            found.append(
                f"data.sequence_length {self.data.sequence_length} exceeds model.max_positions "
                f"{self.model.max_positions}; shorten the samples or raise model.max_positions"
            )
        if self.model.attention == "flex" and not self.data.isolate_documents:
            found.append(
                "model.attention is 'flex' but data.isolate_documents is false; flex is only for isolated documents: "
                "set data.isolate_documents to true, or model.attention to auto"
            )
        if self.recompute.method == "selective" and self.training.compile:
            found.append(
                "recompute.method selective cannot be combined with training.compile, which chooses by itself what to "
                "recompute in a block; leave one of them out, or set recompute.method full"
            )
        if self.training.precision != "fp16" and not self.loss_scale.is_default:
            found.append(
                f"loss_scale is set but training.precision is {self.training.precision}; only fp16 scales its loss: "
                "set training.precision fp16, or leave loss_scale out"
            )
        found += fp8_problems(self) + expert_problems(self)
        if not self.training.master_weights and self.training.precision != "bf16":
            found.append(
                f"training.master_weights is false but training.precision is {self.training.precision}; only bf16 can "
                "train without master weights: set training.precision bf16, or training.master_weights true"
            )
        if self.parallel.timeout_seconds <= 0:
            found.append(f"parallel.timeout_seconds is {self.parallel.timeout_seconds}; it must be above 0")
        if not 0 <= self.training.seed < 2**63:
            found.append(f"training.seed is {self.training.seed}; it must be at least 0 and below 2^63")
        if self.recompute.method == "selective" and self.offload.activations != "none":
            found.append(
                f"recompute.method selective cannot be combined with offload.activations {self.offload.activations}: "
                "recomputation keeps its inputs on the device, so they cannot be offloaded; set recompute.method none "
                "or full, or offload.activations none"
            )
        if (
            self.recompute.method == "full"
            and self.recompute.num_blocks is None
            and self.offload.activations == "blocks"
        ):
            found.append(
                "recompute.method full recomputes every block, so offload.activations blocks has nothing to move; set "
                "recompute.num_blocks, or leave one of the two out"
            )
        if self.recompute.method == "full" and self.offload.activations == "auto":
            found.append(
                "recompute.method full cannot be combined with offload.activations auto, which chooses by itself what "
                "to recompute; set recompute.method none, or offload.activations blocks"
            )
        found += self.budget_problems() + self.zero.block_problems(self.model.num_layers)
        if self.offload.weights and self.zero.stage:
            found.append(
                f"offload.weights cannot be combined with zero.stage {self.zero.stage}: replicas that shard their "
                "state do not fetch weights from host memory; set zero.stage 0, or offload.weights false"
            )
        found += self._skipping_problems()
        parts = (self.batch, self.zero, self.schedule, self.optimizer, self.loss_scale, self.recompute, self.offload)
        faults = (self.checkpoint, self.watchdog, self.spikes, self.reliability)
        return found + [problem for part in (*parts, *faults) for problem in part.problems()]

    def budget_problems(self) -> list[str]:
        """Return one message for each option that rules out recompute.method auto."""
        if self.recompute.method != "auto":
            return []
        found = []
        if self.schedule.file:
            found.append(
                f"recompute.method auto cannot be combined with schedule.file {self.schedule.file}, which may contain "
                "recomputation itself; set schedule.name instead, or another recompute.method"
            )
        if self.offload.activations != "none":
            found.append(
                f"recompute.method auto cannot be combined with offload.activations {self.offload.activations}: both "
                "choose what blocks save; set offload.activations none, or recompute.method none and "
                "offload.activations auto, which recomputes too"
            )
        return found

    def _skipping_problems(self) -> list[str]:
        found = []
        if self.training.precision == "fp16" and not self.reliability.skip_non_finite:
            found.append(
                "training.precision fp16 adjusts its loss scale by skipping steps, but reliability.skip_non_finite is "
                "false; set it to true, or training.precision to bf16"
            )
        if self.data.order == "megatron" and (self.spikes.watched or self.reliability.skip_samples):
            found.append(
                "data.order megatron builds exactly the samples of training.steps, so no sample can be skipped; set "
                "data.order keyed, or leave spikes and reliability.skip_samples out"
            )
        if self.spikes.watched and not self.checkpoint.saves_between:
            found.append(
                "spikes is set but the run saves no checkpoints before its end, so there is no checkpoint to go back "
                "to; set checkpoint.every, or leave spikes out"
            )
        return found
