"""Text from a trained model; see --help."""

import sys

from megapipe.training.generate_command import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
