"""Inspect, check, merge and split .bin/.idx shards, and measure how runs read them; see --help."""

import sys

from megapipe.data.shard_command import Subcommand, main
from megapipe.training import stall_command

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], {"stalls": Subcommand(stall_command.HELP, stall_command.main)}))
