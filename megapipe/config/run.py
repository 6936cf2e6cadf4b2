"""The configuration of a training run: data, batch, duration, work between steps, faults, and all of it together."""

from dataclasses import dataclass, field
from typing import Annotated, ClassVar, Literal

from megapipe.config.field_types import (
    Bound,
    Fraction,
    NaturalFloat,
    NaturalInt,
    PositiveFloat,
    PositiveInt,
    bound_problems,
)
from megapipe.config.memory import OffloadConfig, RecomputeConfig
from megapipe.config.model import ModelConfig
from megapipe.config.optimizer import LossScaleConfig, OptimizerConfig
from megapipe.config.parallel import ParallelConfig, ScheduleConfig, ZeroConfig, strategy_problems


@dataclass(kw_only=True)
class DataConfig:
    """Where tokens come from and how they are cut into samples."""

    prefix: str = ""
    """Path of a data shard without its .bin/.idx ending, as printed by megapipe preprocess."""
    blend: dict[str, PositiveFloat] = field(default_factory=dict)
    """Several shards with weights, instead of prefix: {data/web: 7, data/code: 2.5}. Samples are mixed in these
    proportions throughout the run. Weights need not sum to 1; a shard that is used up is repeated."""
    split: str = "949,50,1"
    """Relative sizes of the training, validation and test parts of every shard, counted in documents."""
    sequence_length: PositiveInt = 1024
    """Tokens per sample."""
    mask_end_of_document: bool = False
    """Exclude the prediction after each end-of-document token from the loss."""

    isolate_documents: bool = False
    """Restrict attention to the token's own document, and count positions from its start."""
    pack: Literal["concat", "best_fit"] = "concat"
    """How documents fill samples. concat: join the documents in order and cut samples out of the result. best_fit:
    pack whole documents, so that only documents longer than a sample are cut; predictions across a document boundary
    are excluded from the loss. best_fit reads all document lengths at the start."""
    fim_rate: Fraction = 0.0
    """Fraction of training documents that are rearranged for fill-in-the-middle, drawn separately for every sample."""
    fim_suffix_first: Fraction = 0.5
    """Fraction of the rearranged documents whose suffix is placed before the prefix."""
    fim_tokens: list[NaturalInt] | None = None
    """Ids of the tokens that mark prefix, suffix and middle, such as [50258, 50259, 50260]; required if fim_rate is
    above 0, else null."""
    order: Literal["keyed", "megatron"] = "keyed"
    """Order of the training samples. keyed: computed on the fly, so that nothing is built at the start and a run can
    be extended. megatron: the same batches as Megatron-LM, for comparisons; built at the start for exactly
    training.steps steps."""

    @property
    def prefixes(self) -> tuple[str, ...]:
        """Paths of all shards of the run."""
        return tuple(self.blend) if self.blend else (self.prefix,)

    def problems(self) -> list[str]:
        """Return one message for each rule that the fields break."""
        problems = bound_problems(self, "data")
        if self.prefix and self.blend:
            problems.append(f"data.prefix is {self.prefix!r}, data.blend has {len(self.blend)} shards; leave one out")
        if not self.prefix and not self.blend:
            problems.append(
                "data.prefix is empty; set it to the path of a shard without its .bin/.idx ending, as printed by "
                "megapipe preprocess, or list several shards in data.blend"
            )
        if "" in self.blend:
            problems.append("data.blend has a shard without a name; write its path without its .bin/.idx ending")
        if self.order == "megatron" and self.pack != "concat":
            problems.append(
                f"data.pack is {self.pack} but data.order is megatron, which "
                "needs data.pack concat; set that, or data.order to keyed"
            )
        if not self.fim_rate and self.fim_tokens is not None:
            problems.append(
                f"data.fim_tokens is {self.fim_tokens} but data.fim_rate is 0; set the rate, or leave both out"
            )
        return problems

    def token_problems(self, vocabulary_size: int) -> list[str]:
        """Return at most one message: about tokens for fill-in-the-middle that a vocabulary of this size lacks."""
        tokens = self.fim_tokens or []
        if not self.fim_rate or (
            len(set(tokens)) == 3 == len(tokens) and all(each < vocabulary_size for each in tokens)
        ):
            return []
        return [
            f"data.fim_tokens is {self.fim_tokens}; data.fim_rate {self.fim_rate} needs three different ids below "
            f"model.vocabulary_size {vocabulary_size}, for prefix, suffix and middle"
        ]


