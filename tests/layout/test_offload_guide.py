"""The figures of docs/offload.md are those of the formulas, the simulator and auto."""

import re
from pathlib import Path

import pytest

from megapipe.config.load import parse
from megapipe.config.model import ModelConfig
from megapipe.layout.offload import BlockCost, treat
from megapipe.schedules.command.main import main
from megapipe.spec.layers import layer_flops, model_layers
from megapipe.training.offload_plan import PREFETCHES
from megapipe.training.validate import validate
from tests.spec.sizes import message_bytes, predicted_bytes

ROOT = Path(__file__).parents[2]
GUIDE = (ROOT / "docs" / "offload.md").read_text(encoding="utf-8")


def gpt3_block() -> BlockCost:
    """On one of 8 tensor ranks, at 400 TFLOP/s."""
    model = ModelConfig(vocabulary_size=51200, num_layers=96, hidden_size=12288, num_heads=96, max_positions=2048,
                        hidden_dropout=0.1, attention_dropout=0.1)  # fmt: skip
    layer = model_layers(model)[1]
    work = layer_flops(model, layer, 1, 2048)
    kept = predicted_bytes(model, layer, 1, 2048, "bf16", "sdpa", tensor=8)
    backward = work.backward_input + work.backward_weight
    stream = message_bytes(model, 1, 2048, "bf16")
    return BlockCost(work.forward / 8 / 4e14, backward / 8 / 4e14, kept, stream)


def test_what_auto_decides() -> None:
    block = gpt3_block()
    rows = re.findall(r"^\| (\d+) " + r"\| `([kmr]{12})` \| ([\d.]+) " * 3 + r"\|$", GUIDE, re.M)
    assert len(rows) == 5
    for memory, *cells in rows:
        for bandwidth, letters, recomputed in zip((25e9, 50e9, 200e9), cells[::2], cells[1::2], strict=True):
            found = [
                treat([block] * 12, microbatches=8, memory=int(memory) * 2**30, bandwidth=bandwidth, prefetch=prefetch)
                for prefetch in PREFETCHES
            ]
            best = min(found, key=lambda each: each.recomputed)
            assert "".join(name[0] for name in best.of_blocks) == letters
            assert f"{1e3 * best.recomputed:.1f}" == recomputed
    assert f"A block saves {block.kept / 2**20:.0f} MiB" in GUIDE
    assert f"takes {12e3 * block.forward:.1f} ms per micro-batch" in GUIDE


def test_the_command_of_the_guide(capsys: pytest.CaptureFixture[str]) -> None:
    line = re.search(r"^python tools/schedule.py (simulate .* --offload-time 0.9)$", GUIDE, re.M)
    assert line is not None

    def makespan(*flags: str) -> float:
        assert main([*line[1].split(), *flags]) == 0
        out = capsys.readouterr().out
        assert "peak activations         0.5 0.5 0.5 0.5" in out
        found = re.search(r"^makespan +([\d.]+)$", out, re.M)
        assert found is not None
        return float(found[1])

    assert makespan() == makespan("--offload-time=0") < makespan("--offload-time=2")


def test_weights_hide_as_the_guide_says(capsys: pytest.CaptureFixture[str]) -> None:
    line = re.search(r"^python tools/schedule.py (simulate .* --offload-weights 2 .*)$", GUIDE, re.M)
    assert line is not None
    assert main(line[1].split()) == 0
    found = dict(re.findall(r"^([a-z ]+?) {2,}(.+)$", capsys.readouterr().out, re.M))
    assert f"makes {found['weight gathers'].split()[0]} copies per step of its 4 layers" in GUIDE
    assert found["exposed communication"] == "0"


def test_the_example_passes_the_checks_of_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    example = "examples/parallel/offload.yaml"
    assert f"torchrun --nproc_per_node 2 pretrain_gpt.py --config {example}" in GUIDE
    config = parse(["--config", example])
    assert (config.offload.activations, config.offload.optimizer, config.offload.weights) == ("blocks", True, True)
    validate(config, 2)
    flags = re.search(r"^#   \.\.\. (.*)$", Path(example).read_text(), re.M)
    assert flags is not None
    validate(parse(["--config", example, *flags[1].split()]), 2)
