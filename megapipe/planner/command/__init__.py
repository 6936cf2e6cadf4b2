"""The command line of the planner."""
