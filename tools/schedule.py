"""Pipeline schedules: list, show, validate, simulate, compare, draw, overlay; see --help."""

import sys

from megapipe.schedules.command.main import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
