"""megatron-core's own GPTModel beside ours: it loads what is written here, and what it saves is read here."""

import importlib.util
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.conversion.foreign.weights import MODELS, assert_holds, drawn, opened, write
from tests.layers.bound import bind_model, make_context, run

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        importlib.util.find_spec("megatron") is None or importlib.util.find_spec("psutil") is None,
        reason="needs megatron-core, which has no wheel from Python 3.14 on, and psutil",
    ),
]
ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def exchanged(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which megatron-core has loaded and saved every shape."""
    folder = tmp_path_factory.mktemp("exchange")
    for shape, model in MODELS.items():
        contents, values = drawn(model)
        write("megatron", folder / f"{shape}-torch", contents, values)
        write("megatron-dist", folder / f"{shape}-dist", contents, values)
    torch.save(make_context(MODELS["gpt2"], batch=2, length=24).tokens, folder / "tokens.pt")
    done = subprocess.run(
        [sys.executable, "-m", "tests.conversion.foreign.megatron_models", str(folder), *MODELS],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return folder


@pytest.mark.parametrize("layout", ["torch", "dist"])
@pytest.mark.parametrize("shape", MODELS)
def test_megatron_computes_our_logits_from_what_is_written(shape: str, layout: str, exchanged: Path) -> None:
    model = MODELS[shape]
    _, values = drawn(model)
    layers = bind_model(model)
    ours = {tensor.name: value for tensor, value in values.items()}
    for layer in layers:
        for name, parameter in layer.parameters().items():
            parameter.copy_(ours[name])
    context = make_context(model, batch=2, length=24)
    with torch.no_grad():
        expected = run(layers, replace(context, labels=None))
    found = torch.load(exchanged / f"{shape}-logits.pt")[layout][..., : model.vocabulary_size]
    assert 0.5 < expected.std() < 50.0
    assert (found - expected).abs().max() <= 1e-5 * expected.abs().max()


@pytest.mark.parametrize("layout", ["torch", "dist"])
@pytest.mark.parametrize("shape", MODELS)
def test_what_megatron_saves_is_read_bit_for_bit(shape: str, layout: str, exchanged: Path) -> None:
    kind = {"torch": "megatron", "dist": "megatron-dist"}[layout]
    source = opened(kind, exchanged / f"{shape}-saved-{layout}")
    assert_holds(source, *drawn(MODELS[shape]))
    source.close()
