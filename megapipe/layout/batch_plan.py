"""The number of samples of each step: a constant, or a linear ramp.

A ramp trains on small batches early on, where a large one would spend more samples for the same progress (Brown et
al., 2020, arXiv 2005.14165, section 2.3 and appendix B).
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from megapipe.config.parallel import MeshShape
from megapipe.config.run import BatchConfig, PretrainConfig


@dataclass(frozen=True)
class BatchPlan:
    """Samples per step as a pure function of the samples consumed before it, the run's only cursor.

    The size grows linearly from `start` to `full` over `samples` samples, rounded down to a multiple of `start`. It is
    a multiple of `start`, not of the samples of one micro-batch on every replica, so that the same run has the same
    batches on every layout.
    """

    full: int
    start: int
    samples: int

    @classmethod
    def of(cls, batch: BatchConfig) -> "BatchPlan":
        """Return the plan that a valid configuration describes."""
        if batch.ramp_start is None:
            return cls(batch.global_size, batch.global_size, 0)
        return cls(batch.global_size, batch.ramp_start, batch.ramp_samples)

    def size(self, consumed: int) -> int:
        """Return the samples of the step that starts after `consumed` samples."""
        if consumed >= self.samples:
            return self.full
        linear = self.start + (self.full - self.start) * consumed // self.samples
        return linear // self.start * self.start

    def sizes(self) -> tuple[int, ...]:
        """Return every size that a step may have, ascending."""
        return (*range(self.start, self.full, self.start), self.full)

    def cursors(self, consumed: int) -> Iterator[int]:
        """Yield the number of samples consumed before each step, endlessly, starting with the step after `consumed`
        samples."""
        while True:
            yield consumed
            consumed += self.size(consumed)

    def consumed_after(self, steps: int, consumed: int = 0) -> int:
        """Return the number of samples consumed after `steps` more steps, when `consumed` samples have been
        consumed."""
        while steps > 0 and consumed < self.samples:
            consumed, steps = consumed + self.size(consumed), steps - 1
        return consumed + steps * self.full


def ramp_problems(batch: BatchConfig, share: int) -> list[str]:
    """Return one message for each rule that a batch or its ramp breaks.

    share: samples of one micro-batch on every replica, batch.micro_size x data-parallel size.
    """
    sizes = {"batch.global_size": batch.global_size}
    if batch.ramp_start is not None:
        sizes["batch.ramp_start"] = batch.ramp_start
    problems = []
    for name, size in sizes.items():
        if size % share:
            near = " or ".join(str(each) for each in (size // share * share, (size // share + 1) * share) if each)
            of_replica, rest = divmod(size, share // batch.micro_size)
            if not rest and batch.ramp_start is None:
                fitting = next(each for each in range(batch.micro_size, 0, -1) if of_replica % each == 0)
                near += f", or batch.micro_size {fitting}"
            problems.append(
                f"{name} {size} is not divisible by batch.micro_size {batch.micro_size} x "
                f"data-parallel size {share // batch.micro_size}; use {near}, for example"
            )
    return problems


def data_parallel_size(config: PretrainConfig, world_size: int) -> int:
    """Return the number of replicas: parallel.data, or the ranks that pipeline, context and tensor leave."""
    parallel = config.parallel
    if parallel.data is not None:
        return parallel.data
    return max(1, world_size // (parallel.pipeline * parallel.context * parallel.tensor))


def mesh_shape(config: PretrainConfig, world_size: int) -> MeshShape:
    """Return the shape of the mesh of a run on `world_size` ranks."""
    return MeshShape.of(replace(config.parallel, data=data_parallel_size(config, world_size)))


def num_microbatches(config: PretrainConfig, world_size: int) -> int:
    """Return the micro-batches of one replica in one step."""
    return config.batch.global_size // (config.batch.micro_size * data_parallel_size(config, world_size))
