"""Samples to measure with: random tokens, which take as long as real ones; for a BERT those of the run."""

import numpy as np
import numpy.typing as npt

from megapipe.config.bert import BertPretrainConfig
from megapipe.config.errors import ConfigError
from megapipe.config.run import PretrainConfig
from megapipe.training.sources import Samples, open_samples


class RandomSamples:
    """As many samples as a run asks for, each drawn from its own number."""

    def __init__(self, sequence_length: int, vocabulary_size: int) -> None:
        self.sequence_length = sequence_length
        self._vocabulary_size = vocabulary_size

    def __len__(self) -> int:
        return 2**31

    def num_labels(self, ordinals: npt.ArrayLike) -> np.ndarray:
        return np.full(np.shape(ordinals), self.sequence_length, dtype=np.int64)

    def tokens(self, ordinals: npt.ArrayLike) -> np.ndarray:
        """Tokens of samples, drawn from their numbers alone: int64 [..., sequence_length + 1]."""
        numbers = np.asarray(ordinals)
        drawn = [
            np.random.default_rng(each).integers(0, self._vocabulary_size, self.sequence_length + 1, dtype=np.int64)
            for each in numbers.ravel().tolist()
        ]
        return np.stack(drawn).reshape(*numbers.shape, self.sequence_length + 1)

    def boundaries(self, ordinals: npt.ArrayLike) -> list[np.ndarray]:
        """Two documents a sample: one ends in its middle."""
        middle = np.array([max(1, self.sequence_length // 2)], dtype=np.int64)
        return [middle for _ in np.ravel(ordinals)]


def samples_for(config: PretrainConfig) -> Samples:
    """Random samples of a GPT, whose times do not depend on what they say; a BERT's training samples.

    Raises:
        ConfigError: a BERT run without data. DataError: shards that cannot be used.
    """
    if not isinstance(config, BertPretrainConfig):
        return RandomSamples(config.data.sequence_length, config.model.vocabulary_size)
    if not any(config.data.prefixes):
        raise ConfigError(
            "data.prefix is empty, and masked pairs for a BERT cannot be generated; set it to the shard that the "
            "run will train on"
        )
    return open_samples(config, "train")
