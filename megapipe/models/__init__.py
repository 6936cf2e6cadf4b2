"""GPTs and BERTs as lists of layers, and the decoding of GPTs. `build_layer` returns the module of a layer."""

from collections.abc import Callable

import torch
from torch import nn

from megapipe.config.bert import BertModelConfig
from megapipe.config.model import ModelConfig
from megapipe.kernels.ops import OPS
from megapipe.kernels.registry import Registry
from megapipe.layers.linear import Shapes, partial_parameters
from megapipe.models import bert, gpt
from megapipe.parallel.groups import Group
from megapipe.spec.layers import layer_ops
from megapipe.spec.ops import MicrobatchShape, partial_weights
from megapipe.spec.parameters import LayerKind, LayerSpec

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
"""Name of a precision -> dtype of weights and activations."""


def build_layer(
    spec: LayerSpec,
    model: ModelConfig,
    tensor_group: Group,
    alignment: int = 1,
    kernels: Registry = OPS,
    recompute_logits: bool = False,
) -> nn.Module:
    """Return the module of one layer as a tensor rank stores it, with unbound parameters on the meta device.

    alignment: rows of padded parameters are rounded up to a multiple of it. kernels: which backends run the ops.
    recompute_logits: the head recomputes its logits in the backward instead of saving their gradient.
    Raises ValueError if the module's parameters differ from the spec's, or the group does not divide them evenly.
    """
    shapes = {
        path: entry.local_shape(tensor_group.size // entry.shards, alignment)
        for path, entry in spec.parameters.items()
    }
    model = model.of_kind(spec.variant)
    modules: tuple[Callable[..., nn.Module], ...] = gpt.Block, gpt.Head
    if isinstance(model, BertModelConfig):
        modules = bert.BertBlock, bert.BertHead
    block, head = modules
    build: dict[LayerKind, Callable[[], nn.Module]] = {
        "embedding": lambda: gpt.Embedding(model, shapes, tensor_group, kernels),
        "block": lambda: block(model, shapes, tensor_group, kernels, spec.index),
        "head": lambda: head(model, shapes, tensor_group, kernels, recompute_logits),
        "positions": lambda: gpt.Positions(model, shapes, kernels),
        "words": lambda: gpt.WordShard(model, shapes, tensor_group),
        "norm": lambda: gpt.LastNorm(model, shapes, kernels),
        "output": lambda: gpt.OutputShard(model, shapes, tensor_group, kernels),
    }
    module = build[spec.kind]()
    _check_declared(module, spec, model, shapes)
    return module


def _check_declared(module: nn.Module, spec: LayerSpec, model: ModelConfig, shapes: Shapes) -> None:
    """Raise ValueError unless a module has exactly the parameters that the ops of its layer declare, and, under
    sequence parallelism, applies exactly the declared ones only to the rank's own tokens."""
    built = {path: tuple(parameter.shape) for path, parameter in module.named_parameters()}
    if built != shapes:
        wrong = sorted({path for path, _ in built.items() ^ shapes.items()})
        raise ValueError(
            f"layer {spec.name}: module and declaration differ in {', '.join(wrong)}: "
            f"built {built}, declared {shapes}. "
            "The specs in megapipe.spec must name every parameter of the module and no other"
        )
    declared = {each.name for each in partial_weights(layer_ops(spec.kind, MicrobatchShape(model)))}
    partial = set(partial_parameters(module))
    if partial != declared:
        raise ValueError(
            f"layer {spec.name}: module and ops differ in what they apply to their "
            f"own tokens alone: the module names {sorted(partial - declared)} in `partial`, "
            f"the ops {sorted(declared - partial)}. Set Op.gathered or OnShards.partial"
        )
