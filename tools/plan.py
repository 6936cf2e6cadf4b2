"""Plan a training run: `megapipe plan`, for use without an installation."""

import sys

from megapipe.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["plan", *sys.argv[1:]]))
