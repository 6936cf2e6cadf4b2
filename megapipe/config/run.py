"""What a training run needs: model, data, batch, layout, schedule, optimizer, duration."""

from dataclasses import dataclass, field
from typing import Literal

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
    """Samples per optimizer step and per forward."""

    global_size: int = 8
    """Samples per optimizer step, over all data-parallel replicas."""
    micro_size: int = 1
    """Samples per micro-batch."""
    ramp_start: int | None = None
    """Samples per step at the start of the run; grows linearly to global_size over ramp_samples, in multiples of
    itself (null: no ramp)."""
    ramp_samples: int = 0
    """Samples after which the ramp has reached global_size."""

    def problems(self) -> list[str]:
        """Every rule of the ramp that is broken, one message each; those that know the layout are checked later."""
        if self.ramp_start is None:
            if self.ramp_samples:
                return [
                    f"batch.ramp_samples is {self.ramp_samples} but batch.ramp_start is null; give the size that the "
                    "ramp starts at, or leave both out"
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
    """Optimizer steps of the whole run; the learning rate follows them."""
    stop_at: int | None = None
    """End after this step as if the run were over (save, evaluate), to be resumed later; null goes on to `steps`."""
    seed: int = 1234
    """Seeds weights, dropout and the order of the data."""
    precision: Literal["auto", "fp32", "bf16", "fp16"] = "fp32"
    """Compute precision; bf16 and fp16 keep fp32 master weights, gradients and moments, and fp16 scales its loss; auto
    times bf16 and fp32, takes the faster."""
    master_weights: bool = True
    """Keep weights in fp32 beside those that compute; false, with bf16 alone, rounds updates to bf16 at random
    (stochastic rounding), for 4 bytes a parameter less."""
    fp8: Literal["none", "tensorwise", "rowwise"] = "none"
    """Multiply the matrices of transformer blocks in fp8, with a scale for each operand or for each of its rows; on
    CPUs the rounding is emulated."""
    fp8_first_kept: int = 0
    """fp8: first blocks that stay in `precision`."""
    fp8_last_kept: int = 0
    """fp8: last blocks that stay in `precision`."""
    compile: bool = False
    """Run every transformer block through torch.compile, which takes a minute or so at the start of a run."""
    deterministic: bool = False
    """Refuse operations whose result may differ from run to run on one device (slower on GPUs)."""
    memory_check: Literal["refuse", "warn"] = "refuse"
    """What to do where the predicted memory of a run exceeds the free memory of a device or host: refuse to start, or
    warn and train regardless."""
    log_every: int = 10
    """Steps between log lines."""
    directory: str = "runs/default"
    """Folder for metrics, the loss curve and checkpoints."""

    @property
    def last_step(self) -> int:
        """The step that this start of the run ends after."""
        return self.steps if self.stop_at is None else min(self.steps, self.stop_at)


@dataclass(kw_only=True)
class KernelsConfig:
    """Which implementation runs each op; the start of a run says what was picked and why."""

    backends: dict[str, str] = field(default_factory=dict)
    """Op -> the backend that must run it: reference, triton, cuda or apex. Ops left out get the fastest that can."""


@dataclass(kw_only=True)
class PretrainConfig:
    """A whole pretraining run."""

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
    """Folder to take initial weights from: a megapipe checkpoint, or a Hugging Face folder of such a model."""

    def problems(self) -> list[str]:
        """Every rule that single fields break, one message each; `megapipe.training.validate` asks the other rooms."""
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
                "model.attention is 'flex' but data.isolate_documents is false; flex keeps documents apart: set the "
                "one to true or the other to auto"
            )
        if self.recompute.method == "selective" and self.training.compile:
            found.append(
                "recompute.method selective does not go with training.compile, which decides by itself what a block "
                "keeps and what it computes again; leave one out, or set recompute.method full"
            )
        if self.training.precision != "fp16" and not self.loss_scale.is_default:
            found.append(
                f"loss_scale is set, and training.precision is {self.training.precision}; only fp16 needs one: set "
                "training.precision fp16, or leave loss_scale out"
            )
        found += fp8_problems(self) + expert_problems(self)
        if not self.training.master_weights and self.training.precision != "bf16":
            found.append(
                f"training.master_weights is false, and training.precision is {self.training.precision}; weights "
                "are rounded at random to bf16 alone: set training.precision bf16, or training.master_weights true"
            )
        if self.parallel.timeout_seconds <= 0:
            found.append(f"parallel.timeout_seconds is {self.parallel.timeout_seconds}; it must be above 0")
        if not 0 <= self.training.seed < 2**63:
            found.append(f"training.seed is {self.training.seed}; it must be at least 0 and below 2^63")
        if self.recompute.method == "selective" and self.offload.activations != "none":
            found.append(
                f"recompute.method selective with offload.activations {self.offload.activations}: what is made again "
                "holds what it is made from on the device, so that it could not leave; set recompute.method none or "
                "full, or offload.activations none"
            )
        if (
            self.recompute.method == "full"
            and self.recompute.num_blocks is None
            and self.offload.activations == "blocks"
        ):
            found.append(
                "recompute.method full with offload.activations blocks leaves no block that keeps activations; set "
                "recompute.num_blocks, or leave one of the two out"
            )
        if self.recompute.method == "full" and self.offload.activations == "auto":
            found.append(
                "recompute.method full with offload.activations auto, which decides by itself what runs again; set "
                "recompute.method none, or offload.activations blocks"
            )
        found += self.budget_problems()
        if self.offload.weights and self.zero.stage:
            found.append(
                f"offload.weights with zero.stage {self.zero.stage}: replicas that share their state fetch weights "
                "from each other, and not from host memory; set zero.stage 0, or offload.weights false"
            )
        found += self._skipping_problems()
        parts = (self.batch, self.zero, self.schedule, self.optimizer, self.loss_scale, self.recompute, self.offload)
        faults = (self.checkpoint, self.watchdog, self.spikes, self.reliability)
        return found + [problem for part in (*parts, *faults) for problem in part.problems()]

    def budget_problems(self) -> list[str]:
        """What recompute.method auto cannot choose for."""
        if self.recompute.method != "auto":
            return []
        found = []
        if self.schedule.file:
            found.append(
                f"recompute.method auto with schedule.file {self.schedule.file}, which may say by itself what runs "
                "again; name a schedule, or a recompute.method"
            )
        if self.offload.activations != "none":
            found.append(
                f"recompute.method auto with offload.activations {self.offload.activations}: each decides what blocks "
                "keep; set offload.activations none, or recompute.method none and offload.activations auto, which "
                "recomputes too"
            )
        return found

    def _skipping_problems(self) -> list[str]:
        found = []
        if self.training.precision == "fp16" and not self.reliability.skip_non_finite:
            found.append(
                "training.precision fp16 finds its loss scale by skipping steps, and reliability.skip_non_finite is "
                "false; set it to true, or training.precision bf16"
            )
        if self.data.order == "megatron" and (self.spikes.watched or self.reliability.skip_samples):
            found.append(
                "data.order megatron lays out as many samples as the run's steps take, so that none can be left out; "
                "set data.order keyed, or leave spikes and reliability.skip_samples out"
            )
        if self.spikes.watched and not self.checkpoint.saves_between:
            found.append(
                "spikes are watched for, and nothing is saved in between: there is no checkpoint to go back to; set "
                "checkpoint.every, or leave spikes out"
            )
        return found
