"""The formats that checkpoints can be read from and written to."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from megapipe.config.errors import nearest
from megapipe.conversion.contents import Contents
from megapipe.conversion.foreign import layouts, opening
from megapipe.conversion.source import Source, SourceOptions
from megapipe.conversion.target import Target, TargetOptions


class UnknownFormatError(ValueError):
    """A folder whose format cannot be identified, or an unknown format. The message lists all formats."""


@dataclass(frozen=True)
class Format:
    """One format. Modules that import torch are imported by its functions, so that --help need not wait for them.

    title: for people. recognizes: whether a folder is of it, by its files' names alone. keeps_run: moments, step,
    random state and data cursor have a place in it; otherwise it is given weights alone.
    open_source, open_target: raise CheckpointError for a folder, or for contents, that the format cannot take.
    """

    title: str
    recognizes: Callable[[Path], bool]
    keeps_run: bool
    open_source: Callable[[Path, SourceOptions], Source]
    open_target: Callable[[Path, Contents, TargetOptions], Target]


def _open_megapipe(path: Path, options: SourceOptions) -> Source:
    from megapipe.conversion.megapipe_source import MegapipeSource

    return MegapipeSource(path)


def _make_megapipe(path: Path, contents: Contents, options: TargetOptions) -> Target:
    from megapipe.conversion.megapipe_target import MegapipeTarget

    return MegapipeTarget(path, contents)


def _is_megapipe(path: Path) -> bool:
    """A step's folder, or that of a run with one."""
    steps = (*path.glob("checkpoints/step-*"), *path.glob("step-*"))
    return (path / "manifest.json").is_file() or any(step.is_dir() for step in steps)


def _open_hugging_face(path: Path, options: SourceOptions) -> Source:
    from megapipe.conversion.hugging_face_source import HuggingFaceSource

    return HuggingFaceSource(path, options.allow_pickle)


def _make_hugging_face(path: Path, contents: Contents, options: TargetOptions) -> Target:
    from megapipe.conversion.hugging_face_target import HuggingFaceTarget

    return HuggingFaceTarget(path, contents, options)


def _is_hugging_face(path: Path) -> bool:
    return (path / "config.json").is_file()


FORMATS = {
    "megapipe": Format("a megapipe checkpoint", _is_megapipe, True, _open_megapipe, _make_megapipe),
    "hf": Format("a Hugging Face folder", _is_hugging_face, False, _open_hugging_face, _make_hugging_face),
    "megatron": Format(
        "a Megatron-LM folder, layout torch",
        layouts.is_megatron_torch,
        False,
        opening.open_megatron,
        opening.make_megatron,
    ),
    "megatron-dist": Format(
        "a Megatron-LM folder, layout torch_dist",
        layouts.is_torch_dist,
        False,
        opening.open_torch_dist,
        opening.make_torch_dist,
    ),
    "dcp": Format(
        "a state dict of torch.distributed.checkpoint",
        layouts.is_dcp,
        True,
        opening.open_dcp,
        opening.make_dcp,
    ),
}
"""Name on the command line -> format."""


def format_of(path: Path, name: str | None = None) -> Format:
    """The format called `name`, or else the one that a folder's files tell of. Raises
    UnknownFormatError for neither."""
    if name is not None:
        if name not in FORMATS:
            raise UnknownFormatError(
                f"unknown format {name!r}{nearest(name, FORMATS)}; formats are {', '.join(FORMATS)}"
            )
        return FORMATS[name]
    if not path.is_dir():
        raise UnknownFormatError(f"{path} is not a folder; give the folder of a checkpoint")
    for known in FORMATS.values():
        if known.recognizes(path):
            return known
    raise UnknownFormatError(f"the files of {path} identify no format; name it with --from: {', '.join(FORMATS)}")
