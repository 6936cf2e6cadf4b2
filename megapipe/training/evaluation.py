"""Loss, perplexity and, for models that report it, accuracy on the validation split."""

import itertools
import math
import time
from collections.abc import Callable, Sequence

import numpy as np
import torch

from megapipe.config.run import PretrainConfig
from megapipe.engine.step import Counts, StepInput, StepResult
from megapipe.layout.batch_plan import BatchPlan
from megapipe.parallel.mesh import Mesh
from megapipe.parallel.transfer import tensor_on
from megapipe.training.flags import start_any_rank
from megapipe.training.records import EvaluationRecord
from megapipe.training.replica import Replica
from megapipe.training.sources import Samples, open_loader


class Evaluator:
    """Forward passes over the same validation samples every time, in order, without dropout, on the newest weights.

    samples: the validation split. The first `evaluation.samples` of it are used, rounded up to whole batches of
    `batch.global_size`, so that every layout uses the same ones.
    """

    def __init__(self, config: PretrainConfig, mesh: Mesh, replica: Replica, samples: Samples) -> None:
        """A collective call."""
        size = config.batch.global_size
        self._num_batches = math.ceil(min(config.evaluation.samples, len(samples)) / size)
        self._mesh = mesh
        self._family = replica.family
        self._engine = replica.forward_engine()
        self._loader = open_loader(config, mesh, replica, samples, BatchPlan(size, size, 0), training=False)
        self._counts_loss = replica.is_last and mesh.coordinate("tensor") == 0

    def rehearse(self) -> None:
        """Run every kernel of an evaluation; see `Engine.rehearse`. A collective call."""
        batch = self._loader.load(consumed=0)
        result = self._engine.rehearse(StepInput(0, batch.contexts, batch.token_counts))
        if self._counts_loss:
            batch_sums(result, batch.token_counts)

    def run(self, step: int, stop: Callable[[], bool] = lambda: False) -> EvaluationRecord | None:
        """Evaluate after `step` steps. A collective call; every rank gets the same losses.

        stop: called after every batch; when it returns True on any rank, all ranks stop evaluating one batch later
        and return None.

        The mean is over tokens, not over batches. Micro-batches' fp32 sums are added in float64, which is exact for
        sums of like size: their order, the layout's, does not matter.
        """
        start = time.perf_counter()
        # Rows and columns as in batch_sums.
        totals = torch.zeros(3, len(self._family.loss_terms), dtype=torch.float64, device=self._mesh.device)
        stopped = start_any_rank(self._mesh, stop())
        with self._loader.steps(consumed=0) as batches:
            for batch in itertools.islice(batches, self._num_batches):
                result = self._engine.run(StepInput(step, batch.contexts, batch.token_counts))
                if self._counts_loss:
                    totals += batch_sums(result, batch.token_counts)
                # The answer is awaited one batch later, so that the first stage does not wait for the last one.
                if stopped():
                    return None
                stopped = start_any_rank(self._mesh, stop())
        if stopped():
            return None
        self._mesh.world.all_reduce(totals)
        losses, counts, right = totals.tolist()
        terms = tuple(total / max(count, 1.0) for total, count in zip(losses, counts, strict=True))
        shares = {
            name: total / max(count, 1.0)
            for name, total, count in zip(self._family.loss_terms, right, counts, strict=True)
            if not math.isnan(total)
        }
        return EvaluationRecord(
            step=step,
            loss=sum(terms),
            perplexity=perplexity(terms[0]),
            loss_tokens=int(counts[0]),
            seconds=time.perf_counter() - start,
            terms=self._family.named(terms),
            accuracies=shares,
        )


def perplexity(loss: float) -> float:
    """Return e to the power of the loss; infinite if that overflows a float."""
    try:
        return math.exp(loss)
    except OverflowError:
        return math.inf


def batch_sums(result: StepResult, token_counts: Sequence[Counts]) -> torch.Tensor:
    """Return the sums over a batch's micro-batches as float64 of shape [3, loss terms], on the outputs' device.

    Rows: losses, loss tokens, correct predictions. The last are NaN if the model does not count them, also after the
    sum over ranks.
    """
    sums = [torch.stack(each).double().sum(0) for each in zip(*result.outputs, strict=True)]
    losses = torch.atleast_1d(sums[0])
    totals = np.array(token_counts, np.float64).reshape(len(token_counts), -1).sum(0)
    counts = tensor_on(totals, losses.device)
    right = torch.atleast_1d(sums[1]) if len(sums) > 1 else torch.full_like(losses, torch.nan)
    return torch.stack([losses, counts, right])
