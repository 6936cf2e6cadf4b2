"""Whether every byte of a checkpoint is what was written."""

from pathlib import Path

from megapipe.checkpoint.directory import steps
from megapipe.config.progress import tracked
from megapipe.conversion.contents import WEIGHTS
from megapipe.conversion.source import Source


def checkpoints_of(path: Path) -> list[Path]:
    """All checkpoints of a run's folder; any other folder is one."""
    found = steps(path / "checkpoints") or steps(path)
    return list(found.values()) or [path]


def problems_of(source: Source) -> list[str]:
    """What is wrong with a checkpoint, a line for every bad file and what is wrong with it."""
    found: dict[str, list[str]] = {}
    with tracked(source.contents.tensors, "verifying") as tensors:
        for tensor in tensors:
            name = tensor.name if tensor.kind == WEIGHTS else f"{tensor.kind} of {tensor.name}"
            for problem in source.verify(tensor):
                found.setdefault(problem, []).append(name)
    return [f"{problem}; lost: {', '.join(names)}" for problem, names in found.items()]
