"""Conversion has a few tensors in memory, not the whole model."""

import subprocess
import sys
from pathlib import Path

import pytest

BUILD = """
import sys
from pathlib import Path
import torch
from megapipe.config.model import ModelConfig
from megapipe.conversion.formats import Contents, StoredTensor
from megapipe.conversion.megapipe_format import MegapipeTarget
from megapipe.conversion.megapipe_format import parameters_of

model = ModelConfig(vocabulary_size=8192, num_layers=24, hidden_size=1024, num_heads=16, max_positions=64,
                    normalization="rms_norm", activation="swiglu", positions="rotary", bias="none")
tensors = tuple(StoredTensor(name, "weights", spec.shape, "F32") for name, spec in parameters_of(model).items())
target = MegapipeTarget(Path(sys.argv[1]), Contents(model, tensors))
for tensor in tensors:
    target.add(tensor, torch.full(tensor.shape, 0.5))
target.finish()
"""
CONVERT = """
import resource, sys
import torch
import megapipe.conversion.hugging_face, megapipe.conversion.megapipe_format, megapipe.conversion.megatron_torch
from megapipe.conversion.command import main

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

before = peak()
assert main(["convert", sys.argv[1], "--to", sys.argv[2], *sys.argv[3:]]) == 0
print(peak() - before)
"""
LARGEST = 8192 * 1024 * 4
"""Bytes of the embedding; the swiglu's first matrix has 2 x 2752 x 1024 x 4 = 23 MB."""
CONSTANT = 96 * 2**20
"""Buffers, parsers and the tokenizer library, for any model."""


@pytest.mark.exhaustive
def test_memory_is_bounded_by_the_largest_tensor(tmp_path: Path) -> None:
    """A model of 1.2 GB in both directions; joined parts need twice the largest tensor."""
    built, exported, back = (str(tmp_path / name) for name in ("built", "exported", "back"))
    subprocess.run([sys.executable, "-c", BUILD, built], check=True)
    total = sum(file.stat().st_size for file in Path(built).iterdir())
    bound = 2 * LARGEST + CONSTANT
    assert total > 6 * bound
    sharded, again = str(tmp_path / "sharded"), str(tmp_path / "again")
    for source, kind, *target in (
        (built, "hf", exported),
        (exported, "megapipe", back, "--precision", "bf16"),
        (back, "megatron", sharded, "--tensor", "2", "--pipeline", "2"),
        (sharded, "megapipe", again, "--allow-pickle"),
    ):
        command = [sys.executable, "-c", CONVERT, source, kind, *target]
        done = subprocess.run(command, check=True, capture_output=True, text=True)
        assert int(done.stdout.splitlines()[-1]) < bound
