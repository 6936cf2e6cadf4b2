"""Multi-token prediction: equations of DeepSeek-V3 with transformers' blocks, what is ignored, and what is refused."""

import copy
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3RMSNorm

from megapipe.checkpoint.hugging_face import HuggingFaceFolder
from megapipe.checkpoint.storage import CheckpointError
from megapipe.checkpoint.tensor_file import TensorReader
from megapipe.config.memory import Part
from megapipe.config.model import ModelConfig
from megapipe.config.run import PretrainConfig
from megapipe.conversion.formats import WEIGHTS, Contents, StoredTensor, TargetOptions
from megapipe.conversion.hugging_face import HuggingFaceSource, HuggingFaceTarget
from megapipe.layers.context import MicrobatchContext
from megapipe.layout.validation import run_problems
from tests.layers.bound import (
    LLAMA,
    all_gradients,
    bind_model,
    bind_weights,
    check_halves,
    make_context,
    run,
    small_model,
)
from tests.models.hugging_face import CONFIGS, case_of, case_of_config, drawn

DEPTHS, WEIGHT, BLOCKS = 2, 0.7, 2


def deepseek() -> Any:
    """Return a DeepSeek-V3 in float64 whose folder has the layers of its published ones, which its own forward does
    not use."""
    _, fields = CONFIGS["deepseek_v3"]
    config = transformers.DeepseekV3Config(
        **{**fields, "num_hidden_layers": BLOCKS + DEPTHS, "attn_implementation": "eager"}
    )
    theirs = case_of_config(config).theirs
    hidden, epsilon = config.hidden_size, config.rms_norm_eps
    for layer in theirs.model.layers[BLOCKS:]:
        layer.enorm, layer.hnorm = (DeepseekV3RMSNorm(hidden, epsilon) for _ in range(2))
        layer.eh_proj = nn.Linear(2 * hidden, hidden, bias=False)
        layer.shared_head = nn.ModuleDict({"norm": DeepseekV3RMSNorm(hidden, epsilon)})
    theirs.config.num_hidden_layers = BLOCKS
    return drawn(theirs).double()


def rolled(tensor: Tensor) -> Tensor:
    return torch.cat([tensor[:, 1:], torch.zeros_like(tensor[:, :1])], dim=1)


def rolled_by_megatron(tensor: Tensor) -> Tensor:
    from megatron.core.transformer.multi_token_prediction import roll_tensor  # takes seconds to import

    return roll_tensor(tensor.clone())[0]


def their_losses(theirs: Any, context: MicrobatchContext, roll: Callable[[Tensor], Tensor]) -> list[Tensor]:
    """Return the loss sum of the next token, and of each further one, by equations 21 to 25 of arXiv 2412.19437."""
    assert context.tokens is not None
    assert context.labels is not None
    assert context.loss_mask is not None
    tokens, labels, mask = context.tokens, context.labels, context.loss_mask.double()
    hidden = theirs.model(tokens, use_cache=False).last_hidden_state
    count, length = tokens.shape
    hides = torch.full((length, length), -torch.inf, dtype=hidden.dtype).triu(1).expand(count, 1, -1, -1)
    angles = theirs.model.rotary_emb(hidden, torch.arange(length).expand(count, -1))

    def loss() -> Tensor:
        each = functional.cross_entropy(theirs.lm_head(hidden).transpose(1, 2), labels, reduction="none")
        return (each * weights).sum()

    weights = mask
    losses = [loss()]
    for layer in theirs.model.layers[BLOCKS:]:
        tokens, labels, mask = (roll(each) for each in (tokens, labels, mask))
        weights = weights * mask
        joined = torch.cat([layer.enorm(theirs.model.embed_tokens(tokens)), layer.hnorm(hidden)], dim=-1)
        output = layer(layer.eh_proj(joined), attention_mask=hides, position_embeddings=angles)
        hidden = layer.shared_head["norm"](output)
        losses.append(loss())
    return losses


def read(folder: Path, theirs: Any) -> tuple[ModelConfig, dict[str, Tensor]]:
    """Return model and weights from the folder that transformers writes."""
    theirs.save_pretrained(folder)
    opened = HuggingFaceFolder(folder, TensorReader)
    model = replace(HuggingFaceSource(folder).contents.model, mtp_layers=DEPTHS, mtp_loss_weight=WEIGHT)
    opened.fit(model)
    return model, {name: opened.parameter(name) for name in opened.pairs}


