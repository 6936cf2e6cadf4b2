"""A configuration's own loader and model, measured in this process."""

import gc
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from megapipe.config.errors import ConfigError
from megapipe.config.run import PretrainConfig
from megapipe.config.schedule import ScheduleConfig
from megapipe.data.page_cache import drop_from_page_cache, memory_for_files, resident_share
from megapipe.data.shard_format import bin_path, idx_path
from megapipe.engine.step import StepInput
from megapipe.parallel.launch import initialize
from megapipe.parallel.mesh import Mesh
from megapipe.training.families import ModelFamily, family_of
from megapipe.training.loader import Consumer, StepBatch
from megapipe.training.precision import with_precision
from megapipe.training.pretrain import ChooseRecompute, named_recompute
from megapipe.training.replica import Replica
from megapipe.training.sources import open_loader, open_samples
from megapipe.training.stall_report import StallReport
from megapipe.training.stall_runs import measure
from megapipe.training.validate import validate

COLD = 0.05
"""Most of the shards' pages that may be in memory where they are to be cold; an open index is some."""


@dataclass(frozen=True)
class StandIn:
    """In place of a model that is not here: reads what first and last stage read, and takes its time."""

    family: ModelFamily
    seconds: float
    is_first: bool = True
    is_last: bool = True

    def train(self, batch: StepBatch) -> None:
        """Takes as long as a step."""
        time.sleep(self.seconds)


class ModelHere:
    """The model, whole, on this process's device."""

    def __init__(self, config: PretrainConfig, mesh: Mesh) -> None:
        self.replica = Replica(config, mesh, family_of(config).layers)
        self._step = 0

    def train(self, batch: StepBatch) -> None:
        """One optimizer step at the learning rate 0, to its end."""
        self.replica.engine.run(StepInput(self._step, batch.contexts, batch.token_counts, learning_rate=0.0))
        self._step += 1


class ColdShards:
    """Empties the page cache of shards, and knows whether that worked.

    resident: share of the shards that memory still held then. read: share that it held when they were to be made cold
    again, which is what a cold run read and what the kernel read ahead of it. why_not: why nothing was made cold.
    """

    def __init__(self, prefixes: tuple[str, ...]) -> None:
        self._paths = [path(prefix) for prefix in prefixes for path in (bin_path, idx_path)]
        self.resident: float | None = None
        self.read: float | None = None
        self.why_not: str | None = None

    @property
    def num_bytes(self) -> int:
        return sum(Path(path).stat().st_size for path in self._paths)

    def make(self) -> bool:
        """Whether the files are cold now."""
        gc.collect()  # a loader that is part of a cycle keeps them mapped
        try:
            if self.resident is not None:
                self.read = resident_share(self._paths)
            drop_from_page_cache(self._paths)
            self.resident = resident_share(self._paths)
        except OSError as error:
            self.why_not = f"the page cache could not be emptied of the shards ({error})"
            return False
        if self.resident <= COLD:
            return True
        self.why_not = (
            f"{self.resident:.0%} of the shards remain in memory after they were removed from the page cache: they "
            "are on a file system in memory (tmpfs), another process has mapped them, or another user owns them; "
            "copy them to files of your own on a disk"
        )
        return False


def measure_stalls(
    config: PretrainConfig,
    *,
    ingestion: float | None,
    num_steps: int,
    warm_up: int,
    say: Callable[[str], None],
    choose_recompute: ChooseRecompute = named_recompute,
) -> StallReport:
    """Measure the first steps of a run as one data-parallel replica has them.

    ingestion: tokens a second of all replicas, where the model is not to be run here. choose_recompute: as in
    `pretrain`.

    Raises ConfigError, DataError or LaunchError before anything is measured.
    """
    num_replicas = config.parallel.data or 1
    parallel = config.parallel
    ranks_each = parallel.pipeline * parallel.context * parallel.tensor
    validate(config, num_replicas * ranks_each)
    if ingestion is None and ranks_each > 1:
        shared = f" x parallel.context {parallel.context}" if parallel.context > 1 else ""
        raise ConfigError(
            f"parallel.pipeline {parallel.pipeline}{shared} x parallel.tensor {parallel.tensor}: one process "
            "cannot be as fast as several; give the tokens/s that a run's log prints with "
            f"--ingestion-tokens-per-second, or set {'all' if shared else 'both'} to 1 to measure the whole model on "
            "this device"
        )
    config = _one_replica(config, num_replicas)
    mesh = initialize({}, device=config.parallel.device)
    samples = config.batch.global_size
    tokens = samples * config.data.sequence_length
    given = None if ingestion is None else ingestion / num_replicas
    num_samples = len(open_samples(config, "train"))
    consumer: Consumer
    if given is None:
        config = choose_recompute(with_precision(config, mesh, None, say), mesh, say)
        model = ModelHere(config, mesh)
        consumer, train = model.replica, model.train
    else:
        pause = StandIn(family_of(config), tokens / given)
        consumer, train = pause, pause.train
    shards = ColdShards(config.data.prefixes)
    found = measure(
        lambda: open_loader(config, mesh, consumer, open_samples(config, "train")),
        train,
        shards.make,
        num_steps=num_steps,
        warm_up=warm_up,
    )
    return StallReport(
        prefixes=config.data.prefixes,
        corpus_bytes=shards.num_bytes,
        memory_bytes=memory_for_files(),
        samples=samples,
        tokens=tokens,
        num_steps=num_steps,
        num_replicas=num_replicas,
        device=str(mesh.device),
        given_ingestion=given,
        not_cold=shards.why_not,
        resident_share=shards.resident,
        read_share=shards.read,
        epochs=(num_steps + warm_up) * samples / num_samples,
        measurement=found,
    )


def _one_replica(config: PretrainConfig, num_replicas: int) -> PretrainConfig:
    """The same run as one process of one replica: that replica's share of a full batch, without a ramp."""
    batch = replace(
        config.batch, global_size=config.batch.global_size // num_replicas, ramp_start=None, ramp_samples=0
    )
    parallel = replace(config.parallel, data=1, pipeline=1, context=1, tensor=1, layers_per_stage=None)
    return replace(config, batch=batch, parallel=parallel, schedule=ScheduleConfig())
