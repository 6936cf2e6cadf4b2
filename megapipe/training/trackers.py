"""Metrics for TensorBoard and Weights & Biases, each imported only when the configuration asks for it.

Every tracker is a `Tracker`, which turns records into named values; a tracker says only how it stores them. Both start
in the background, so a server that cannot be reached does not delay training.
"""

import netrc
import os
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from megapipe.config.run import PretrainConfig
from megapipe.training.listeners import Listeners
from megapipe.training.records import RANKS, TIME_PARTS, EvaluationRecord, Listener, StepRecord

WANDB_HOST = "https://api.wandb.ai"


def add_trackers(listeners: Listeners, config: PretrainConfig, resumed: bool) -> None:
    """Add the trackers that the configuration asks for. resumed: the run continues from a checkpoint."""
    directory = Path(config.training.directory)
    if config.tracking.tensorboard:
        listeners.add("TensorBoard", "TensorBoard", lambda: TensorBoard(directory / "tensorboard"))
        listeners.say(f"TensorBoard: tensorboard --logdir {directory / 'tensorboard'}")
    if config.tracking.wandb_project:
        name = "Weights & Biases"
        listeners.add(name, name, lambda: WeightsAndBiases(config, resumed, listeners.say))


def step_scalars(record: StepRecord) -> dict[str, float]:
    """Return the values of a step, by curve."""
    return {
        "train/loss": record.loss,
        "train/learning_rate": record.learning_rate,
        "train/gradient_norm": record.gradient_norm,
        "train/consumed_samples": record.consumed_samples,
        "train/batch_size": record.samples,
        "speed/tokens_per_second": record.tokens / record.seconds,
        "speed/mfu": record.mfu,
        "speed/step_seconds": record.seconds,
        "speed/data_seconds": record.data_seconds,
        **{f"train/{name}_loss": loss for name, loss in record.terms.items()},
        **({} if record.loss_scale is None else {"train/loss_scale": record.loss_scale}),
        **_expert_scalars(record.expert_load_variations),
    }


def _expert_scalars(variations: Sequence[float]) -> dict[str, float]:
    if not variations:
        return {}
    mean = sum(variations) / len(variations)
    return {"experts/mean_load_variation": mean, "experts/worst_load_variation": max(variations)}


def evaluation_scalars(record: EvaluationRecord) -> dict[str, float]:
    """Return the values of an evaluation, by curve."""
    return {
        "validation/loss": record.loss,
        "validation/perplexity": record.perplexity,
        **{f"validation/{name}_loss": loss for name, loss in record.terms.items()},
        **{f"validation/{name}_accuracy": share for name, share in record.accuracies.items()},
    }


def rank_scalars(fields: Mapping[str, Any]) -> dict[str, float]:
    """Return the values of event `ranks`, by curve: the mean of each part of the step time, and each rank's memory."""
    return {
        **{f"step_time/{part}": sum(fields[part]) / len(fields[part]) for part in TIME_PARTS},
        **{f"memory/rank_{rank}_peak_bytes": float(peak) for rank, peak in enumerate(fields["peak_bytes"])},
    }


class Tracker(Listener):
    """Sends the values of all records to `log`."""

    @abstractmethod
    def log(self, scalars: Mapping[str, float], step: int) -> None:
        """Store values, by the name of their curve, for a step."""

    def step(self, record: StepRecord) -> None:
        self.log(step_scalars(record), record.step)

    def evaluation(self, record: EvaluationRecord) -> None:
        self.log(evaluation_scalars(record), record.step)

    def event(self, name: str, **fields: Any) -> None:
        if name == RANKS:
            self.log(rank_scalars(fields), fields["step"])


class TensorBoard(Tracker):
    """Writes event files in `directory`; a resumed run adds one that continues the curves."""

    def __init__(self, directory: Path) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer: Any = SummaryWriter(str(directory))

    def evaluation(self, record: EvaluationRecord) -> None:
        super().evaluation(record)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()

    def log(self, scalars: Mapping[str, float], step: int) -> None:
        for name, value in scalars.items():
            self._writer.add_scalar(name, value, step)


class WeightsAndBiases(Tracker):
    """Logs to a wandb run in the run's folder.

    WANDB_MODE is used if it is set. Otherwise the run is online if an API key is configured, else offline, because
    wandb would ask for a key. A resumed run continues the wandb run whose id is in the folder.
    """

    def __init__(self, config: PretrainConfig, resumed: bool, say: Callable[[str], None]) -> None:
        import wandb

        directory = Path(config.training.directory)
        directory.mkdir(parents=True, exist_ok=True)
        identity = directory / "wandb-run-id"
        previous = identity.read_text().strip() if resumed and identity.exists() else None
        mode = wandb_mode()
        self._run = wandb.init(
            project=config.tracking.wandb_project,
            dir=str(directory),
            mode=mode,  # type: ignore[arg-type]  # one of its literals, or what WANDB_MODE holds
            id=previous,
            resume="allow" if previous else None,
            config=asdict(config),
            settings=wandb.Settings(console="off", silent=True),
        )
        try:
            identity.write_text(self._run.id + "\n")
        except OSError:
            self._run.finish()  # the next try starts a run of its own
            raise
        say(f"Weights & Biases: {mode} run {self._run.id} in {directory / 'wandb'}")

    def log(self, scalars: Mapping[str, float], step: int) -> None:
        self._run.log(dict(scalars), step=step)

    def close(self) -> None:
        self._run.finish()


def wandb_mode() -> str:
    """Return WANDB_MODE if it is set; otherwise `online` if wandb finds an API key without asking, else `offline`."""
    if "WANDB_MODE" in os.environ:
        return os.environ["WANDB_MODE"]
    if os.environ.get("WANDB_API_KEY"):
        return "online"
    host = urlsplit(os.environ.get("WANDB_BASE_URL", WANDB_HOST)).hostname or ""
    try:
        known = netrc.netrc(os.environ.get("NETRC")).authenticators(host)
    except (OSError, netrc.NetrcParseError):
        known = None
    return "online" if known else "offline"
