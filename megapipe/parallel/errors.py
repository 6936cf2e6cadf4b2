"""Errors of the parallel room. Each message names the rank that saw it, the peer, and what was waited for."""


class CommunicationError(RuntimeError):
    """A peer failed, fell silent, or spoke of something else than this rank."""


class LaunchError(RuntimeError):
    """The environment of the launcher does not describe a world that the layout fits."""