@dataclass(kw_only=True)
class EvaluationConfig:
    """Loss and perplexity on the validation split."""

    every: PositiveInt | None = None
    """Steps between evaluations, with another one at the end; null means no evaluation."""
    samples: PositiveInt = 64
    """Validation samples per evaluation, always the same ones, rounded up to whole batches."""


@dataclass(kw_only=True)
class CheckpointConfig:
    """Saving and resuming. A checkpoint can be resumed on any layout."""

    every: PositiveInt | Literal["auto", "none"] | None = None
    """Steps between saves; a signal saves as well. auto measures the cost of a save and saves as often as max_overhead
    allows. none, or null: no save before the end, unless every_minutes is given."""
    every_minutes: PositiveFloat | None = None
    """Maximum time from one save to the next, in minutes of training steps, regardless of `every`; null means no
    limit."""
    at_end: bool = True
    """Save after the last step. With false, and without every and every_minutes, a run saves nothing at all, not even
    on a signal."""
    max_overhead: PositiveFloat = 0.035
    """For every auto: fraction of the training time that saves may add."""
    asynchronous: bool = True
    """Copy the state to host memory and continue training while it is written; false writes between two steps and
    needs no memory for a copy."""
    snapshot: Literal["between_steps", "next_step"] = "between_steps"
    """When asynchronous saves copy the state. between_steps: training waits for the copy. next_step: the next step
    copies it in the background of its forwards and backwards, and the update of each layer waits for the copy of this
    layer."""
    signal_deadline_seconds: PositiveFloat = 300.0
    """Seconds after which a save that SIGTERM, SIGINT or SIGHUP requested is abandoned; set it below the time that the
    cluster gives a job between its signal and its end."""
    retry_seconds: NaturalFloat = 600.0
    """Seconds for which a failed save at the end is retried, if the disk is full for example, before the run ends with
    an error; 0 means no retry."""
    keep_last: PositiveInt | None = 2
    """Newest checkpoints to keep; older ones are deleted once a newer one is durable; null keeps all."""
    keep_every: PositiveInt | None = None
    """Also keep every checkpoint whose step is a multiple of this number; null keeps no additional checkpoints."""
    resume: bool = True
    """Continue from the newest complete checkpoint under training.directory, if there is one."""
    accept_other_data: bool = False
    """Resume also where the data, or fields that decide which samples a step sees, differ from the checkpoint's. The
    change is reported, and recorded in metrics.jsonl and in later checkpoints."""

    def __post_init__(self) -> None:
        if self.every == "none":
            self.every = None

    @property
    def saves_between(self) -> bool:
        """Whether the run saves before its end."""
        return self.every is not None or self.every_minutes is not None

    @property
    def saves(self) -> bool:
        """Whether the run saves at all."""
        return self.saves_between or self.at_end

    def problems(self) -> list[str]:
        """Return one message for every rule that a single field breaks."""
        problems = bound_problems(self, "checkpoint")
        if self.snapshot == "next_step" and not self.asynchronous:
            problems.append(
                "checkpoint.snapshot is next_step, but checkpoint.asynchronous is false; "
                "set checkpoint.asynchronous true, or leave checkpoint.snapshot out"
            )
        if self.keep_every is not None and self.keep_last is None:
            problems.append(
                f"checkpoint.keep_every is {self.keep_every} and checkpoint.keep_last null, "
                "which keeps all; set checkpoint.keep_last to at least 1, or leave keep_every out"
            )
        return problems


@dataclass(kw_only=True)
class TrackingConfig:
    """Additional places for metrics, after the terminal and metrics.jsonl. A tracker that fails never stops a run."""

    tensorboard: bool = False
    """Write TensorBoard event files to training.directory/tensorboard."""
    wandb_project: str = ""
    """Weights & Biases project; empty turns it off. The run is offline unless an account is set up, and never asks."""


@dataclass(kw_only=True)
class ProfileConfig:
    """Recording of what each rank does in a few steps, for megapipe schedule overlay."""

    trace: str | None = None
    """Folder for the recording: one rank-N.json per rank, and schedule.txt. null records nothing."""
    first_step: PositiveInt = 3
    """First recorded step, counted from 1 at this start of the run; the steps before it warm up."""
    steps: PositiveInt = 3
    """Number of consecutive steps to record."""


@dataclass(kw_only=True)
class WatchdogConfig:
    """A separate process per rank that ends the job if the rank makes no progress (docs/reliability.md)."""

    enabled: bool = True
    """Watch every rank; only available on Linux."""
    floor_seconds: PositiveFloat = 300.0
    """Within a step: shortest time without any new action that counts as a hang."""
    factor: PositiveFloat = 10.0
    """Within a step: number of median step times without any new action that counts as a hang, if longer than
    floor_seconds."""
    pause_seconds: PositiveFloat = 3600.0
    """Outside of steps, and in the first step, which may compile: time without progress that counts as a hang."""


