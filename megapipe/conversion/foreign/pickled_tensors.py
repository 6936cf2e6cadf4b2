"""State dicts in archives of torch.save: the `.bin` files of Hugging Face folders."""

from pathlib import Path
from typing import NamedTuple

from torch import Tensor

from megapipe.checkpoint.errors import DamagedCheckpointError
from megapipe.conversion.foreign.archive import DTYPE_NAMES, Archive
from megapipe.conversion.foreign.sandbox import Sandbox, TensorPlace


class PickledTensor(NamedTuple):
    """One tensor of a file. dtype: as safetensors names it."""

    dtype: str
    place: TensorPlace

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.place.shape)


class PickledTensors:
    """Reads a `.bin` file one tensor at a time, with the methods of `TensorReader`.

    entries: its floating-point tensors by key.

    Raises CheckpointError for a file that cannot be read or names a class that no checkpoint needs.
    """

    def __init__(self, path: Path, sandbox: Sandbox) -> None:
        self._archive = Archive(path, sandbox)
        value = self._archive.value
        if not isinstance(value, dict):
            self.close()
            raise DamagedCheckpointError(f"{path} does not contain a state dict of tensors by name", "unreadable")
        self.entries = {
            str(key): PickledTensor(DTYPE_NAMES[place.dtype], place)
            for key, place in value.items()
            if isinstance(place, TensorPlace) and place.dtype in DTYPE_NAMES
        }

    def entry(self, key: str) -> PickledTensor:
        """Return the place of a tensor. Raises DamagedCheckpointError if no such tensor has a known type."""
        if key not in self.entries:
            raise DamagedCheckpointError(f"{self._archive.path} has no floating-point tensor {key!r}", "unreadable")
        return self.entries[key]

    def whole(self, key: str) -> Tensor:
        """Return a tensor in newly allocated memory."""
        return self._archive.tensor(self.entry(key).place)

    def verify(self, key: str) -> list[str]:
        """Read a tensor's storage and return its problems; an empty list if there are none."""
        return self._archive.verify(self.entry(key).place)

    def close(self) -> None:
        """Close the file."""
        self._archive.close()
