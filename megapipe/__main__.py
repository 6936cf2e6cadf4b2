"""`python -m megapipe` is the `megapipe` command."""

from megapipe.cli.main import start

if __name__ == "__main__":
    start()
