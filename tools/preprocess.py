"""Text and JSON lines to .bin/.idx shards; see --help."""

import sys

from megapipe.data.preprocess.command import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
