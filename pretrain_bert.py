"""Pretrain a BERT: `megapipe train --kind bert`, for use without an installation and under torchrun."""

import sys

from megapipe.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["train", "--kind", "bert", *sys.argv[1:]]))
