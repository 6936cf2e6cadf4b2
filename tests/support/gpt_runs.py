"""Small GPT runs for layout tests: the same configuration on any mesh, with losses, gradients and weights by name."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from megapipe.config.model import ModelConfig
from megapipe.config.run import PretrainConfig
from megapipe.data.shard_writer import ShardWriter
from megapipe.engine.step import StepInput, StepResult
from megapipe.optim.scaling import learning_rate
from megapipe.parallel.launch import LaunchEnvironment
from megapipe.parallel.mesh import Mesh
from megapipe.parallel.unit_state import UnitState
from megapipe.spec.parameters import Box
from megapipe.training.loop.batches import open_loader, open_samples
from megapipe.training.loop.loader import StepBatch
from megapipe.training.loop.replica import Replica
from megapipe.training.pretrain import pretrain

VOCABULARY = 61

GPT2_SHAPE = ModelConfig(
    vocabulary_size=VOCABULARY,
    num_layers=2,
    hidden_size=32,
    num_heads=4,
    max_positions=16,
    activation="gelu_tanh",
    tie_embeddings=True,
)
LLAMA_SHAPE = ModelConfig(
    vocabulary_size=VOCABULARY,
    num_layers=2,
    hidden_size=32,
    num_heads=4,
    num_kv_heads=2,
    max_positions=16,
    normalization="rms_norm",
    activation="swiglu",
    positions="rotary",
    bias="none",
    tie_embeddings=False,
)


def write_shard(folder: Path, documents: int = 40, seed: int = 0, vocabulary: int = VOCABULARY) -> str:
    """A shard of random documents of 5 to 40 tokens; ids favour small numbers, so that there is something to learn."""
    generator = np.random.default_rng(seed)
    prefix = folder / "corpus"
    with ShardWriter(prefix, np.dtype(np.uint16)) as writer:
        for _ in range(documents):
            length = int(generator.integers(5, 40))
            writer.add_document([(generator.beta(1, 3, size=length) * vocabulary).astype(np.uint16)])
        writer.commit()
    return str(prefix)


def make_config(prefix: str, model: ModelConfig, **groups: dict[str, Any]) -> PretrainConfig:
    """A tiny run over `prefix`; groups override fields, e.g. schedule={"name": "gpipe"}."""
    config = PretrainConfig(model=model)
    config.data = replace(config.data, prefix=prefix, split="90,5,5", sequence_length=16, mask_end_of_document=True)
    config.batch = replace(config.batch, global_size=8, micro_size=1)
    config.optimizer = replace(config.optimizer, learning_rate=5e-3, warmup_steps=2, clip_norm=0.5)
    config.training = replace(config.training, steps=20)
    config.checkpoint = replace(config.checkpoint, retry_seconds=0.0)
    config.parallel = replace(config.parallel, device="cpu")
    return replace(config, **{name: replace(getattr(config, name), **values) for name, values in groups.items()})


@dataclass(frozen=True)
class Shard:
    """One rank's part of one tensor of the model: the elements of a flattened box in the range `extent`."""

    name: str
    shape: tuple[int, ...]
    box: Box
    extent: range
    values: Tensor


@dataclass(frozen=True)
class RankRun:
    """The results of a run on one rank. gradients: after the reductions of step 1, before clipping."""

    results: list[StepResult]
    gradients: list[Shard]
    weights: list[Shard]


def shards(states: Sequence[UnitState], flats: Sequence[Tensor]) -> list[Shard]:
    """Owned parts of one flat buffer per state, a rank's shard, by parameter."""
    return [
        Shard(
            segment.spec.name,
            segment.spec.shape,
            segment.box,
            state.held(segment),
            state.in_shard(flat, segment).clone(),
        )
        for state, flat in zip(states, flats, strict=True)
        for segment in state.table
    ]


