"""Compare with megatron-core's GPTModel and BertModel: each side loads what the other one saves."""

import importlib.util
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from megapipe.config.model import ModelConfig
from tests.conversion.foreign.weights import MODELS, assert_holds, drawn, opened, write
from tests.layers.bound import bind_model, load, make_context, run
from tests.models import test_bert_hugging_face as berts

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        importlib.util.find_spec("megatron") is None or importlib.util.find_spec("psutil") is None,
        reason="needs megatron-core, which has no wheel from Python 3.14 on, and psutil",
    ),
]
ROOT = Path(__file__).parents[3]


OFTEN = ("qwen_moe", "deepseek", "gpt_oss")
SHARDED = ("qwen_moe", "deepseek", "sinks", "bert")
"""Also laid out over tensor 2 x pipeline 2: tied embeddings, kinds of MLP, biases, grouped heads, experts, heads, and
blocks that predict further tokens."""
SHAPES = [
    shape if shape in OFTEN else pytest.param(shape, marks=pytest.mark.exhaustive)
    for shape in [*MODELS, *(f"{shape}-sharded" for shape in SHARDED)]
]


@pytest.fixture(scope="module")
def exchanged(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which megatron-core has loaded and saved every shape that the chosen tests read."""
    folder = tmp_path_factory.mktemp("exchange")
    chosen = " ".join(item.name for item in request.session.items if item.path == request.path)
    sharded = [shape for shape in SHARDED if f"{shape}-sharded" in chosen]
    shapes = [shape for shape in MODELS if f"[{shape}-" in chosen]
    for shape in shapes:
        contents, values = drawn(MODELS[shape])
        write("megatron", folder / f"{shape}-torch", contents, values)
        write("megatron-dist", folder / f"{shape}-dist", contents, values)
    for shape in sharded:
        write("megatron", folder / f"{shape}-sharded", *drawn(MODELS[shape]), tensor=2, pipeline=2)
    torch.save(make_context(MODELS["gpt2"], batch=2, length=24).tokens, folder / "tokens.pt")
    context = berts.make_context()
    visible = (torch.arange(berts.LENGTH) < context.lengths[:, None]).long()
    torch.save((context.tokens, visible, context.token_types), folder / "samples.pt")
    done = subprocess.run(
        [sys.executable, "-m", "tests.conversion.foreign.megatron_models", str(folder), *shapes],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return folder


def our_logits(model: ModelConfig, values: dict[str, torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """Logits of the next token, and of each further one, for which samples end with token 0 as in Megatron."""
    layers = bind_model(model)
    load(layers, values)
    context = replace(make_context(model, batch=2, length=24), labels=None)
    hidden, head, tokens = run(layers[:-1], context), layers[-1].module, context.tokens
    logits = [head(hidden, context=context)[0]]
    hidden = head.norm(hidden, None)
    for depth in head.mtp:
        tokens = torch.nn.functional.pad(tokens[:, 1:], (0, 1))
        hidden = depth(hidden, tokens, context)
        logits.append(depth.output.logits(hidden, None))
    return tuple(logits)


@pytest.mark.parametrize("layout", ["torch", "dist"])
@pytest.mark.parametrize("name", SHAPES)
def test_megatron_computes_our_logits_from_what_is_written(name: str, layout: str, exchanged: Path) -> None:
    model = MODELS[name.removesuffix("-sharded")]
    ours = {tensor.name: value for tensor, value in drawn(model)[1].items()}
    found = torch.load(exchanged / f"{name}-logits.pt")[layout]
    with torch.no_grad():
        if model.kind == "bert":
            context = berts.make_context()
            all_expected = berts.run(berts.bound(model, ours, torch.float32), replace(context, labels=None))
            real = torch.arange(berts.LENGTH) < context.lengths[:, None]
        else:
            all_expected, real = our_logits(model, ours), slice(None)
    assert len(found) == len(all_expected)
    for logits, expected, rows in zip(found, all_expected, (real, slice(None)), strict=False):
        assert 0.1 < expected[rows].std() < 50.0
        assert (logits[..., : expected.shape[-1]] - expected)[rows].abs().max() <= 1e-5 * expected[rows].abs().max()


@pytest.mark.parametrize("layout", ["torch", "dist"])
@pytest.mark.parametrize("shape", SHAPES[: len(MODELS)])
def test_what_megatron_saves_is_read_bit_for_bit(shape: str, layout: str, exchanged: Path) -> None:
    kind = {"torch": "megatron", "dist": "megatron-dist"}[layout]
    source = opened(kind, exchanged / f"{shape}-saved-{layout}")
    assert_holds(source, *drawn(MODELS[shape]))
    source.close()


@pytest.mark.exhaustive
@pytest.mark.parametrize("layout", ["sharded"])
@pytest.mark.parametrize("shape", SHARDED)
def test_megatrons_four_rank_checkpoints_are_read_bit_for_bit(shape: str, layout: str, exchanged: Path) -> None:
    source = opened("megatron-dist", exchanged / f"{shape}-{layout}-saved-dist")
    assert_holds(source, *drawn(MODELS[shape]))
    source.close()
