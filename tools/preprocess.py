"""Turns text into .bin/.idx shards; see --help."""

import os
import signal
import sys


def _interrupted(number: int, frame: object) -> None:
    """Nothing was written yet, and an exception would end in whatever is being imported."""
    os.write(2, b"interrupted\n")
    os._exit(130)


if __name__ == "__main__":
    before = signal.signal(signal.SIGINT, _interrupted)
    from megapipe.data.preprocess.command import main

    signal.signal(signal.SIGINT, before)
    sys.exit(main(sys.argv[1:]))
