"""Looks into, checks, joins and splits .bin/.idx shards; see --help."""

import sys

from megapipe.data.shard_command import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
