"""Fill in the gaps of a text with a trained BERT: `megapipe fill-mask`, for use without an installation."""

from megapipe.cli.main import start

if __name__ == "__main__":
    start("fill-mask")
