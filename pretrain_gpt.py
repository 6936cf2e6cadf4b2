"""Pretrain a GPT: `megapipe train --kind gpt`, for use without an installation and under torchrun."""

from megapipe.cli.main import start

if __name__ == "__main__":
    start("train", "--kind", "gpt")
