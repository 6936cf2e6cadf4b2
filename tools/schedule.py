"""Pipeline schedules: `megapipe schedule`, for use without an installation."""

import sys

from megapipe.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["schedule", *sys.argv[1:]]))
