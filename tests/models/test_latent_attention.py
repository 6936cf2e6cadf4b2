"""Multi-latent attention: its cache, and what is refused. Families compare its numbers with transformers."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import Tensor

from megapipe.checkpoint.storage import CheckpointError
from megapipe.config.bert import BertModelConfig
from megapipe.config.model import Reach
from megapipe.config.run import PretrainConfig
from megapipe.conversion.hugging_face import HuggingFaceSource
from megapipe.models.gpt_decoding import DecodingContext, cache_slots, decoding_layer
from tests.layers.bound import LLAMA, bind_model, make_context, run, small_model
from tests.models.hugging_face import case_of

LATENT, ROTATED, LENGTH = 12, 4, 12
LATENTS: dict[str, Any] = {**LLAMA, "num_kv_heads": None, "kv_latent_size": LATENT, "rotary_head_size": ROTATED}


@pytest.mark.parametrize(
    "fields",
    [
        {"query_latent_size": 20, "value_head_size": 6},
        {"value_head_size": 12, "attention_softcap": 0.7, "sliding_window": 5},
    ],
)
def test_decoding_from_cached_latents_gives_the_same_logits(fields: dict[str, Any]) -> None:
    model = small_model(**LATENTS, **fields)
    layers = bind_model(model)
    context = make_context(model)
    with torch.no_grad():
        expected = run(layers, replace(context, labels=None))
        slots = cache_slots([model.attention_reach], LENGTH, LENGTH - 6)
        decoding = [decoding_layer(layer.module, rows=2, capacity=LENGTH, slots=slots) for layer in layers]
        for first, last in ((0, 5), (5, 6), (6, LENGTH)):
            step = DecodingContext.of(
                slice(0, 2),
                context.tokens[:, first:last],
                torch.arange(first, last).expand(2, -1),
                torch.full((2,), last - first - 1),
                length=LENGTH,
                slots=slots,
            )
            hidden: tuple[Tensor, ...] = ()
            for layer in decoding:
                hidden = layer(*hidden, context=step)
            torch.testing.assert_close(hidden[0], expected[:, last - 1], rtol=1e-4, atol=1e-4)


def test_a_cache_has_latents_and_rotated_keys_alone() -> None:
    block: Any = decoding_layer(
        bind_model(small_model(**LATENTS))[1].module, rows=3, capacity=LENGTH, slots={Reach(None): LENGTH}
    )
    kept = [each for each in vars(block._attend).values() if isinstance(each, Tensor)]
    assert sum(each.nbytes for each in kept) == 3 * LENGTH * (LATENT + ROTATED) * 4


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"kv_latent_size": None}, "model.rotary_head_size is 4 but model.kv_latent_size is null"),
        ({"rotary_head_size": None}, "model.rotary_head_size is null with model.kv_latent_size 12; set it to an even"),
        ({"rotary_head_size": 3}, "model.rotary_head_size is 3 with"),
        ({"value_head_size": 13}, "model.value_head_size is 13; it must be at most"),
        (
            {"num_kv_heads": 2},
            "model.num_kv_heads is 2 with model.kv_latent_size 12; multi-latent attention needs",
        ),
        ({"positions": "none"}, "model.positions is 'none'"),
        ({"rotary_fraction": 0.5}, "model.rotary_fraction is 0.5"),
        ({"qk_norm": True}, "model.qk_norm is True"),
        ({"bias": "qkv"}, "model.bias is 'qkv'"),
    ],
)
def test_impossible_fields_are_refused(fields: dict[str, Any], message: str) -> None:
    (problem,) = small_model(**{**LATENTS, **fields}).problems()
    assert message in problem


def test_options_refuse_latents() -> None:
    model = small_model(**LATENTS)
    config = PretrainConfig()
    run_config = replace(config, model=model, training=replace(config.training, fp8="tensorwise", precision="bf16"))
    assert any("model.kv_latent_size 12: multi-latent attention has no fp8" in each for each in run_config.problems())
    bert = BertModelConfig(**{**LATENTS, "activation": "gelu", "normalization": "layer_norm"})
    assert any("only a GPT has multi-latent attention" in each for each in bert.problems())


def test_layers_that_predict_further_tokens_are_ignored(tmp_path: Path) -> None:
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
