"""Check a run before any process group starts: the rules of all packages. Choose its kernels, and report them.

`config` checks each field by itself; here, every package checks the fields that concern it. All problems are reported
together.
"""

from collections.abc import Iterable, Mapping
from itertools import groupby

import torch

from megapipe.config import ConfigError
from megapipe.config.run import PretrainConfig
from megapipe.kernels import apex_backend, preferences
from megapipe.kernels.ops import OPS
from megapipe.kernels.registry import Choice, KernelError, Registry
from megapipe.layers.attention import has_amx
from megapipe.layers.linear import ALIGNMENT
from megapipe.layout.costs import LayoutCosts
from megapipe.layout.prediction import layout_costs
from megapipe.layout.validation import run_problems
from megapipe.models import DTYPES
from megapipe.optim.scaling import learning_rate_problems
from megapipe.spec.attention import why_a_mask
from megapipe.spec.layers import one_of_each
from megapipe.spec.ops import registry_uses
from megapipe.training.loop.loader import runs_ring

FP8_CAPABILITY = (8, 9)
"""Minimum compute capability of GPUs that multiply in fp8."""


def kernel_problems(config: PretrainConfig) -> list[str]:
    """Return a message for each op or backend in kernels.backends that does not exist, with the nearest name."""
    problems = []
    for op, backend in config.kernels.backends.items():
        try:
            OPS.with_overrides({op: backend})
        except KernelError as error:
            problems.append(f"kernels.backends {{{op}: {backend}}}: {error}")
    if config.training.compile and "weight_gradient" in config.kernels.backends:
        problems.append(
            "kernels.backends names weight_gradient, which training.compile cannot compile; "
            "remove weight_gradient, or set training.compile false"
        )
    return problems


def kernel_choices(config: PretrainConfig, device: torch.device, kernels: Registry) -> list[Choice]:
    """Return the registry's choice for each op of the run, over all ranks. The width of a flat buffer, which differs
    between units, counts as 1.

    Raises ConfigError with every requested backend that cannot be used here.
    """
    dtype = DTYPES[config.training.precision]
    uses = [(op, dtype, width) for op, width in layer_uses(config, device.type)]
    uses.append(("gradient_norm", torch.float32, 1))
    if config.optimizer.name in ("adamw", "muon"):
        uses.append(("adamw", torch.float32, 1))
    if not config.training.master_weights:
        uses.append(("stochastic_rounding", torch.float32, 1))
    if kernels.is_requested("weight_gradient"):
        uses.append(("weight_gradient", dtype, config.model.hidden_size))
    choices, problems = [], []
    for op, precision, width in uses:
        try:
            choices.append(kernels.choice(op, device.type, precision, width))
        except KernelError as error:
            problems.append(f"kernels.backends: {error}")
    if problems:
        raise ConfigError(list(dict.fromkeys(problems)))
    return choices


def costs_on(config: PretrainConfig, device: str) -> LayoutCosts:
    """Return the costs of a run's layers on this machine's devices of a type."""
    return layout_costs(config, device=device, amx=device == "cpu" and has_amx())


def layer_uses(config: PretrainConfig, device: str) -> list[tuple[str, int]]:
    """Return the ops of the kernel registry that training runs in the layers, with the length of the last axis."""
    costs = costs_on(config, device)
    return registry_uses([op for layer in one_of_each(costs.layers) for op in costs.ops(layer)])


def document_attention(config: PretrainConfig, device: torch.device) -> str | None:
    """Return how attention separates documents, and why, in words; None if it does not separate them.

    Raises ConfigError if the configuration requests an implementation that cannot be used here.
    """
    if not config.data.isolate_documents:
        return None
    if runs_ring(config.parallel):
        return "attention within documents: a mask for every piece of the ring"
    reason = why_a_mask(config.model, device.type)
    if reason is None:
        return "attention within documents: flex_attention over the blocks of each document"
    if config.model.attention == "flex":
        raise ConfigError(f"model.attention is 'flex', but {reason}; set model.attention to auto")
    return f"attention within documents: a mask [samples, tokens, tokens] ({reason})"


def fp8_products(config: PretrainConfig, device: torch.device) -> str | None:
    """Return how matrices are multiplied in fp8, in words; None if none are.

    Raises ConfigError if this device has no fp8 units, or if they do not support the model's shapes.
    """
    recipe = config.training.fp8
    if recipe == "none":
        return None
    if device.type != "cuda":
        return f"fp8: {recipe} scales, rounding emulated and products in fp32 (no fp8 units on {device.type})"
    problems = fp8_problems(config, torch.cuda.get_device_capability(device))
    if problems:
        raise ConfigError(problems)
    return f"fp8: {recipe} scales, torch._scaled_mm"


