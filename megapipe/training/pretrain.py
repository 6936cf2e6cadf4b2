"""Pretraining: build this rank's part of the model, then step, log, stop."""

import math
from dataclasses import asdict
from pathlib import Path

from megapipe.config.run import PretrainConfig
from megapipe.costs.gpt import gpt_layers
from megapipe.costs.parameters import LayerSpec
from megapipe.data.batches import MicrobatchSource
from megapipe.data.samples import GptSamples
from megapipe.engine.step import StepInput
from megapipe.optim.learning_rate import learning_rate
from megapipe.parallel.launch import LaunchEnvironment, initialize, shutdown
from megapipe.parallel.mesh import Mesh
from megapipe.training.batches import BatchLoader
from megapipe.training.metrics import Metrics
from megapipe.training.replica import Replica
from megapipe.training.signals import StopRequest
from megapipe.training.validate import data_parallel_size, num_microbatches, validate


def pretrain_gpt(config: PretrainConfig, environment: LaunchEnvironment) -> int:
    """Train a GPT as configured; returns the process's exit status (130 after Ctrl-C).

    Raises ConfigError, DataError or LaunchError before any process group starts.
    """
    validate(config, environment.world_size)
    data = data_parallel_size(config, environment.world_size)
    samples = training_samples(config)
    parallel = config.parallel
    mesh = initialize(
        {"data": data, "pipeline": parallel.pipeline, "tensor": parallel.tensor},
        device=parallel.device,
        timeout=parallel.timeout_seconds,
    )
    try:
        return _train(config, mesh, gpt_layers(config.model), samples)
    finally:
        shutdown()


def training_samples(config: PretrainConfig) -> GptSamples:
    """The training split in its shuffled order. Raises DataError for unusable shards."""
    return GptSamples(
        config.data.prefix,
        split="train",
        shares=config.data.split,
        sequence_length=config.data.sequence_length,
        seed=config.training.seed,
        vocabulary_size=config.model.vocabulary_size,
    )


def batch_loader(config: PretrainConfig, mesh: Mesh, replica: Replica, samples: GptSamples) -> BatchLoader:
    """Loads what this rank needs of every step."""
    source = MicrobatchSource(
        samples,
        data_rank=mesh.coordinate("data"),
        data_size=mesh.size("data"),
        micro_size=config.batch.micro_size,
        mask_end_of_document=config.data.mask_end_of_document,
    )
    return BatchLoader(
        source,
        num_microbatches=num_microbatches(config, mesh.world_size),
        global_size=config.batch.global_size,
        seed=config.training.seed,
        device=mesh.device,
        is_first=replica.is_first,
        is_last=replica.is_last,
    )


def _train(config: PretrainConfig, mesh: Mesh, layers: tuple[LayerSpec, ...], samples: GptSamples) -> int:
    replica = Replica(config, mesh, layers)
    loader = batch_loader(config, mesh, replica, samples)
    metrics = _metrics(config, mesh, layers) if mesh.rank == 0 else None
    steps, global_size = config.training.steps, config.batch.global_size
    status = 0
    with StopRequest() as stop, loader.steps(consumed=0) as batches:
        for step, batch in zip(range(steps), batches, strict=False):
            rate = learning_rate(config.optimizer, step + 1, steps)
            result = replica.engine.run(StepInput(step, batch.contexts, batch.token_count, rate, stop.requested))
            if metrics is not None:
                consumed = (step + 1) * global_size
                metrics.step(step + 1, result, learning_rate=rate, consumed_samples=consumed)
            if result.stop:
                status = 130
                break
    if metrics is not None:
        metrics.event("end", status=status)
        print(f"metrics: {metrics.path}" + (" (stopped by Ctrl-C)" if status else ""), flush=True)
        metrics.close()
    return status


def _metrics(config: PretrainConfig, mesh: Mesh, layers: tuple[LayerSpec, ...]) -> Metrics:
    training = config.training
    metrics = Metrics(
        Path(training.directory),
        steps=training.steps,
        log_every=training.log_every,
        printer=lambda line: print(line, flush=True),
    )
    metrics.event("start", config=asdict(config), layout=dict(mesh.shape.sizes))
    unique = {spec.name: spec.num_elements for layer in layers for spec in layer.parameters.values()}
    print(
        f"{sum(unique.values()):,} parameters on {mesh.world_size} rank(s) ({mesh.shape}), schedule "
        f"{config.schedule.name}, {config.training.precision} on {mesh.device.type}; "
        f"ln(vocabulary) = {math.log(config.model.vocabulary_size):.3f}",
        flush=True,
    )
    return metrics
