"""Whether a checkpoint is one of this model."""

from collections.abc import Iterable, Mapping
from typing import Any

from megapipe.checkpoint.errors import CheckpointError
from megapipe.checkpoint.manifest import Manifest
from megapipe.costs.parameters import ParameterSpec

_SHOWN = 3


def check_model(manifest: Manifest, specs: Iterable[ParameterSpec], model: Mapping[str, Any]) -> None:
    """Raise CheckpointError unless the checkpoint holds exactly the parameters `specs`, in their shapes.

    specs: of the whole model. model: its configuration as plain values; the fields that differ are told.
    """
    stored = manifest.shapes()
    wanted = {spec.name: spec.shape for spec in specs}
    found = [f"{name} is missing" for name in wanted if name not in stored]
    found += [
        f"{name} has shape {stored[name]} instead of {shape}"
        for name, shape in wanted.items()
        if name in stored and stored[name] != shape
    ]
    found += [f"{name} has no place in this model" for name in stored if name not in wanted]
    if not found:
        return
    more = f" and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
    differing = model_differences(manifest, model)
    way_out = "; ".join(differing) if differing else "the configurations agree, so the checkpoint was made otherwise"
    raise CheckpointError(f"the checkpoint is of another model: {', '.join(found[:_SHOWN])}{more}. {way_out}")


def model_differences(manifest: Manifest, model: Mapping[str, Any]) -> list[str]:
    """Fields of the model's configuration that are not what the checkpoint was trained with, one message each."""
    stored: Mapping[str, Any] = manifest.run.config.get("model", {})
    return [
        f"model.{name} is {value!r} here and {stored[name]!r} in the checkpoint"
        for name, value in model.items()
        if name in stored and stored[name] != value
    ]
