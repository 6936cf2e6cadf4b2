"""Bytes and times in the guides, from the ops of layers, from state units, and from constants of kernels."""

import re
from collections.abc import Collection
from dataclasses import replace
from functools import cache
from typing import Any

from benchmarks.kernel_speed_contest.case import Size
from benchmarks.kernel_speed_contest.cases import CASES
from megapipe.config.load import parse
from megapipe.config.memory import RecomputeConfig, RecomputedPart
from megapipe.config.model import ModelConfig
from megapipe.config.optimizer import OptimizerConfig
from megapipe.config.run import PretrainConfig
from megapipe.kernels.ops import OPS
from megapipe.layout.offload import BlockCost, treat
from megapipe.layout.units import Unit, UnitCosts, place
from megapipe.spec.layers import layer_flops, layer_ops, model_layers
from megapipe.spec.ops import MicrobatchShape, exchanges
from megapipe.spec.parameters import Init, ParameterSpec
from megapipe.training.loop.replica import PREFETCHES
from tests.docs.figures import ROOT, Rows, cells, sentence
from tests.spec.sizes import message_bytes, predicted_bytes, sent_bytes

MIB = 2**20
TENSOR = 8
GPT3 = ModelConfig(
    vocabulary_size=51200,
    num_layers=96,
    hidden_size=12288,
    num_heads=96,
    max_positions=2048,
    hidden_dropout=0.1,
    attention_dropout=0.1,
)
LLAMA: dict[str, Any] = {
    "hidden_size": 4096,
    "num_heads": 32,
    "activation": "swiglu",
    "bias": "none",
    "normalization": "rms_norm",
    "positions": "rotary",
}


def block_bytes(attention: Any, parts: Collection[RecomputedPart] = (), *, shards: bool = False) -> int:
    """Return the bytes that a block of GPT-3 saves on one of 8 tensor ranks. shards: with sequence parallelism."""
    block = model_layers(GPT3)[1]
    return predicted_bytes(
        GPT3, block, 1, 2048, "bf16", attention, tensor=TENSOR, recompute=parts, sequence_parallel=shards
    )


def in_mib(*sizes: float) -> list[str]:
    """Return sizes in whole MiB."""
    return [str(round(size / MIB)) for size in sizes]


@cells("docs/memory.md", "saved by a block")
def saved_by_a_block() -> Rows:
    selective = "`recompute.method selective`"
    settings: dict[str, Collection[RecomputedPart]] = {
        "nothing": (),
        selective: RecomputeConfig().parts,
        f"{selective}, `recompute.parts [attention]`": ["attention"],
    }
    for label, parts in settings.items():
        yield label, in_mib(*(block_bytes(path, parts) for path in ("unfused", "sdpa")))
    full = message_bytes(GPT3, 1, 2048, "bf16")
    yield "`recompute.method full`", in_mib(full, full)


@cells("docs/sequence_parallel.md", "saved with sequence parallelism")
def saved_with_sequence_parallelism() -> Rows:
    yield "a block, unfused attention", in_mib(*(block_bytes("unfused", shards=each) for each in (False, True)))
    yield "a block, fused attention", in_mib(*(block_bytes("sdpa", shards=each) for each in (False, True)))
    parts = RecomputeConfig().parts
    selective = (block_bytes("sdpa", parts, shards=each) for each in (False, True))
    yield "a block, `recompute.method selective`", in_mib(*selective)
    messages = (message_bytes(GPT3, 1, 2048, "bf16", tensor=TENSOR, sequence_parallel=each) for each in (False, True))
    yield "a message between stages", in_mib(*messages)


@cells("docs/context_parallel.md", "saved and sent by context ranks")
def saved_and_sent_by_context_ranks() -> Rows:
    model = parse(["--model", str(ROOT / "examples/models/llama3_8b.yaml")]).model
    shape = (1, 131072)
    block, kinds = model_layers(model)[1], ("ring", "all_to_all")
    for size in (1, 2, 4, 8):
        saved = [
            predicted_bytes(model, block, *shape, "bf16", "sdpa", context_attention=kind, context=size)
            for kind in kinds
        ]
        sent = [each for kind in kinds for each in sent_bytes(model, *shape, "bf16", kind, size)]  # type: ignore[arg-type]
        yield str(size), in_mib(*saved, *sent)


@cells("docs/precision.md", "bytes of a parameter")
def bytes_of_a_parameter() -> Rows:
    spec = ParameterSpec("w", (64, 64), None, Init("normal", 1.0), decay=True, matrix=True)
    for label, precision, master, moments in (
        ("`precision fp32`", "fp32", True, "fp32"),
        ("`precision bf16`", "bf16", True, "fp32"),
        ("`precision fp16`", "fp16", True, "fp32"),
        ("`precision bf16`, `master_weights false`", "bf16", False, "fp32"),
        ("the same, `optimizer.moment_dtype bf16`", "bf16", False, "bf16"),
    ):
        config = PretrainConfig(optimizer=OptimizerConfig(moment_dtype=moments))  # type: ignore[arg-type]
        config.training = replace(config.training, precision=precision, master_weights=master)  # type: ignore[arg-type]
        total = UnitCosts(config, replicas=1).state(Unit((spec,))).total
        yield label, [f"{total / spec.num_elements:g}"]


@cells("docs/optimizers.md", "moments of optimizers")
def moments_of_optimizers() -> Rows:
    yield "`adamw`", [f"{4 * OptimizerConfig().num_moments()}; 4 with `optimizer.moment_dtype bf16`"]
    muon = OptimizerConfig(name="muon")
    matrices, rest = muon.num_moments(matrix=True), muon.num_moments()
    yield "`muon`", [f"{4 * matrices} for hidden matrices, {4 * rest} for the rest"]


