"""Random valid configurations, and what every layer of them holds, computes and sends, as rows of numbers."""

import random
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, cast

import numpy as np

from megapipe.config.bert import BertModelConfig, BertPretrainConfig
from megapipe.config.memory import RecomputeConfig
from megapipe.config.model import ModelConfig
from megapipe.config.parallel import ParallelConfig
from megapipe.config.run import PretrainConfig
from megapipe.layout.costs import LayoutCosts
from megapipe.layout.hardware.description import load_hardware
from megapipe.layout.stages import VOCABULARY_ALIGNMENT, layers_of
from megapipe.layout.units import Unit
from megapipe.layout.validation import run_problems
from megapipe.planner.cost.layer_times import RooflineTimes
from megapipe.spec.layers import layer_flops
from megapipe.spec.ops import AttentionPath

COUNT = 5000
SEQUENCE = 64
WITH_KERNELS = 10
"""Times of kernels are computed for every tenth configuration."""


@dataclass(frozen=True)
class Case:
    """A configuration of one replica, the path of its attention, and the type of its devices."""

    config: PretrainConfig
    attention: str
    device: str


def cases() -> Iterator[Case]:
    """Yield `COUNT` valid configurations, always the same ones."""
    draw = random.Random(20)
    while True:
        case = _case(draw)
        world = case.config.parallel.tensor * case.config.parallel.context
        problems = [*case.config.problems(), *run_problems(case.config, world)]
        if not [each for each in problems if "prefix" not in each and "tokenizer" not in each]:
            yield case


def values(case: Case) -> tuple[list[list[int]], list[list[int]]]:
    """Return bytes and FLOPs, and checksums of parameters and exchanges, of embedding, two blocks and head."""
    layers, path = layers_of(case.config), cast(AttentionPath, case.attention)
    costs = LayoutCosts(case.config, layers, 1, path, VOCABULARY_ALIGNMENT, device=case.device)
    numbers, checksums = [], []
    for layer in (layers[0], layers[1], layers[2], layers[-1]):
        flops = layer_flops(
            case.config.model, layer, case.config.batch.micro_size, SEQUENCE, costs.config.predictions,
            case.config.recompute.logits,
        )  # fmt: skip
        partial = costs.partial_reduction(layer, Unit(tuple(layer.parameters.values()))).get("tensor", [])
        temporaries = (costs.temporaries(layer, phase) for phase in ("backward", "input half", "weight half"))
        held = [costs.kept(layer), costs.pending(layer), *temporaries, sum(each.elements for each in partial)]
        numbers.append([*held, flops.forward, flops.backward_input, flops.backward_weight, flops.recomputed])
        parameters = [
            (
                *(path, spec.name, spec.shape, spec.partition_axis, spec.init.kind, f"{spec.init.std:.6g}"),
                *(spec.decay, spec.matrix, spec.padded, spec.balance_rate),
            )
            for path, spec in layer.parameters.items()
        ]
        exchanges = [_exchanged(costs, layer, forwards, halves) for forwards in (1, 2) for halves in (False, True)]
        checksums.append([zlib.crc32(repr(parameters).encode()), zlib.crc32(repr(exchanges).encode())])
    return numbers, checksums


def seconds(case: Case) -> list[list[float]]:
    """Return by layer the seconds of each phase on an A100: forward, both halves of the backward, recomputation."""
    times = RooflineTimes(load_hardware("a100-80").groups[0].device, megatron_kernels=case.device == "cpu")
    layers = layers_of(case.config)
    found = [times.kernels(case.config, layer) for layer in (layers[0], layers[1], layers[2], layers[-1])]
    return [[*phases, again] for phases, again in found]


def _exchanged(costs: LayoutCosts, layer: Any, forwards: int, halves: bool) -> list[tuple[object, ...]]:
    found: dict[tuple[object, ...], int] = {}
    for group, exchanges in costs.within_layer(layer, forwards=forwards, halves=halves).items():
        for each in exchanges:
            key = group, each.operation, each.elements, each.element_bytes
            found[key] = found.get(key, 0) + each.calls
    return sorted((*key, calls) for key, calls in found.items() if calls and key[2])  # type: ignore[type-var]


