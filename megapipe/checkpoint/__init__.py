"""Checkpoints: save, load on any layout, find the newest whole one, take initial weights from other formats."""

from megapipe.checkpoint.directory import newest_valid, newest_whole
from megapipe.checkpoint.errors import CheckpointError, DamagedCheckpointError
from megapipe.checkpoint.load import load, load_weights
from megapipe.checkpoint.lock import DirectoryLock
from megapipe.checkpoint.manifest import Chunk, Manifest, RunState
from megapipe.checkpoint.manifest_file import read_manifest
from megapipe.checkpoint.save import save

__all__ = [
    "CheckpointError",
    "Chunk",
    "DamagedCheckpointError",
    "DirectoryLock",
    "Manifest",
    "RunState",
    "load",
    "load_weights",
    "newest_valid",
    "newest_whole",
    "read_manifest",
    "save",
]
