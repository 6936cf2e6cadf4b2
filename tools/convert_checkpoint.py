"""Convert, inspect, verify, compare and average checkpoints: `megapipe convert`, for use without an installation."""

import sys

from megapipe.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["convert", *sys.argv[1:]]))
