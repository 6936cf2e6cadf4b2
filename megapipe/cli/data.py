"""`megapipe data`: commands on shards, and `stalls`, which trains to measure waits for data."""

from collections.abc import Sequence

from megapipe.cli import stalls as stall_command
from megapipe.data.shard_command import Subcommand
from megapipe.data.shard_command import main as run_data


def main(arguments: Sequence[str]) -> int:
    """Run a command line and return its exit status."""
    return run_data(arguments, {"stalls": Subcommand(stall_command.HELP, stall_command.main)})
