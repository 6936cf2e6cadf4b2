"""Turn text into data shards: `megapipe preprocess`, for use without an installation."""

import sys

from megapipe.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["preprocess", *sys.argv[1:]]))
