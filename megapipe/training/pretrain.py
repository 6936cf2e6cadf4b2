"""Pretraining from a configuration: check it, build this rank's part of the model, run the loop, print a summary."""

import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import cast

from megapipe.checkpoint.directory import DirectoryLock
from megapipe.config import ConfigError
from megapipe.config.run import PretrainConfig
from megapipe.data.mixing import LONGEST_PERIOD, weights_are_rounded
from megapipe.engine.step import StepInput
from megapipe.layout.batch_plan import BatchPlan, mesh_shape
from megapipe.layout.scheduling import eager_cost, schedule_name
from megapipe.layout.stages import layers_of
from megapipe.parallel.launch import (
    LaunchEnvironment,
    choose_device,
    described_gpu_variables,
    joined,
    set_gpu_variables,
)
from megapipe.parallel.mesh import Mesh
from megapipe.parallel.rendezvous import Start
from megapipe.spec.layers import active_parameters
from megapipe.spec.ops import Precision
from megapipe.spec.parameters import LayerSpec
from megapipe.training.device import keep_freed_memory, require_determinism, with_precision
from megapipe.training.loop.batches import Samples, open_loader, open_samples, reference_losses
from megapipe.training.loop.checkpoints import Checkpointer
from megapipe.training.loop.loader import SKIPPED_SAMPLES, SkippedSamplesFile
from megapipe.training.loop.replica import Replica, muon_shards
from megapipe.training.loop.steps import Evaluator, Position, TrainingLoop
from megapipe.training.memory_check import check_memory
from megapipe.training.observe.display import LOG, LogFile, UtilisationMeter, device_peak, open_display
from megapipe.training.observe.listeners import TERMINAL, Listeners, add_trackers
from megapipe.training.observe.metrics import LOSS_CURVE, METRICS, RUN, LossCurve, MetricsFile
from megapipe.training.observe.traces import Profiler
from megapipe.training.resilience.failures import out_of_memory_reported
from megapipe.training.resilience.guards import Guards
from megapipe.training.resilience.run_identity import (
    RunFolder,
    agree_on_run,
    command_line,
    locked_folder,
    make_folders,
    new_run_id,
    places,
    run_identity,
)
from megapipe.training.resilience.watchdog import Heartbeat, Watchdog
from megapipe.training.validation import (
    attention_kept,
    described_choices,
    document_attention,
    fp8_products,
    kernel_choices,
    validate,
)

Say = Callable[[str], None]
ChooseRecompute = Callable[[PretrainConfig, Mesh, Say], PretrainConfig]
"""A collective call that replaces recompute.method auto. It raises the same ConfigError on every rank if nothing
fits."""


def named_recompute(config: PretrainConfig, mesh: Mesh, say: Say) -> PretrainConfig:
    """Return the configuration unchanged. Raises ConfigError for recompute.method auto, which needs a planner."""
    if config.recompute.method == "auto":
        raise ConfigError(
            "recompute.method auto is chosen by megapipe train; set none, selective or "
            "full, or pass choose_recompute=megapipe.calibration.planning.with_recompute"
        )
    return config


def pretrain(
    config: PretrainConfig,
    environment: LaunchEnvironment,
    start: Start | None = None,
    choose_recompute: ChooseRecompute = named_recompute,
) -> int:
    """Train a model as configured; returns the process's exit status (130 after Ctrl-C, 143 after SIGTERM).

    start: the ranks of this start, None for one process. choose_recompute: resolves recompute.method auto.

    Raises ConfigError, DataError, CheckpointError or LaunchError before any process group starts.
    """
    validate(config, environment.world_size)
    samples = open_samples(config, "train")
    validation = open_samples(config, "validation") if config.evaluation.every is not None else None
    sizes = mesh_shape(config, environment.world_size).sizes
    variables = set_gpu_variables(config.parallel.device, environment.local_rank, sizes, config.zero.stage)
    device = choose_device(config.parallel.device, environment.local_rank)
    if start is not None:
        agree_on_run(start, run_identity(config, environment.world_size, device))
    with locked_folder(Path(config.training.directory), environment.rank, start) as lock:
        make_folders(config, environment)
        if start is not None:
            start.wait_for_all()
            start.is_over = True
        if config.training.deterministic:
            require_determinism()
        watchdog = Watchdog(config.watchdog, environment.rank, Path(config.training.directory))
        parallel = config.parallel
        with watchdog as heartbeat, joined(sizes, parallel.device, parallel.timeout_seconds, start) as mesh:
            if mesh.device.type == "cpu":
                keep_freed_memory()
            return _train(config, mesh, samples, validation, heartbeat, lock, variables, choose_recompute)


