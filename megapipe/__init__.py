"""megapipe: pretrains GPT and BERT language models across many devices, and trains any torch modules as a pipeline.

The names below are the library; each is imported when it is first used, so that importing the package loads neither
torch nor anything else. docs/library.md is the guide, and docs/design.md describes the packages.
"""

from importlib import import_module
from typing import Any

__version__ = "0.1.0"

_MODULES = {
    "ColumnLinear": "megapipe.layers.linear",
    "DotProductAttention": "megapipe.layers.context_parallel",
    "LayoutTable": "megapipe.layout.table",
    "Mesh": "megapipe.parallel.mesh",
    "OffloadConfig": "megapipe.config.memory",
    "OptimizerConfig": "megapipe.config.optimizer",
    "Pipeline": "megapipe.engine.pipeline",
    "PretrainConfig": "megapipe.config.run",
    "RowLinear": "megapipe.layers.linear",
    "Schedule": "megapipe.schedules.schedule",
    "StepResult": "megapipe.engine.step",
    "ZeroConfig": "megapipe.config.parallel",
    "adopt": "megapipe.layers.adoption",
    "build": "megapipe.schedules.build",
    "dumps": "megapipe.schedules.text",
    "initialize": "megapipe.parallel.launch",
    "load_hardware": "megapipe.layout.hardware.description",
    "loads": "megapipe.schedules.text",
    "parse": "megapipe.config.load",
    "rank_costs": "megapipe.schedules.simulation.costs",
    "schedule": "megapipe.schedules.registry",
    "search_speed": "megapipe.planner.search.plan",
    "shutdown": "megapipe.parallel.launch",
    "simulate": "megapipe.schedules.simulation.simulate",
    "validate": "megapipe.schedules.validation.validate",
}
"""Public name -> module that defines it."""

__all__ = sorted(_MODULES)


def __getattr__(name: str) -> Any:
    """Import a public name at its first use (PEP 562)."""
    if name not in _MODULES:
        raise AttributeError(f"module 'megapipe' has no attribute {name!r}; its names are {', '.join(_MODULES)}")
    return getattr(import_module(_MODULES[name]), name)


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
