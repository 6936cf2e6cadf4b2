"""Pretrain a GPT: `megapipe train --kind gpt`, for use without an installation and under torchrun."""

import sys

from megapipe.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["train", "--kind", "gpt", *sys.argv[1:]]))
