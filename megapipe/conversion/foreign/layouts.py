"""Names of files and folders by which the formats of other frameworks are recognized, without importing torch."""

from pathlib import Path

from megapipe.config.untrusted import read_bytes

TRACKER = "latest_checkpointed_iteration.txt"
ARCHIVE = "model_optim_rng.pt"
RELEASE = "release"
"""Name, in place of an iteration, of weights that are the end of a training or come from elsewhere."""
COMMON, CONFIG = "common.pt", "metadata.json"
"""Beside the tensors of Megatron-LM's `torch_dist` layout."""
METADATA = ".metadata"
"""What torch.distributed.checkpoint writes last."""


def is_megatron_torch(path: Path) -> bool:
    """Whether a folder, or the iteration that its tracker names, is of this layout, by the names in it."""
    return next(iteration_folder(path).glob(f"mp_rank_*/{ARCHIVE}"), None) is not None


def iteration_folder(path: Path) -> Path:
    """The folder of an iteration that a user means: the one given, or the newest that its tracker names."""
    try:
        named = read_bytes(path / TRACKER, ValueError, 100).decode("ascii").strip()
    except (OSError, ValueError):
        return path
    if named == RELEASE:
        return path / RELEASE
    return path / f"iter_{int(named):07d}" if named.isdecimal() and len(named) < 20 else path


def is_torch_dist(path: Path) -> bool:
    """Whether a folder, or the iteration that its tracker names, is of this layout, by the names in it."""
    folder = iteration_folder(path)
    return all((folder / name).is_file() for name in (CONFIG, COMMON))


def is_dcp(path: Path) -> bool:
    """Whether a folder is of this format, by the names in it."""
    return (path / METADATA).is_file()
