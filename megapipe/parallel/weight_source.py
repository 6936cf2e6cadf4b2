"""Where weights that a device holds for a time come from."""

from typing import Protocol

from torch import Tensor

from megapipe.parallel.groups import Work


class WeightSource(Protocol):
    """What fills a whole copy of weights: a group whose ranks each have a part of it, or host memory."""

    def gather_into(self, whole: Tensor, part: Tensor) -> Work:
        """Start to fill `whole`, flat. part: what this rank keeps of it meanwhile, all of it in host memory."""
