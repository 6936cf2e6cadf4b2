"""Kernels compared with the FLOPs that costs/ counts, and with bytes counted by hand."""

from dataclasses import replace

import pytest

from megapipe.config.bert import BertModelConfig, BertPretrainConfig
from megapipe.config.run import PretrainConfig
from megapipe.layout.hardware.description import Efficiency
from megapipe.layout.units import Unit
from megapipe.planner.cost.layer_times import UNFUSED_LOSS_BYTES, RooflineTimes
from megapipe.spec.layers import layer_flops, model_layers
from megapipe.spec.parameters import LayerSpec
from tests.planner.cost.runs import SMALL, config_of, machine

DEVICE = machine().groups[0].device
PEAK = DEVICE.peak("bf16")
SHAPES = {
    "gpt2": SMALL,
    "llama": replace(SMALL, activation="swiglu", num_kv_heads=4, normalization="rms_norm", positions="rotary"),
}


def flops_of(config: PretrainConfig, layer: LayerSpec, phase: str, name: str = "") -> float:
    kernels = RooflineTimes(DEVICE).timed_kernels(config, layer)
    return PEAK * sum(time.compute for each, time in kernels if each.phase == phase and name in each.name)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("tensor", [1, 2, 4])
@pytest.mark.parametrize("context", [1, 2])
def test_products_of_a_layer_have_the_counted_flops(shape: str, tensor: int, context: int) -> None:
    """Unfused attention computes every pair of tokens, which is what `layer_flops` counts; a ring is fused."""
    model = replace(SHAPES[shape], attention="unfused")
    config = config_of(model, parallel={"tensor": tensor, "context": context}, batch={"micro_size": 3})
    ranks = tensor * context
    for layer in model_layers(model):
        counted = layer_flops(model, layer, 3, 1024)
        if context == 1 or layer.kind != "block":
            padding = 1.0 if layer.kind != "head" else -(-1024 // tensor // 64) * 64 * tensor / 1024
            for phase in ("forward", "backward_input"):
                expected = getattr(counted, phase) * padding
                assert flops_of(config, layer, phase) * ranks == pytest.approx(expected)
        assert flops_of(config, layer, "backward_weight") * ranks == pytest.approx(counted.backward_weight)


def test_fused_causal_attention_computes_half_the_scores() -> None:
    """Dao 2023, arXiv 2307.08691, sections 2.3 and 4.1; a BERT sees all pairs."""
    block, config = model_layers(SMALL)[1], config_of(replace(SMALL, attention="sdpa"))
    pairs = 2 * 2 * SMALL.hidden_size * 1024**2
    for phase, flops in (("forward", pairs / 2), ("backward_input", 2.5 * pairs / 2), ("backward_weight", 0.0)):
        assert flops_of(config, block, phase, "fused") == pytest.approx(flops)
    bert = BertModelConfig(num_layers=2, hidden_size=2048, num_heads=16, attention="sdpa")
    run = BertPretrainConfig(model=bert)
    run.training.precision = "bf16"
    assert flops_of(run, model_layers(bert)[1], "forward", "fused") == pytest.approx(2 * 2 * 2048 * 512**2)


def test_memory_bound_kernels_take_bytes_over_reached_bandwidth() -> None:
    device = replace(DEVICE, efficiency=Efficiency(memory=0.5))
    config = config_of(batch={"micro_size": 2})
    stream = 2 * 1024 * SMALL.hidden_size * 2
    block, head = model_layers(SMALL)[1], model_layers(SMALL)[-1]
    norm = next(time for each, time in RooflineTimes(device).timed_kernels(config, block) if each.name == "mlp_norm")
    assert norm.seconds == pytest.approx(2 * stream / 1e12)
    fused, unfused = (
        next(time for each, time in RooflineTimes(device, apart).timed_kernels(config, head) if each.name == "loss")
        for apart in (False, True)
    )
    assert fused.seconds == pytest.approx(3 * 2 * 1024 * 1024 * 2 / 1e12)
    assert unfused.seconds == pytest.approx(2 * 1024 * 1024 * UNFUSED_LOSS_BYTES / 1e12)


def test_selective_recomputes_its_ops_and_full_the_forward() -> None:
    model = replace(SMALL, attention="unfused", attention_dropout=0.1)
    block, times = model_layers(model)[1], RooflineTimes(DEVICE)

    def again(**recompute: object) -> float:
        return times.of(config_of(model, recompute=recompute), block).recompute

    forward = times.of(config_of(model), block).forward
    assert again(method="none") == 0
    assert again(method="full") == forward
    parts = [again(method="selective", parts=[part]) for part in ("attention", "mlp", "norms")]
    assert min(parts) > 0
    assert sum(parts) == pytest.approx(again(method="selective"))
    assert sum(parts) < forward
    head = model_layers(model)[-1]
    logits = times.of(config_of(model, recompute={"logits": True}), head).recompute
    assert logits >= layer_flops(model, head, 1, 1024).forward / PEAK


def test_sequence_ranks_shard_norms_and_tensor_ranks_products() -> None:
    block, times = model_layers(SMALL)[1], RooflineTimes(DEVICE)
    whole, shared = (
        times.of(config_of(parallel={"tensor": 4, "sequence": sequence}), block) for sequence in (False, True)
    )
    assert shared.forward < whole.forward
    assert shared.backward_weight == whole.backward_weight
    assert whole.backward_weight == pytest.approx(times.of(config_of(), block).backward_weight / 4, rel=0.25)


def test_fp8_products_use_their_own_peak() -> None:
    fast = RooflineTimes(replace(DEVICE, peak_flops={**DEVICE.peak_flops, "fp8": 600e12}))
    config = config_of(training={"fp8": "rowwise", "fp8_first_kept": 1}, batch={"micro_size": 4})
    _, kept, chosen, *_ = model_layers(SMALL)
    assert fast.of(config, kept).backward_weight > fast.of(config, chosen).backward_weight
    assert RooflineTimes(DEVICE).of(config, kept) == RooflineTimes(DEVICE).of(config, chosen)


def test_updates_move_the_optimizers_bytes() -> None:
    """AdamW in bf16: gradient three times, master and two moments there and back, new weights: 38 bytes each."""
    block, times = model_layers(SMALL)[1], RooflineTimes(DEVICE)
    unit = Unit(tuple(block.parameters.values()))
    seconds = times.update(config_of(), block, unit)
    elements = sum(spec.num_elements for spec in unit.specs)
    assert seconds == pytest.approx(elements * (3 * 4 + 2 * 2 * 4 + 2 * 4 + 2) / 2e12, rel=1e-3)
    shared = times.update(config_of(parallel={"data": 4}, zero={"stage": 1}), block, unit)
    assert shared == pytest.approx(seconds / 4, rel=1e-3)
    muon = times.update(config_of(optimizer={"name": "muon"}), block, unit)
    matrices = [spec for spec in unit.specs if spec.matrix]
    least = sum(4 * min(2048, s.num_elements // 2048) ** 2 * max(2048, s.num_elements // 2048) * 5 for s in matrices)
    assert muon > seconds + least / PEAK
