"""Opens the formats of other frameworks, importing torch only then."""

from pathlib import Path

from megapipe.conversion.contents import Contents
from megapipe.conversion.source import Source, SourceOptions
from megapipe.conversion.target import Target, TargetOptions


def open_megatron(path: Path, options: SourceOptions) -> Source:
    """A folder of Megatron-LM's `torch` layout."""
    from megapipe.conversion.foreign.megatron_torch_source import MegatronTorchSource

    return MegatronTorchSource(path, options.allow_pickle)


def make_megatron(path: Path, contents: Contents, options: TargetOptions) -> Target:
    """One in the making."""
    from megapipe.conversion.foreign.megatron_torch_target import MegatronTorchTarget

    return MegatronTorchTarget(path, contents, options)


def open_torch_dist(path: Path, options: SourceOptions) -> Source:
    """A folder of Megatron-LM's `torch_dist` layout."""
    from megapipe.conversion.foreign.torch_dist import TorchDistSource

    return TorchDistSource(path, options.allow_pickle)


def make_torch_dist(path: Path, contents: Contents, options: TargetOptions) -> Target:
    """One in the making."""
    from megapipe.conversion.foreign.torch_dist import TorchDistTarget

    return TorchDistTarget(path, contents)


def open_dcp(path: Path, options: SourceOptions) -> Source:
    """A folder of torch.distributed.checkpoint."""
    from megapipe.conversion.foreign.dcp import DcpSource

    return DcpSource(path, options.allow_pickle)


def make_dcp(path: Path, contents: Contents, options: TargetOptions) -> Target:
    """One in the making."""
    from megapipe.conversion.foreign.dcp import DcpTarget

    return DcpTarget(path, contents)