def fp8_problems(config: PretrainConfig, capability: tuple[int, int]) -> list[str]:
    """Return a message for each reason why GPUs of this compute capability cannot run products in fp8."""
    tensor, recipe = config.parallel.tensor, config.training.fp8
    problems = []
    if capability < FP8_CAPABILITY:
        needed, own = (f"{major}.{minor}" for major, minor in (FP8_CAPABILITY, capability))
        problems.append(
            f"training.fp8 {recipe} needs a GPU of compute capability {needed} (Ada, Hopper) "
            f"or later, and this one has {own}; set training.fp8 none"
        )
    if recipe == "rowwise" and config.training.precision != "bf16":
        problems.append(
            "training.fp8 rowwise returns its results in bf16, but training.precision is "
            f"{config.training.precision}; set it to bf16, or training.fp8 to tensorwise"
        )
    for model in config.model.kinds_of_layers.values():
        extents = {
            "model.hidden_size": model.hidden_size,
            "rows of the MLP's matrices on a rank": model.ffn_size // tensor,
            "columns of the attention's output matrix on a rank": model.num_heads * model.head_dim // tensor,
            "rows of its qkv matrix on a rank": (model.num_heads + 2 * model.kv_heads) * model.head_dim // tensor,
            **_tokens_of_products(config),
        }
        problems += [
            f"training.fp8 {recipe}: {name} {extent} must be a multiple of "
            f"{ALIGNMENT} on a GPU; choose another size, or set training.fp8 none"
            for name, extent in extents.items()
            if extent % ALIGNMENT
        ]
    return list(dict.fromkeys(problems))


def _tokens_of_products(config: PretrainConfig) -> dict[str, int]:
    """Return the number of tokens in a product of a block, by its name in messages."""
    parallel = config.parallel
    tokens = config.batch.micro_size * (config.data.sequence_length // parallel.context)
    tokens_of_product = {"tokens of a micro-batch on a rank": tokens}
    if parallel.sequence and parallel.sequence_chunks > 1:
        # A chunk is a part of a rank's tokens of each sample. If they do not divide evenly, sizes differ by one.
        local = tokens // config.batch.micro_size // parallel.tensor
        sizes = {"smallest": local // parallel.sequence_chunks, "largest": -(-local // parallel.sequence_chunks)}
        for name, size in sizes.items():
            chunk_tokens = size * parallel.tensor * config.batch.micro_size
            tokens_of_product[f"tokens of the {name} chunk (parallel.sequence_chunks)"] = chunk_tokens
    return tokens_of_product


def attention_kept(config: PretrainConfig, device: torch.device) -> str | None:
    """Return a note if recompute.parts names attention but attention saves no weights to recompute; otherwise None."""
    if config.recompute.method != "selective" or "attention" not in config.recompute.parts:
        return None
    blocks = config.data.isolate_documents and why_a_mask(config.model, device.type) is None
    ring = runs_ring(config.parallel)
    if not (blocks or ring) and costs_on(config, device.type).attention == "unfused":
        return None
    how = "in a ring" if ring else "fused"
    return f"recompute.parts attention: attention runs {how} here and saves no weights to recompute"


def described_choices(choices: Iterable[Choice], requested: Mapping[str, str]) -> list[str]:
    """Return the choices in words: a line for each backend with the reason why no preferred one was chosen; on GPUs
    also measured preferences and NVIDIA's apex, if there are any.

    requested: kernels.backends. An op in it that is not among the choices gets a warning.
    """
    choices = sorted(choices, key=lambda choice: (choice.backend, _why(choice), choice.op))
    lines = []
    for (backend, why), group in groupby(choices, key=lambda choice: (choice.backend, _why(choice))):
        lines.append(f"kernels: {backend} for {', '.join(dict.fromkeys(choice.op for choice in group))}{why}")
    if any(choice.device == "cuda" for choice in choices):
        remarks = (preferences.current().note, apex_backend.described())
        lines += [f"kernels: {remark}" for remark in remarks if remark is not None]
    unused = sorted(set(requested) - {choice.op for choice in choices})
    if unused:
        lines.append(f"warning: kernels.backends names {', '.join(unused)}, which this run never calls")
    return lines


def _why(choice: Choice) -> str:
    """Return why no preferred backend was chosen. A reason that all of them share is given without their names."""
    reasons = [reason.partition(": ")[2] or reason for reason in choice.reasons]
    if len(set(reasons)) > 1:
        return f" ({'; '.join(choice.reasons)})"
    return f" ({reasons[0]})" if reasons else ""


def validate(config: PretrainConfig, world_size: int) -> None:
    """Check that the run can start on `world_size` ranks. Raises one ConfigError that lists all problems."""
    problems = config.model.problems() + config.problems()
    problems += learning_rate_problems(config.optimizer, config.training.steps)
    problems += kernel_problems(config)
    problems = problems or run_problems(config, world_size)
    if problems:
        raise ConfigError(problems)