def _train(
    config: PretrainConfig,
    mesh: Mesh,
    samples: Samples,
    validation: Samples | None,
    heartbeat: Heartbeat,
    lock: DirectoryLock | None,
    variables: Mapping[str, str],
    choose_recompute: ChooseRecompute,
) -> int:
    """Build the model and train. variables: environment variables that were set for the GPU."""
    run = new_run_id()
    with _listeners(config, mesh, run) as listeners, Checkpointer(config, mesh, listeners.say, lock) as checkpointer:
        say = listeners.say
        if variables:
            say(described_gpu_variables(variables))
        config = choose_recompute(with_precision(config, mesh, checkpointer.precision, say), mesh, say)
        checkpointer.describe(config)
        check_memory(config, mesh, say)
        replica = Replica(config, mesh, heartbeat=heartbeat, say=say)
        choices = kernel_choices(config, mesh.device, replica.kernels)
        position = Position.of(checkpointer.restore(replica))
        if position.step >= config.training.last_step:
            say(
                f"already finished: {checkpointer.path} is after step {position.step} "
                f"of {config.training.last_step}; raise training.steps to train more, "
                "or choose another training.directory for another run"
            )
            return 0
        evaluation = None if validation is None else Evaluator(config, mesh, replica, validation)
        for line in described_choices(choices, config.kernels.backends):
            say(line)
        remarks = [find(config, mesh.device) for find in (document_attention, attention_kept, fp8_products)]
        for remark in (*remarks, *replica.remarks, muon_shards(replica.states())):
            if remark is not None:
                say(remark)
        meter = _meter(config, mesh, say)
        for line in _notes(config, replica):
            say(line)
        _add_files(listeners, config, mesh, samples, position, run)
        _report_start(listeners, config, mesh, position, run)
        loader = open_loader(config, mesh, replica, samples)
        if (change := checkpointer.data_change) is not None:
            listeners.event("other_data", step=change.step, differences=list(change.differences))
        if mesh.device.type == "cuda" and mesh.size("pipeline") > 1:
            heartbeat.outside("the rehearsal of a step")
            with out_of_memory_reported(replica.stages):
                rehearse(config, mesh, replica, samples, evaluation, position.step, say)
        with Profiler(config, mesh, say, position.step) as profiler:
            guards = Guards(config, mesh, heartbeat, listeners)
            loop = TrainingLoop(
                config, mesh, replica, loader, evaluation, checkpointer, meter, listeners, profiler, guards
            )
            status = loop.run(position)
        for state in replica.states():
            state.await_all_weights()  # the last update starts to gather them for a next step
        heartbeat.outside("the end of the run")
        listeners.event("end", run=run, status=status, step=position.step)
        _sum_up(config, position, checkpointer.path, status, say)
        return status


def _notes(config: PretrainConfig, replica: Replica) -> Iterator[str]:
    if config.schedule.update == "eager":
        yield (
            "warning: with schedule.update eager, each update waits for the gradient "
            f"norm of all ranks, and steps take about {eager_cost(replica.schedule):.0%} "
            "longer than with lazy, which needs a second gradient buffer"
        )
    weights = list(config.data.blend.values())
    if weights and config.data.order == "keyed" and weights_are_rounded(weights):
        yield (
            f"note: data.blend's weights were rounded to {LONGEST_PERIOD:,}ths of the "
            "blend; integer weights whose sum is not larger than that are not rounded"
        )


def _report_start(listeners: Listeners, config: PretrainConfig, mesh: Mesh, position: Position, run: str) -> None:
    last = config.training.last_step
    listeners.event(
        "start",
        run=run,
        step=position.step,
        total_samples=BatchPlan.of(config.batch).consumed_after(last - position.step, position.consumed),
        config=asdict(config),
        layout=dict(mesh.shape.sizes),
        schedule=schedule_name(config),
        parameters=num_parameters(layers_of(config)),
    )


