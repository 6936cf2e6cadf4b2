"""What goes wrong with checkpoints."""


class CheckpointError(ValueError):
    """A checkpoint that cannot be written, or does not fit. The message names the file or tensor and the way out."""


class DamagedCheckpointError(CheckpointError):
    """A checkpoint whose bytes are not those that were saved: it is set aside, and an older one may still be whole.

    reason: one word for its new folder name, such as `checksum`.
    """

    def __init__(self, message: str, reason: str) -> None:
        super().__init__(message)
        self.reason = reason

    def __reduce__(self) -> tuple[type["DamagedCheckpointError"], tuple[str, str]]:
        return DamagedCheckpointError, (str(self), self.reason)
