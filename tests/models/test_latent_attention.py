"""Multi-latent attention: its cache, and what is refused. Families compare its numbers with transformers."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from megapipe.checkpoint.storage import CheckpointError
from megapipe.config.run import PretrainConfig
from megapipe.conversion.hugging_face import HuggingFaceSource
from tests.layers.bound import LLAMA, small_model
from tests.models.hugging_face import case_of

LATENT, ROTATED, LENGTH = 12, 4, 12
LATENTS: dict[str, Any] = {**LLAMA, "num_kv_heads": None, "kv_latent_size": LATENT, "rotary_head_size": ROTATED}


def test_options_refuse_latents() -> None:
    model = small_model(**LATENTS)
    config = PretrainConfig()
    run_config = replace(config, model=model, training=replace(config.training, fp8="tensorwise", precision="bf16"))
    assert any("model.kv_latent_size 12: multi-latent attention has no fp8" in each for each in run_config.problems())


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
