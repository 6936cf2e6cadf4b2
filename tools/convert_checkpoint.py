"""Checkpoints turned into other formats, inspected, verified, compared, averaged; see --help."""

import sys

from megapipe.conversion.command import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
