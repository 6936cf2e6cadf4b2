"""Convert, inspect, verify, compare and average checkpoints: `megapipe convert`, for use without an installation."""

from megapipe.cli.main import start

if __name__ == "__main__":
    start("convert")