def _case(draw: random.Random) -> Case:
    bert, kv_heads = draw.random() < 0.35, draw.choice([8, 4, 2, 1])
    fields: dict[str, Any] = {
        "num_layers": 3,
        "hidden_size": 64,
        "num_heads": 8,
        "num_kv_heads": kv_heads,
        "head_size": draw.choice([None, 16, 24]),
        "vocabulary_size": draw.choice([512, 777, 1000]),
        "activation": draw.choice(["gelu", "gelu_tanh", "swiglu"]),
        "positions": draw.choice(["learned", "rotary", "none"]),
        "normalization": draw.choice(["layer_norm", "rms_norm"]),
        "bias": draw.choice(["all", "qkv", "none"]),
        "qk_norm": draw.random() < 0.3,
        "hidden_dropout": draw.choice([0, 0.1]),
        "embedding_dropout": draw.choice([0, 0.1]),
        "tie_embeddings": draw.random() < 0.5,
        "ffn_hidden_size": draw.choice([128, 256]),
        "scale_residual_init": draw.random() < 0.5,
    }
    attention = draw.choice(["sdpa", "unfused"])
    fields["attention"] = attention
    if attention == "unfused":
        fields["attention_dropout"] = draw.choice([0, 0.1])
    if draw.random() < 0.35:
        fields["num_experts"] = draw.choice([4, 8])
        fields["experts_per_token"] = draw.choice([1, 2, 4])
        fields["normalize_expert_shares"] = draw.random() < 0.5
        fields["expert_balance_rate"] = draw.choice([0.0, 0.001])
    model: ModelConfig
    if bert:
        fields |= {"norm_position": draw.choice(["pre", "post"]), "sentence_head": draw.random() < 0.6}
        model = BertModelConfig(**fields)
    else:
        model = ModelConfig(**fields, sliding_window=draw.choice([None, 16]), max_positions=128)
    tensor = draw.choice([size for size in (1, 2, 4) if kv_heads % size == 0])
    sequence = tensor > 1 and draw.random() < 0.5
    parallel = ParallelConfig(
        tensor=tensor,
        sequence=sequence,
        sequence_chunks=draw.choice([1, 2, 4]) if sequence else 1,
        context=draw.choice([1, 1, 2, 4]),
        context_attention=cast(Any, draw.choice(["ring", "all_to_all"])),
        data=1,
    )
    recompute = RecomputeConfig(logits=draw.random() < 0.3)
    if draw.random() < 0.5:
        parts = draw.sample(["attention", "mlp", "norms"], draw.randint(1, 3))
        recompute = replace(recompute, method="selective", parts=cast(Any, parts))
    base = BertPretrainConfig() if bert else PretrainConfig()
    training = replace(base.training, precision=draw.choice(["fp32", "bf16"]))
    if training.precision == "bf16" and not model.num_experts and draw.random() < 0.3:
        fp8 = cast(Any, draw.choice(["tensorwise", "rowwise"]))
        training = replace(training, fp8=fp8, fp8_first_kept=1, fp8_last_kept=1)
    data = replace(base.data, sequence_length=SEQUENCE)
    if not bert:
        data = replace(data, isolate_documents=draw.random() < 0.3)
    micro_size = draw.choice([1, 2, 3])
    batch = replace(base.batch, micro_size=micro_size, global_size=micro_size)
    config = replace(
        base, model=model, parallel=parallel, recompute=recompute, training=training, data=data, batch=batch
    )
    return Case(config, attention, draw.choice(["cpu", "cuda"]))


def arrays(count: int) -> dict[str, np.ndarray]:
    """Return the values of the first configurations. Numbers: [configurations, 4 layers, 10]."""
    numbers, checksums, times = [], [], []
    for number, case in enumerate(islice(cases(), count)):
        own, checks = values(case)
        numbers.append(own)
        checksums.append(checks)
        if number % WITH_KERNELS == 0:
            times.append(seconds(case))
    return {
        "numbers": np.array(numbers, dtype=np.int64),
        "checksums": np.array(checksums, dtype=np.uint32),
        "seconds": np.array(times, dtype=np.float64),
    }
