"""Continue prompts with a trained GPT: `megapipe generate`, for use without an installation."""

import sys

from megapipe.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["generate", *sys.argv[1:]]))
