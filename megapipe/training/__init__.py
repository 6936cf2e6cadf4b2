"""The training loop, and what surrounds it: checks before a run, the dry run, resilience, and reports."""
