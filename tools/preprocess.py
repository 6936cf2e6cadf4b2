"""Turn text into data shards: `megapipe preprocess`, for use without an installation."""

from megapipe.cli.main import start

if __name__ == "__main__":
    start("preprocess")
