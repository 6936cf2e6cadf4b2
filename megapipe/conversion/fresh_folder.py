"""A folder that appears when it is whole: written under a hidden name, flushed, renamed."""

from contextlib import suppress
from pathlib import Path

from megapipe.checkpoint.errors import CheckpointError
from megapipe.checkpoint.storage import DISK, StorageWriter, explained, remove_tree


class FreshFolder:
    """A folder in the making. path: where it will be. partial: where files are written until then.

    Raises CheckpointError where something is at `path` already: a conversion never writes over anything.
    """

    def __init__(self, path: Path, storage: StorageWriter = DISK) -> None:
        self._storage = storage
        path = Path(path).absolute()
        self.path, self.partial = path, path.with_name(f".{path.name}.partial")
        if path.exists() or path.is_symlink():
            raise CheckpointError(f"{path} already exists; a conversion writes to a new folder: give another path")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            storage.make_folder(self.partial)
        except FileExistsError:
            raise CheckpointError(
                f"{self.partial} exists: another conversion is writing {path}, or one was killed; remove that folder "
                "unless a conversion is still running"
            ) from None
        except OSError as error:
            raise CheckpointError(f"cannot write {self.partial}: {explained(error, path.parent)}") from error

    def finish(self) -> None:
        """Give the folder its name, once every file in it is durable. Raises CheckpointError."""
        try:
            self._storage.flush_folder(self.partial)
            # Renaming would replace an empty folder that has appeared since, and only that.
            self._storage.rename(self.partial, self.path)
            self._storage.flush_folder(self.path.parent)
        except OSError as error:
            raise CheckpointError(f"cannot complete {self.path}: {explained(error, self.path.parent)}") from error

    def abandon(self) -> None:
        """Remove what was written. Where that fails too, the next conversion tells of it."""
        with suppress(OSError):
            if self.partial.exists():
                remove_tree(self._storage, self.partial)