@pytest.mark.parametrize("roll", [rolled, pytest.param(rolled_by_megatron, marks=pytest.mark.exhaustive)])
def test_losses_and_gradients_are_those_of_deepseek(tmp_path: Path, roll: Callable[[Tensor], Tensor]) -> None:
    theirs = deepseek()
    model, weights = read(tmp_path / "weights", theirs)
    ours = bind_weights(model, weights, dtype=torch.float64)
    context = make_context(model)
    actual = run(ours, context)
    actual.sum().backward()
    first, *further = their_losses(theirs, context, roll)
    expected = torch.stack([first, WEIGHT / DEPTHS * torch.stack(further).sum()])
    torch.testing.assert_close(actual, expected, rtol=1e-7, atol=0)
    expected.sum().backward()
    graded = copy.deepcopy(theirs)
    for name, parameter in theirs.named_parameters():
        graded.get_parameter(name).data = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
    _, gradients = read(tmp_path / "gradients", graded)
    summed = all_gradients(ours)
    # transformers computes angles, norms and the router's sigmoid in fp32 in any dtype.
    for name in gradients.keys() - {name for name in gradients if name.endswith("router.bias")}:
        assert gradients[name].norm() > 0, name
        assert (summed[name] - gradients[name]).norm() <= 1e-5 * gradients[name].norm(), name


@pytest.mark.parametrize("parts", [(), ("mlp", "norms"), ("block",)], ids=str)
def test_backward_halves_have_whole_gradients(parts: tuple[Part, ...]) -> None:
    model = small_model(**LLAMA, mtp_layers=2, logit_scale=0.5)
    *others, head = bind_model(model)
    hidden = run(others, make_context(model)).detach()
    check_halves([head], make_context(model), [hidden], recompute=parts)


class Memory:
    """A source of drawn weights."""

    def __init__(self, model: ModelConfig) -> None:
        self.values = {name: each for layer in bind_model(model) for name, each in layer.parameters().items()}
        stored = [StoredTensor(name, WEIGHTS, tuple(each.shape), "F32") for name, each in self.values.items()]
        self.contents = Contents(model, tuple(stored))

    def export(self, folder: Path) -> dict[str, Tensor]:
        target = HuggingFaceTarget(folder, self.contents, TargetOptions())
        for tensor in self.contents.tensors:
            target.add(tensor, self.values[tensor.name])
        notes = target.finish()
        assert any("predict further tokens" in note for note in notes) == (set(self.values) != set(target._pairs))
        return safetensors.torch.load_file(folder / "model.safetensors")


def test_exports_leave_further_tokens_out_or_have_deepseeks_names(tmp_path: Path) -> None:
    model = small_model(**LLAMA, mtp_layers=1)
    with_further, without = Memory(model), Memory(replace(model, mtp_layers=0))
    exports = with_further.export(tmp_path / "with"), without.export(tmp_path / "without")
    assert exports[0].keys() == exports[1].keys()
    assert all(torch.equal(each, exports[1][name]) for name, each in exports[0].items())
    with pytest.raises(CheckpointError, match=r"model\.mtp_layers is 1, but weights of llama have no layers"):
        HuggingFaceFolder(tmp_path / "with", TensorReader).fit(model)
    read_model, _ = read(tmp_path / "theirs", deepseek())
    memory = Memory(read_model)
    memory.export(tmp_path / "ours")
    assert json.loads((tmp_path / "ours" / "config.json").read_text())["num_nextn_predict_layers"] == DEPTHS
    again = HuggingFaceFolder(tmp_path / "ours", TensorReader)
    again.fit(read_model)
    assert all(torch.equal(again.parameter(name), each) for name, each in memory.values.items())


def test_only_last_layers_may_predict_further_tokens(tmp_path: Path) -> None:
    case_of("deepseek_v3").theirs.save_pretrained(tmp_path)
    tensors = safetensors.torch.load_file(tmp_path / "model.safetensors")
    tensors["model.layers.2.eh_proj.weight"] = torch.zeros(3, 4)
    safetensors.torch.save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "num_nextn_predict_layers": 1}))
    assert HuggingFaceSource(tmp_path).contents.model.num_layers == 2
    tensors["model.layers.1.eh_proj.weight"] = torch.zeros(3, 4)
    safetensors.torch.save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError, match=r"model\.layers\.1\.eh_proj\.weight' is unknown"):
        HuggingFaceSource(tmp_path)


@pytest.mark.parametrize(
    ("changes", "ranks", "message"),
    [
        ({"parallel": {"context": 2}}, 2, "which needs whole samples, but parallel.context is 2"),
        (
            {"parallel": {"pipeline": 2, "vocabulary": "pipeline"}},
            2,
            "model.mtp_layers is 1, whose blocks use the output layer on its last rank; set model.mtp_layers 0",
        ),
        ({"schedule": {"name": "seq1f1b", "slices": 2}}, 1, "in 2 slices, but model.mtp_layers is 1; set it to 0"),
        (
            {"schedule": {"name": "pipedream"}, "optimizer": {"clip_norm": None}, "parallel": {"pipeline": 2}},
            2,
            "model.mtp_layers is 1, but the tied weight is on the first and the last rank",
        ),
    ],
)
def test_impossible_layouts_are_refused(changes: dict[str, dict[str, Any]], ranks: int, message: str) -> None:
    config = replace(PretrainConfig(), model=small_model(**LLAMA, mtp_layers=1))
    config.data.sequence_length = 16
    for group, fields in changes.items():
        setattr(config, group, replace(getattr(config, group), **fields))
    assert any(message in each for each in run_problems(config, ranks)), run_problems(config, ranks)