@cells("docs/optimizers.md", "padding of whole matrices")
def padding_of_whole_matrices() -> Rows:
    for label, model in {
        "GPT-2, ffn 4h": ModelConfig(num_layers=1, hidden_size=1024, num_heads=16),
        "Llama 2 7B": ModelConfig(num_layers=1, ffn_hidden_size=11008, **LLAMA),
        "Llama 3 8B": ModelConfig(num_layers=1, ffn_hidden_size=14336, num_kv_heads=8, **LLAMA),
    }.items():
        specs = list(model_layers(model)[1].parameters.values())
        parameters = sum(spec.num_elements for spec in specs)
        placements = [place(specs, count) for count in (2, 3, 4, 8, 16)]
        yield (
            label,
            [
                f"{each.num_elements / parameters - 1:.1%}{f', {len(each.cut)} cut' if each.cut else ''}"
                for each in placements
            ],
        )


@cache
def gpt3_block() -> BlockCost:
    """A block of GPT-3 on one of 8 tensor ranks, at 400 TFLOP/s."""
    work = layer_flops(GPT3, model_layers(GPT3)[1], 1, 2048)
    backward = work.backward_input + work.backward_weight
    stream = message_bytes(GPT3, 1, 2048, "bf16")
    return BlockCost(work.forward / 8 / 4e14, backward / 8 / 4e14, block_bytes("sdpa"), stream)


@cells("docs/offload.md", "what offload auto decides")
def what_offload_auto_decides() -> Rows:
    for memory in (30, 25, 20, 15, 10):
        values = []
        for bandwidth in (25e9, 50e9, 200e9):
            plans = [
                treat([gpt3_block()] * 12, microbatches=8, memory=memory * 2**30, bandwidth=bandwidth, prefetch=each)
                for each in PREFETCHES
            ]
            best = min(plans, key=lambda each: each.recomputed)
            letters = "".join(name[0] for name in best.of_blocks)
            values += [f"`{letters}`", f"{1e3 * best.recomputed:.1f}"]
        yield str(memory), values


@sentence("docs/offload.md", "bytes of a block of GPT-3", r"A block saves (\d+) MiB")
def bytes_of_a_block() -> list[str]:
    return in_mib(gpt3_block().kept)


@sentence("docs/offload.md", "time of twelve blocks of GPT-3", r"takes ([\d.]+) ms per micro-batch")
def time_of_twelve_blocks() -> list[str]:
    return [f"{12e3 * gpt3_block().forward:.1f}"]


def _sent_by(dimension: str, pattern: str) -> None:
    model = ModelConfig(num_layers=1, hidden_size=5120, num_heads=40, max_positions=2048)

    @sentence("docs/parallelism.md", f"sent by {dimension} ranks", pattern)
    def sent() -> list[str]:
        shape = MicrobatchShape(model, 1, 2048, "bf16", tensor=8)
        unit = Unit(tuple(model_layers(model)[1].parameters.values()))
        (reduction,) = UnitCosts(PretrainConfig(), replicas=8).reduction(unit)["data+context"]
        tensor = exchanges(layer_ops("block", shape))["tensor"]
        sizes = {"tensor": sum(each.sent(8) for each in tensor), "pipeline": shape.stream, "data": reduction.sent(8)}
        return [f"{round(sizes[dimension] / MIB):,}"]


for _dimension in ("tensor", "pipeline", "data"):
    _sent_by(_dimension, rf"(?m)^\| {_dimension} \|[^|]*\|[^|]*\| ([\d,]+) \|")


def _constant(name: str) -> int:
    """Return the constant of this name in a header of csrc/."""
    text = "".join(header.read_text(encoding="utf-8") for header in (ROOT / "csrc").rglob("*.cuh"))
    (value,) = re.findall(rf"constexpr int {name}\b[^;]*?= (?:kVector \? )?(\d+)", text)
    return int(value)


@cells("docs/kernels.md", "widths that stay on chip")
def widths_on_chip() -> Rows:
    for label, threads, packs in (
        ("norms, forward", "kOneTileThreads", "kPacks"),
        ("norms, backward", "kTwoTileThreads", "kBackwardPacks"),
        ("softmax, forward", "kOneTileThreads", "kPacks"),
        ("softmax, backward", "kTwoTileThreads", "kPacks"),
    ):
        fp32 = _constant(threads) * _constant(packs) * _constant("kAccessBytes") // 4
        cluster = fp32 * _constant("kMaxClusterBlocks")
        yield label, [None, f"{2 * fp32:,} ({fp32:,})", f"{2 * cluster:,} ({cluster:,})"]


WITHOUT_BYTES = (
    "attention_probabilities",
    "linear_cross_entropy",
    "softcapped_linear_cross_entropy",
    "weight_gradient",
)
"""Ops whose row has a formula instead of bytes per element."""


@cells("docs/kernels.md", "backends and bytes of ops")
def backends_and_bytes_of_ops() -> Rows:
    """Backends in the order in which they are chosen; bytes as benchmarks count them."""
    for op in OPS.ops:
        values: list[str | None] = [", ".join(each.name for each in op.backends)]
        if op.name not in WITHOUT_BYTES:
            case, size = next(case for case in CASES if case.op == op.name), Size(64, 32)
            forward, both = case.work(size, 2)
            values += [
                None,
                f"{forward.bytes / size.elements:g}",
                "" if both is None else f"{both.bytes / size.elements:g}",
            ]
        yield f"`{op.name}`", [*values, *[None] * (5 - len(values))]
