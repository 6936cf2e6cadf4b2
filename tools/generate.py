"""Generate text with a trained GPT; see --help."""

import sys

from megapipe.training.generate_command import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
