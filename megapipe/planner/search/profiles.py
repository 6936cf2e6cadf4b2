"""What the planners of papers ask of a model and a machine, from this project's own formulas."""

from dataclasses import dataclass, replace

from megapipe.config.errors import ConfigError
from megapipe.config.recompute import RecomputeConfig
from megapipe.config.run import PretrainConfig
from megapipe.config.schedule import ScheduleConfig
from megapipe.config.zero import ZeroConfig
from megapipe.layout.costs import LayoutCosts
from megapipe.layout.hardware.description import Hardware
from megapipe.layout.hardware.device_type import hardware_device_type
from megapipe.layout.stages import VOCABULARY_ALIGNMENT, layers_of
from megapipe.layout.units import Unit, UnitCosts
from megapipe.planner.cost.layer_times import LayerTimes
from megapipe.spec.attention_path import attention_path
from megapipe.spec.dtypes import Precision


@dataclass(frozen=True)
class SingleDeviceLayer:
    """One layer of one device's whole model.

    forward, backward: seconds of a micro-batch. parameters: elements. state: bytes between steps. kept: bytes of a
    micro-batch's activations. boundary: of these, or beside them, the bytes of the stream into the next layer.
    """

    name: str
    forward: float
    backward: float
    parameters: int
    state: int
    kept: int
    boundary: int


def layer_figures(
    config: PretrainConfig, hardware: Hardware, times: LayerTimes, micro_size: int
) -> tuple[SingleDeviceLayer, ...]:
    """Every layer, nothing of it shared out or computed again, at so many samples a micro-batch."""
    whole = single_device(config, micro_size)
    layers = layers_of(whole)
    precision: Precision = whole.training.precision  # type: ignore[assignment]
    device = hardware_device_type(hardware)
    path = attention_path(whole.model, precision, device, whole.data.sequence_length)
    costs = LayoutCosts(whole, layers, 1, path, VOCABULARY_ALIGNMENT, device=device)
    units = UnitCosts(whole, 1, VOCABULARY_ALIGNMENT)
    known: dict[tuple[object, ...], SingleDeviceLayer] = {}
    found = []
    for layer in layers:
        # Blocks differ where only some compute in fp8; the times know which.
        key = layer.kind, layer.index if whole.training.fp8 != "none" else 0
        if key not in known:
            seconds = times.of(whole, layer)
            unit = Unit(tuple(layer.parameters.values()))
            known[key] = SingleDeviceLayer(
                layer.name,
                seconds.forward,
                seconds.backward_input + seconds.backward_weight,
                sum(spec.num_elements for spec in unit.specs),
                units.state(unit).total,
                costs.kept(layer),
                costs.stream,
            )
        found.append(replace(known[key], name=layer.name))
    return tuple(found)


def single_device(config: PretrainConfig, micro_size: int) -> PretrainConfig:
    """The same model on one device. Raises ConfigError where no time can be told."""
    if config.training.precision == "auto":
        raise ConfigError(
            "training.precision auto is decided by measurements at the start of a run; set fp32, bf16 or fp16 to plan "
            "with"
        )
    parallel = replace(
        config.parallel,
        data=1,
        tensor=1,
        pipeline=1,
        context=1,
        sequence=False,
        sequence_chunks=1,
        layers_per_stage=None,
    )
    return replace(
        config,
        parallel=parallel,
        zero=ZeroConfig(),
        recompute=RecomputeConfig(logits=config.recompute.logits),
        schedule=replace(
            config.schedule, name=ScheduleConfig.name, chunks=None, group_size=None, update=None, file=""
        ),
        batch=replace(config.batch, micro_size=micro_size),
    )


@dataclass(frozen=True)
class MachineFigures:
    """Equal devices, of unequal ones the least of everything: bytes of memory, bytes per second of one device inside
    a node and, while all of its node send, to other nodes."""

    devices_per_node: int
    memory_bytes: float
    inside: float
    outside: float


def machine_figures(hardware: Hardware, devices: int) -> MachineFigures:
    """Raises ConfigError with more devices than there are."""
    nodes = hardware.nodes(devices)
    return MachineFigures(
        min(node.devices_per_node for node in nodes),
        min(node.device.memory_bytes for node in nodes),
        min(node.inside.bandwidth for node in nodes),
        min(node.outside.of_device(node.devices_per_node) for node in nodes),
    )
