"""The command line of schedules."""