def rehearse(
    config: PretrainConfig,
    mesh: Mesh,
    replica: Replica,
    samples: Samples,
    evaluation: Evaluator | None,
    step: int,
    say: Say,
) -> None:
    """Run every kernel of a step and of an evaluation before any message between stages is in flight, so that kernels
    are loaded and their memory is allocated. A collective call. step: number of the next step, from 0.
    """
    start, size = time.perf_counter(), config.batch.global_size
    batch = open_loader(config, mesh, replica, samples, BatchPlan(size, size, 0)).load(consumed=0)
    replica.engine.rehearse(StepInput(step, batch.contexts, batch.token_counts))
    if evaluation is not None:
        evaluation.rehearse()
    say(f"every kernel ran once before the first message, in {time.perf_counter() - start:.1f} s (docs/nccl.md)")


def num_parameters(layers: Sequence[LayerSpec]) -> int:
    """Return the number of parameters of a model. Tied weights count once."""
    return sum({spec.name: spec.num_elements for layer in layers for spec in layer.parameters.values()}.values())


def _meter(config: PretrainConfig, mesh: Mesh, say: Say) -> UtilisationMeter:
    layers = layers_of(config)
    active, total = active_parameters(config.model, layers), num_parameters(layers)
    used = f" ({active:,} used by a token)" if active < total else ""
    say(
        f"{total:,} parameters{used} on {mesh.world_size} rank(s) ({mesh.shape}), schedule "
        f"{schedule_name(config)}, {config.training.precision} on {mesh.device.type}"
    )
    peak = device_peak(mesh.device, cast(Precision, config.training.precision))
    say(f"MFU is relative to {peak}")
    return UtilisationMeter(config, layers, peak, mesh.world_size)


def _listeners(config: PretrainConfig, mesh: Mesh, run: str) -> Listeners:
    """Return the terminal and log.txt on rank 0, and nothing on other ranks. run: id of this start."""
    listeners, training = Listeners(), config.training
    if mesh.rank == 0:
        separator = f"===== start {run}: {command_line()}"
        folder, steps, every = Path(training.directory), training.steps, training.log_every
        listeners.add(TERMINAL, "standard output", lambda: open_display(steps, every))
        listeners.add("files", LOG, lambda: LogFile(folder, steps, every, separator))
    return listeners


def _add_files(
    listeners: Listeners, config: PretrainConfig, mesh: Mesh, samples: Samples, position: Position, run: str
) -> None:
    """Add the listeners that write files in the run's folder, and the trackers, on rank 0. A collective call."""
    hosts_and_devices = places(mesh)
    if mesh.rank != 0:
        return
    references = reference_losses(samples, config.model.vocabulary_size)
    listeners.say(f"losses to beat: {references}")
    folder, step = Path(config.training.directory), position.step
    listeners.add("files", RUN, lambda: RunFolder(folder, run, config, step, hosts_and_devices))
    listeners.add("files", METRICS, lambda: MetricsFile(folder))
    listeners.add("files", SKIPPED_SAMPLES, lambda: SkippedSamplesFile(folder))
    listeners.add("files", LOSS_CURVE, lambda: LossCurve(folder, references))
    add_trackers(listeners, config, position.step > 0)


def _sum_up(config: PretrainConfig, position: Position, checkpoint: Path | None, status: int, say: Say) -> None:
    """Print how the run ended and where its files are."""
    directory = Path(config.training.directory)
    end = f"stopped by {signal.Signals(status - 128).name}" if status else "finished"
    if status and checkpoint is not None and config.checkpoint.resume:
        say("the same command continues this run from the checkpoint")
    loss = f"loss {position.losses[-1][1]:.4f} | " if position.losses else ""
    say(
        f"{end} after step {position.step}/{config.training.steps}, {loss}metrics {directory / METRICS} | "
        f"loss curve {directory / LOSS_CURVE} | checkpoint {checkpoint or 'none'}"
    )
