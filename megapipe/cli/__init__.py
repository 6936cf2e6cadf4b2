"""The `megapipe` command. Nothing imports this package; it imports all others, each when its subcommand is called."""