def opened(mesh: Mesh, config: PretrainConfig) -> tuple[Replica, Callable[..., StepInput]]:
    """Return the replica of this rank, and a function that loads the input of a step: its number, the learning rate
    and other fields."""
    replica = Replica(config, mesh)
    loader = open_loader(config, mesh, replica, open_samples(config, "train"))

    def given(step: int, rate: float = 1e-2, **fields: Any) -> StepInput:
        batch = loader.load(step * config.batch.global_size)
        return StepInput(step, batch.contexts, batch.token_counts, rate, **fields)

    return replica, given


def train_alone(config: PretrainConfig) -> int:
    """Run the program of one process to its end, and return its exit status."""
    return pretrain(config, LaunchEnvironment())


def train_step(replica: Replica, config: PretrainConfig, batch: StepBatch, step: int) -> StepResult:
    """Run one step with the learning rate and the loss scale that pretrain would choose."""
    rate = learning_rate(config.optimizer, step + 1, config.training.steps)
    scaler = replica.loss_scaler
    scale = 1.0 if scaler is None else scaler.scale(step)
    result = replica.engine.run(StepInput(step, batch.contexts, batch.token_counts, rate, loss_scale=scale))
    if scaler is not None:
        scaler.observe(step, result.skipped)
    return result


def run_gpt(mesh: Mesh, config: PretrainConfig, steps: int | None = None, timeout: float = 30.0) -> RankRun:
    """Train on this rank as pretrain_gpt.py or pretrain_bert.py would, keeping the first step's gradients.

    timeout: of links, in s.
    """
    sizes = mesh.shape.sizes
    parallel = replace(config.parallel, **sizes)
    config = replace(config, parallel=replace(parallel, timeout_seconds=timeout))
    replica = Replica(config, mesh)
    gradients = keep_first_gradients(replica)
    batches = load_batches(replica, config, mesh, config.training.steps if steps is None else steps)
    results = [train_step(replica, config, batch, step) for step, batch in enumerate(batches)]
    states = replica.states()
    return RankRun(results, list(gradients.values()), shards(states, [state.master for state in states]))


def load_batches(replica: Replica, config: PretrainConfig, mesh: Mesh, steps: int = 1) -> list[StepBatch]:
    """Return this rank's part of the first training batches."""
    loader = open_loader(config, mesh, replica, open_samples(config, "train"))
    return [loader.load(step * config.batch.global_size) for step in range(steps)]


def keep_first_gradients(replica: Replica) -> dict[str, Shard]:
    """Return a dictionary that receives the gradients of every parameter's first update, before clipping."""
    gradients: dict[str, Shard] = {}
    update = replica.optimizer.update

    def recording(states: Sequence[UnitState], version: int, rate: float, coefficient: Tensor) -> None:
        with _disable_current_modes():  # what the test keeps is not the run's
            for shard in shards(states, [state.reduced_gradient(version) for state in states]):
                gradients.setdefault(shard.name, shard)
        update(states, version, rate, coefficient)

    replica.optimizer.update = recording  # type: ignore[method-assign]
    return gradients


def assembled(parts: Sequence[list[Shard]]) -> dict[str, Tensor]:
    """Return whole tensors by name from every rank's shards; copies of one shard must agree bit for bit."""
    tensors: dict[str, Tensor] = {}
    seen: dict[str, Tensor] = {}
    for shard in (shard for part in parts for shard in part):
        if shard.name not in tensors:
            tensors[shard.name] = torch.zeros(shard.shape, dtype=shard.values.dtype)
            seen[shard.name] = torch.zeros(shard.shape, dtype=torch.bool)
        index = tuple(slice(start, stop) for start, stop in zip(shard.box.starts, shard.box.stops, strict=True))
        extent = slice(shard.extent.start, shard.extent.stop)
        values, known = tensors[shard.name][index].flatten(), seen[shard.name][index].flatten()
        if known[extent].any():
            assert torch.equal(values[extent], shard.values), f"ranks disagree about {shard.name}"
        values[extent], known[extent] = shard.values, True
        tensors[shard.name][index] = values.view(shard.box.shape)
        seen[shard.name][index] = known.view(shard.box.shape)
    incomplete = [name for name, covered in seen.items() if not covered.all()]
    assert not incomplete, f"no rank holds all of {incomplete}"
    return tensors
