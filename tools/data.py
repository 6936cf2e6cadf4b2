"""Inspect, check, merge and split data shards: `megapipe data`, for use without an installation."""

from megapipe.cli.main import start

if __name__ == "__main__":
    start("data")
