"""The training loop and the assembly of everything below it."""
