"""What the engine raises."""


class EngineError(RuntimeError):
    """A step failed. The message names the rank, the step and the action, and the peer that it waited for, if any."""
