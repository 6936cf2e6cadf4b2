"""How rotary positions are stretched for contexts longer than the original one."""

import math
from dataclasses import dataclass, field
from typing import Literal

from megapipe.config.field_types import NaturalFloat, PositiveFloat, PositiveInt


@dataclass(kw_only=True)
class RopeScaling:
    """How rotary position frequencies are stretched for contexts longer than the original one."""

    kind: Literal["none", "linear", "llama3", "dynamic", "yarn", "longrope"] = "none"
    """Kind of stretching. none: no stretching. linear: divide every frequency by `factor`. llama3, yarn: divide only
    the frequencies of long wavelengths. dynamic: raise the base for sequences above original_length. longrope: divide
    by short_factor, or by long_factor for sequences above original_length."""
    factor: PositiveFloat = 1.0
    """Ratio of the new context length to the original one. For longrope, it only sets the default attention_factor."""
    low_frequency_factor: PositiveFloat = 1.0
    """Only for llama3: wavelengths above original_length / low_frequency_factor are stretched fully."""
    high_frequency_factor: PositiveFloat = 4.0
    """Only for llama3: wavelengths below original_length / high_frequency_factor are not stretched."""
    original_length: PositiveInt = 8192
    """For all kinds but linear: context length in tokens for which the frequencies were chosen. dynamic and longrope
    compare it with the length of a whole sample (in generation with the longest text), padding included."""
    beta_fast: PositiveFloat = 32.0
    """Only for yarn: frequencies that turn more often than this within original_length are not stretched."""
    beta_slow: PositiveFloat = 1.0
    """Only for yarn: frequencies that turn less often than this within original_length are stretched fully."""
    truncate: bool = True
    """Only for yarn: round the first and the last partly stretched channel pair outwards to whole pairs."""
    attention_factor: PositiveFloat | None = None
    """Only for yarn and longrope: factor of cosines and sines; null means the one that `factor` recommends."""
    mscale: NaturalFloat | None = None
    """Only for yarn: weight of log(factor) in the numerator of the recommended attention factor (DeepSeek-V3); null
    means 1, without a denominator."""
    mscale_all_dim: NaturalFloat | None = None
    """Only for yarn: weight of log(factor) in the denominator; null means no denominator. mscale and mscale_all_dim
    apply only together."""
    short_factor: list[PositiveFloat] = field(default_factory=list)
    """Only for longrope: divisor of each channel pair's frequency up to original_length."""
    long_factor: list[PositiveFloat] = field(default_factory=list)
    """Only for longrope: divisor of each channel pair's frequency in sequences longer than original_length."""

    def problems(self, theta: float, channels: int) -> list[str]:
        """Return one message for each broken rule. theta: base of the wavelengths. channels: number of rotated
        channels."""
        place, pairs = f"model.rope_scaling.kind is {self.kind!r}", channels // 2
        problems = []
        if self.kind == "longrope":
            lists = {"short_factor": self.short_factor, "long_factor": self.long_factor}
            problems += [
                f"{place}, but model.rope_scaling.{name} has {len(numbers)} numbers; "
                f"it must have {pairs}, one for each rotated pair of channels"
                for name, numbers in lists.items()
                if len(numbers) != pairs
            ]
        if self.kind == "longrope" and self.original_length == 1:
            problems.append(f"{place} and model.rope_scaling.original_length is 1; it must be at least 2")
        if self.kind == "yarn" and theta <= 1:
            problems.append(f"{place} and model.rope_theta is {theta}; it must be above 1")
        if self.kind == "dynamic" and channels == 2:
            problems.append(f"{place}, but 2 channels are rotated; it needs 4: set model.rotary_fraction or head_size")
        return problems


def yarn_growth(factor: float, weight: float) -> float:
    """Return YaRN's attention factor for a ratio of lengths. weight: factor of the ratio's logarithm (DeepSeek-V2's
    mscale)."""
    return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0
