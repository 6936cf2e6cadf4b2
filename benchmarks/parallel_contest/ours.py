"""megapipe with data parallelism, and a copy of its weights from which the other contestants start."""

from dataclasses import replace
from typing import Literal

import torch
from plain_gpt import PlainGpt
from torch import Tensor

from megapipe.config.model import ModelConfig
from megapipe.config.run import PretrainConfig
from megapipe.engine.step import StepInput
from megapipe.layers.context import MicrobatchContext
from megapipe.parallel.mesh import Mesh
from megapipe.training.loop.replica import Replica

from .setting import BETAS, CLIP, DECAY, LEARNING_RATE, Setting, Step

STAGES = (0, 1, 2, 3)
"""Stages of ZeRO; 0 is plain data parallelism."""
LAYERED_STAGES = (2, 3)
"""Stages that communicate in every micro-batch, unless gradients are accumulated layer by layer."""


def configuration(
    setting: Setting, replicas: int, zero_stage: Literal[0, 1, 2, 3], layered: bool = False
) -> PretrainConfig:
    """Return the configuration of a run that computes the same as the peers.

    layered: all micro-batches pass through a layer before the next layer starts (layered gradient accumulation), so
    that a layer is gathered twice and reduced once per step.
    """
    shape = setting.shape
    config = PretrainConfig(
        model=ModelConfig(
            vocabulary_size=shape.vocabulary_size,
            num_layers=shape.num_layers,
            hidden_size=shape.hidden_size,
            num_heads=shape.num_heads,
            max_positions=shape.sequence_length,
        )
    )
    config.data = replace(config.data, prefix="unused", sequence_length=shape.sequence_length)
    global_size = setting.micro_size * setting.num_microbatches * replicas
    config.batch = replace(config.batch, global_size=global_size, micro_size=setting.micro_size)
    config.parallel = replace(config.parallel, data=replicas, device="cpu")
    config.optimizer = replace(config.optimizer, betas=BETAS, weight_decay=DECAY, clip_norm=CLIP)
    config.zero = replace(config.zero, stage=zero_stage)
    if layered:
        config.schedule = replace(config.schedule, name="modular", chunks=shape.num_layers + 2)
    return config


def megapipe(
    mesh: Mesh, setting: Setting, rank: int, zero_stage: Literal[0, 1, 2, 3] = 0, layered: bool = False
) -> tuple[Step, Replica]:
    """Return a function that runs a step, and the replica. rank: rank whose part of the batch is used. layered: see
    `configuration`."""
    config = configuration(setting, mesh.size("data"), zero_stage, layered)
    replica = Replica(config, mesh)
    contexts = [
        MicrobatchContext(
            tokens=tokens,
            labels=labels,
            loss_mask=torch.ones(labels.shape),
            ordinals=torch.arange(len(tokens)),
        )
        for tokens, labels in setting.batches(rank)
    ]
    counts = [float(labels.numel()) for _, labels in setting.batches(rank)]
    numbers = iter(range(10**9))

    def step() -> float:
        return replica.engine.run(StepInput(next(numbers), contexts, counts, LEARNING_RATE)).loss

    return step, replica


@torch.no_grad()
def plain_copy(replica: Replica, setting: Setting) -> PlainGpt:
    """Return the same model with the same weights in plain torch. replica: a replica that is not sharded."""
    states = replica.states()
    weights = {segment.spec.name: state.view(state.master, segment) for state in states for segment in state.table}
    model, shape = PlainGpt(setting.shape), setting.shape

    def joined(projected: Tensor) -> Tensor:
        """Convert megapipe's [heads, 3, head_dim, ...] to the rows of all queries, all keys and all values."""
        return projected.transpose(0, 1).reshape(3 * shape.hidden_size, *projected.shape[3:])

    parameters = dict(model.named_parameters())
    parameters.pop("word.weight").copy_(weights["embedding.word.weight"][: shape.vocabulary_size])
    parameters.pop("position.weight").copy_(weights["embedding.position.weight"])
    for name in ("weight", "bias"):
        parameters.pop(f"norm.{name}").copy_(weights[f"head.norm.{name}"])
    for name, parameter in parameters.items():
        block, _, path = name.removeprefix("blocks.").partition(".")
        part = path.partition(".")[0]
        place = f"attention.{path}" if part in ("qkv", "output") else f"mlp.{path}" if part in ("up", "down") else path
        weight = weights[f"blocks.{block}.{place}"]
        parameter.copy_(joined(weight) if part == "qkv" else weight.view(parameter.shape))
    return model
