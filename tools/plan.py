"""Plan a training run: `megapipe plan`, for use without an installation."""

from megapipe.cli.main import start

if __name__ == "__main__":
    start("plan")
