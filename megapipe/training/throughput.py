"""Tokens per second, model FLOPs utilisation and time left."""

from collections import deque
from dataclasses import dataclass

import torch

from megapipe.config.run import PretrainConfig
from megapipe.layout.devices import peak_flops
from megapipe.spec.dtypes import Precision
from megapipe.spec.layers import model_flops_per_token
from megapipe.spec.parameters import LayerSpec
from megapipe.training.assemble import DTYPES
from megapipe.training.families import family_of
from megapipe.training.matrix_product import product_flops, product_size
from megapipe.training.records import StepRecord


@dataclass(frozen=True)
class DevicePeak:
    """Peak FLOP/s of one device in the run's precision. source: where the figure comes from."""

    flops: float
    source: str

    def __str__(self) -> str:
        return f"{self.flops / 1e12:,.3g} TFLOP/s per rank ({self.source})"


def device_peak(device: torch.device, precision: Precision) -> DevicePeak:
    """Return the peak from the data sheet of a known GPU, else measured with a matrix product."""
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
        known = peak_flops(name, precision)
        if known is not None:
            return DevicePeak(known, f"{name}, data sheet")
    size = product_size(device)
    return DevicePeak(product_flops(DTYPES[precision], device), f"measured with a {size} x {size} product")


class UtilisationMeter:
    """MFU: the model's FLOPs (see spec/compute.py) divided by the peak of all ranks."""

    def __init__(
        self, config: PretrainConfig, layers: tuple[LayerSpec, ...], peak: DevicePeak, num_ranks: int
    ) -> None:
        length, predictions = config.data.sequence_length, family_of(config).predictions
        self._flops_per_token = model_flops_per_token(config.model, layers, length, predictions)
        self._flops_per_second = peak.flops * num_ranks

    def mfu(self, tokens: int, seconds: float) -> float:
        """Return the share of the peak, for tokens trained on in that time."""
        return self._flops_per_token * tokens / (seconds * self._flops_per_second)


class RateWindow:
    """The last steps, over which rates are averaged."""

    def __init__(self, num_steps: int) -> None:
        self._records: deque[StepRecord] = deque(maxlen=num_steps)

    def add(self, record: StepRecord) -> None:
        """Add a step, and forget the oldest one when there are more than `num_steps`."""
        self._records.append(record)

    def clear(self) -> None:
        """Forget all steps."""
        self._records.clear()

    @property
    def tokens_per_second(self) -> float:
        """Rate over all ranks, without the time that evaluations and saves take."""
        return sum(record.tokens for record in self._records) / self._seconds

    @property
    def mfu(self) -> float:
        """Mean MFU over time."""
        return sum(record.mfu * record.seconds for record in self._records) / self._seconds

    def seconds_for(self, samples: int) -> float:
        """Return the seconds that this number of samples takes at the window's rate."""
        return samples * self._seconds / sum(record.samples for record in self._records)

    @property
    def _seconds(self) -> float:
        return sum(record.seconds for record in self._records)
