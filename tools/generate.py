"""Continue prompts with a trained GPT: `megapipe generate`, for use without an installation."""

from megapipe.cli.main import start

if __name__ == "__main__":
    start("generate")
