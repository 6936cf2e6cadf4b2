"""Checkpoints: save, load on any layout, find the newest complete one, take initial weights from other formats."""

from megapipe.checkpoint.directory import DirectoryLock, newest_valid, newest_whole
from megapipe.checkpoint.manifest import Chunk, Manifest, RunState, read_manifest
from megapipe.checkpoint.save_and_load import load, load_weights, save
from megapipe.checkpoint.storage import CheckpointError, DamagedCheckpointError

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
