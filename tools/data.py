"""Inspect, check, merge and split data shards: `megapipe data`, for use without an installation."""

import sys

from megapipe.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["data", *sys.argv[1:]]))