@dataclass(kw_only=True)
class SpikesConfig:
    """Recovery from loss spikes: return to the last checkpoint and skip the batches that caused the spike.

    Source: Chowdhery et al., 2022, arXiv 2204.02311, section 5.1.
    """

    deviations: PositiveFloat | None = None
    """A loss that exceeds the running median by this many robust standard deviations is a spike; null turns this check
    off. 10 is rarely exceeded by chance."""
    threshold: PositiveFloat | None = None
    """A loss above this value is always a spike; null turns this check off."""
    window: Annotated[int, Bound(4, 100, words="at least 4, and at most the 100 losses that a checkpoint keeps")] = 50
    """For deviations: number of losses in the running median; the check starts after half as many."""
    skip_batches: PositiveInt = 1
    """Number of batches to skip: the one that spiked and those right before it, at most back to the checkpoint."""
    patience: PositiveInt = 3
    """How often the run may return to the same checkpoint; one more spike ends it with an error."""

    @property
    def watched(self) -> bool:
        """Whether any loss counts as a spike."""
        return self.deviations is not None or self.threshold is not None


@dataclass(kw_only=True)
class ReliabilityConfig:
    """Checks of numbers and ranks between steps."""

    skip_non_finite: bool = True
    """Skip the update of a step whose loss or gradients are not finite; false ends the run instead."""
    non_finite_patience: PositiveInt = 20
    """Consecutive skipped steps that end the run; fp16 uses loss_scale.patience, counted at its lowest scale."""
    skip_samples: list[list[int]] = field(default_factory=list)
    """Ranges [first, end) of samples that no step uses, written [[first, end], ...] and numbered as consumed_samples
    in metrics.jsonl."""
    compare_every: PositiveInt | None = 1000
    """Steps between bitwise comparisons of weights and moments that several ranks hold; null means no comparison."""
    stragglers_every: PositiveInt | None = 50
    """Steps between measurements of each rank's time by part of a step, and peak memory; null means no measurement."""
    straggler_factor: Annotated[float, Bound(above=1)] = 1.3
    """A rank is slow if its time exceeds the median of ranks with the same work by this factor."""
    straggler_reports: PositiveInt = 3
    """Consecutive measurements in which a rank must be slow before it is reported."""

    def problems(self) -> list[str]:
        """Return one message for every rule that a single field breaks."""
        return bound_problems(self, "reliability") + [
            f"reliability.skip_samples has {each}; a range is [first, end) with 0 <= first < end"
            for each in self.skip_samples
            if len(each) != 2 or not 0 <= each[0] < each[1]
        ]


@dataclass(kw_only=True)
class BatchConfig:
    """Batch sizes: samples per optimizer step and per micro-batch."""

    global_size: PositiveInt = 8
    """Samples per optimizer step, over all data-parallel replicas."""
    micro_size: PositiveInt = 1
    """Samples per micro-batch, that is, per forward and backward pass of one replica."""
    ramp_start: PositiveInt | None = None
    """Samples per step at the start of the run, if the batch is to grow: it rises linearly to global_size over
    ramp_samples samples, in multiples of ramp_start. null means a constant batch size."""
    ramp_samples: NaturalInt = 0
    """Number of samples after which a growing batch reaches global_size."""

    def problems(self) -> list[str]:
        """Return one message for each broken rule; rules of the ramp that depend on the layout are checked later."""
        problems = bound_problems(self, "batch")
        if self.ramp_start is None:
            if self.ramp_samples:
                problems.append(
                    f"batch.ramp_samples is {self.ramp_samples} but batch.ramp_start is "
                    "null; set batch.ramp_start to the first batch size, or leave both out"
                )
            return problems
        if self.ramp_start > self.global_size:
            problems.append(f"batch.ramp_start is {self.ramp_start}; use at most batch.global_size {self.global_size}")
        if self.ramp_samples == 0:
            problems.append(
                f"batch.ramp_samples is {self.ramp_samples}; a ramp from batch.ramp_start "
                f"{self.ramp_start} needs at least 1, or leave batch.ramp_start out"
            )
        return problems


