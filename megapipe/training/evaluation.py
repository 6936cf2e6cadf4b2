"""Loss and perplexity on the validation split."""

import itertools
import math
import time

import torch

from megapipe.config.run import PretrainConfig
from megapipe.data.sample_set import SampleSet
from megapipe.engine.step import StepInput, StepResult
from megapipe.parallel.mesh import Mesh
from megapipe.training.batch_plan import BatchPlan
from megapipe.training.batches import batch_loader
from megapipe.training.records import EvaluationRecord
from megapipe.training.replica import Replica


class Evaluation:
    """Forward passes over always the same validation samples, in order, without dropout, on the newest weights.

    samples: the validation split. Of it the first `evaluation.samples`, rounded up to whole batches of
    `batch.global_size`, so that they are the same ones on every layout.
    """

    def __init__(self, config: PretrainConfig, mesh: Mesh, replica: Replica, samples: SampleSet) -> None:
        """A collective call."""
        size = config.batch.global_size
        self._num_batches = math.ceil(min(config.evaluation.samples, len(samples)) / size)
        self._mesh = mesh
        self._engine = replica.forward_engine()
        self._loader = batch_loader(config, mesh, replica, samples, BatchPlan(size, size, 0), training=False)
        self._counts_loss = replica.is_last and mesh.coordinate("tensor") == 0

    def run(self, step: int) -> EvaluationRecord:
        """Evaluate after `step` steps. A collective call; every rank gets the same losses.

        The mean is over tokens, not over batches. Micro-batches' fp32 sums are added in float64, which is exact for
        sums of like size: their order, the layout's, does not matter.
        """
        start = time.perf_counter()
        totals = torch.zeros(2, dtype=torch.float64, device=self._mesh.device)
        with self._loader.steps(consumed=0) as batches:
            for batch in itertools.islice(batches, self._num_batches):
                result = self._engine.run(StepInput(step, batch.contexts, batch.token_counts))
                if self._counts_loss:
                    totals[0] += _loss_sum(result)
                    totals[1] += sum(batch.token_counts)
        self._mesh.world.all_reduce(totals)
        loss_sum, num_tokens = totals.tolist()
        loss = loss_sum / max(num_tokens, 1.0)
        return EvaluationRecord(
            step=step,
            loss=loss,
            perplexity=perplexity(loss),
            loss_tokens=int(num_tokens),
            seconds=time.perf_counter() - start,
        )


def perplexity(loss: float) -> float:
    """e to the loss; infinite where that exceeds a float."""
    try:
        return math.exp(loss)
    except OverflowError:
        return math.inf


def _loss_sum(result: StepResult) -> torch.Tensor:
    return torch.stack([outputs[0].double() for outputs in result.outputs]).sum()
