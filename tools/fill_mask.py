"""Fill in the gaps of a text with a trained BERT: `megapipe fill-mask`, for use without an installation."""

import sys

from megapipe.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["fill-mask", *sys.argv[1:]]))
