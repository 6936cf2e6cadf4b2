"""The whole configuration against the world it is to run in, before any process group starts.

config/ checks each field; here every room's own rule is asked. All problems are told at once.
"""

from megapipe.config.errors import ConfigError
from megapipe.config.run import PretrainConfig
from megapipe.layout.validation import run_problems
from megapipe.optim.learning_rate import learning_rate_problems
from megapipe.training.kernel_choices import kernel_problems


def validate(config: PretrainConfig, world_size: int) -> None:
    """Raise one ConfigError with every problem; return quietly when all can run on `world_size` ranks."""
    problems = config.model.problems() + config.problems()
    problems += learning_rate_problems(config.optimizer, config.training.steps)
    problems += kernel_problems(config)
    problems = problems or run_problems(config, world_size)
    if problems:
        raise ConfigError(problems)
