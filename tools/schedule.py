"""Pipeline schedules: `megapipe schedule`, for use without an installation."""

from megapipe.cli.main import start

if __name__ == "__main__":
    start("schedule")
