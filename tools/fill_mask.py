"""Fill in the gaps of a text with a trained BERT; see --help."""

import sys

from megapipe.training.fill_mask_command import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