@dataclass(kw_only=True)
class TrainingConfig:
    """Duration, precision, reproducibility and output."""

    steps: PositiveInt = 100
    """Optimizer steps of the whole run. The learning rate schedule spans them."""
    stop_at: PositiveInt | None = None
    """Stop after this step (evaluate, save), and resume later without any change to the learning rate schedule; null
    means to run all steps."""
    seed: Annotated[int, Bound(0, below=1 << 63, words="at least 0 and below 2^63")] = 1234
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
    fp8_first_kept: NaturalInt = 0
    """With fp8: number of blocks at the start of the model that stay in `precision`."""
    fp8_last_kept: NaturalInt = 0
    """With fp8: number of blocks at the end of the model that stay in `precision`."""
    compile: bool = False
    """Compile every transformer block with torch.compile, which takes about a minute at the start of a run."""
    deterministic: bool = False
    """Allow only operations whose results are reproducible on the same device, and raise an error for others; slower
    on GPUs."""
    memory_check: Literal["refuse", "warn"] = "refuse"
    """Reaction when the predicted memory of a run exceeds the free memory of a device or host: refuse to start, or
    warn and train regardless."""
    log_every: PositiveInt = 10
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
    """A complete pretraining run.

    Example:
        >>> from megapipe import PretrainConfig
        >>> PretrainConfig().model.hidden_size
        768
    """

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

    @property
    def predictions(self) -> int | None:
        """Maximum number of tokens of a sample that the model's head predicts; None for all."""
        return None

    @property
    def loss_terms(self) -> tuple[str, ...]:
        """Names of the terms of the loss."""
        return ("lm", "mtp") if self.model.mtp_layers else ("lm",)

    def problems(self) -> list[str]:
        """Return one message for each rule that the fields break, except those of the model alone.

        `megapipe.training.validation` adds these and further checks.
        """
        problems = self.data.token_problems(self.model.vocabulary_size)
        if not self.training.directory:
            problems.append("training.directory is empty; name a folder, such as runs/default")
        problems += self.parallel.sequence_problems(self.data.sequence_length)
        if self.data.sequence_length > self.model.max_positions:
            problems.append(
                f"data.sequence_length {self.data.sequence_length} exceeds "
                f"model.max_positions {self.model.max_positions}; shorten the samples or raise model.max_positions"
            )
        length = self.data.sequence_length
        problems += [
            f"data.sequence_length {length} is not a multiple of model.attention_chunk_size "
            f"{chunk}; use {length // chunk * chunk}, for example"
            for chunk in self.model.chunk_sizes(length)
            if length % chunk
        ]
        if self.model.attention == "flex" and not self.data.isolate_documents:
            problems.append(
                "model.attention is 'flex' but data.isolate_documents is false; "
                "flex is only for isolated documents: set data.isolate_documents to true, or model.attention to auto"
            )
        if self.recompute.method == "selective" and self.training.compile:
            problems.append(
                "recompute.method selective cannot be combined with training.compile, which chooses by itself what to "
                "recompute in a block; leave one of them out, or set recompute.method full"
            )
        if self.training.precision != "fp16" and self.loss_scale != LossScaleConfig():
            problems.append(
                f"loss_scale is set but training.precision is {self.training.precision}; only "
                "fp16 scales its loss: set training.precision fp16, or leave loss_scale out"
            )
        problems += self._fp8_problems() + self._expert_problems()
        if not self.training.master_weights and self.training.precision != "bf16":
            problems.append(
                "training.master_weights is false but training.precision is "
                f"{self.training.precision}; set training.precision bf16, or training.master_weights true"
            )
        if self.recompute.method == "selective" and self.offload.activations != "none":
            problems.append(
                "recompute.method selective cannot be combined with offload.activations "
                f"{self.offload.activations}: recomputation keeps its inputs on the device; "
                "set recompute.method none or full, or offload.activations none"
            )
        if (
            self.recompute.method == "full"
            and self.recompute.num_blocks is None
            and self.offload.activations == "blocks"
        ):
            problems.append(
                "recompute.method full recomputes every block, so offload.activations blocks "
                "has nothing to move; set recompute.num_blocks, or leave one of the two out"
            )
        if self.recompute.method == "full" and self.offload.activations == "auto":
            problems.append(
                "recompute.method full cannot be combined with offload.activations auto, which chooses by itself what "
                "to recompute; set recompute.method none, or offload.activations blocks"
            )
        problems += self.budget_problems() + strategy_problems(self)
        if self.offload.weights and self.zero.stage:
            problems.append(
                f"offload.weights cannot be combined with zero.stage {self.zero.stage}, "
                "whose ranks fetch no weights from host memory; set zero.stage 0, or offload.weights false"
            )
        problems += self._skipping_problems()
        for name in ("parallel", "training", "evaluation", "profile", "watchdog", "spikes"):
            problems += bound_problems(getattr(self, name), name)
        sections = (self.data, self.batch, self.zero, self.schedule, self.optimizer, self.loss_scale, self.recompute)
        more_sections = (self.offload, self.checkpoint, self.reliability)
        return problems + [problem for section in (*sections, *more_sections) for problem in section.problems()]

    def budget_problems(self) -> list[str]:
        """Return one message for each option that rules out recompute.method auto."""
        if self.recompute.method != "auto":
            return []
        problems = []
        if self.schedule.file:
            problems.append(
                "recompute.method auto cannot be combined with the schedule file "
                f"{self.schedule.file}, which may contain recomputation itself; "
                "name a schedule, or set another recompute.method"
            )
        if self.offload.activations != "none":
            problems.append(
                f"recompute.method auto cannot be combined with offload.activations {self.offload.activations}: "
                "both choose what blocks save; set offload.activations none, "
                "or recompute.method none and offload.activations auto, which recomputes too"
            )
        return problems

    def _skipping_problems(self) -> list[str]:
        problems = []
        if self.training.precision == "fp16" and not self.reliability.skip_non_finite:
            problems.append(
                "training.precision fp16 adjusts its loss scale by skipping steps, but reliability.skip_non_finite is "
                "false; set it to true, or training.precision to bf16"
            )
        if self.data.order == "megatron" and (self.spikes.watched or self.reliability.skip_samples):
            problems.append(
                "data.order megatron builds exactly the samples of training.steps, so no sample can be skipped; set "
                "data.order keyed, or leave spikes and reliability.skip_samples out"
            )
        if self.spikes.watched and not self.checkpoint.saves_between:
            problems.append(
                "spikes is set but the run saves no checkpoints before its end, so there "
                "is no checkpoint to go back to; set checkpoint.every, or leave spikes out"
            )
        return problems

    def _fp8_problems(self) -> list[str]:
        """Return one message for each broken rule of fp8."""
        training, blocks = self.training, self.model.num_layers
        kept = training.fp8_first_kept, training.fp8_last_kept
        if training.fp8 == "none":
            if any(kept):
                return [
                    f"training.fp8_first_kept is {kept[0]} and training.fp8_last_kept "
                    f"{kept[1]}, but training.fp8 is none; set it to tensorwise or rowwise, or leave "
                    "them out"
                ]
            return []
        problems = [
            f"training.fp8 {training.fp8} cannot be combined with model.kv_latent_size "
            f"{each.kv_latent_size}: multi-latent attention has no fp8 matrix products; set "
            "training.fp8 none"
            for each in self.model.kinds_of_layers.values()
            if each.kv_latent_size is not None
        ][:1]
        if training.precision == "fp16":
            problems.append(
                f"training.fp8 {training.fp8} already scales every operand "
                "and cannot be combined with fp16; set training.precision bf16"
            )
        if sum(kept) >= blocks:
            problems.append(
                f"training.fp8_first_kept {kept[0]} and training.fp8_last_kept {kept[1]} must leave "
                f"some of the {blocks} blocks for fp8; lower them, or set training.fp8 none"
            )
        return problems

    def _expert_problems(self) -> list[str]:
        """Return one message for each option that cannot be combined with a mixture of experts."""
        expert_models = [each for each in self.model.kinds_of_layers.values() if each.num_experts is not None]
        if not expert_models:
            size = self.zero.expert_shard_size
            message = f"zero.expert_shard_size is {size} without experts; set model.num_experts, or leave it"
            return [] if size is None else [f"{message} out"]
        conflict = f"cannot be combined with model.num_experts {expert_models[0].num_experts}"
        problems = []
        if self.training.fp8 != "none":
            problems.append(
                f"training.fp8 {self.training.fp8} {conflict}: experts "
                "have no fp8 matrix products; set training.fp8 none"
            )
        if self.training.compile:
            problems.append(
                f"training.compile {conflict}: tokens per expert change from step to step, "
                "but blocks are compiled for fixed sizes; set training.compile false"
            )
        if self.optimizer.name == "muon":
            problems.append(
                f"optimizer.name muon {conflict}: the matrices of all "
                "experts are one parameter; set optimizer.name adamw or sgd"
            )
        if any(each.balances_experts for each in expert_models) and not self.training.master_weights:
            problems.append(
                f"training.master_weights false {conflict}: bf16 would round away the bias "
                f"updates of model.expert_balance_rate {self.model.expert_balance_rate}; "
                "set training.master_weights true, or model.expert_balance_rate 0"
            )
        return problems
