"""Random combinations of the keys of transformers' configuration classes: refused by one line, or the same logits.

tests/conversion/test_hugging_face_keys.py changes one key at a time.
"""

import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from hypothesis import assume, event, given, settings
from hypothesis import strategies as st

from megapipe.checkpoint import CheckpointError
from megapipe.config.model import ModelConfig
from megapipe.conversion.hugging_face import HuggingFaceSource
from tests.layers.bound import bind_model, load, make_context, run
from tests.models.hugging_face import CONFIGS, case_of_config, tame

ROPE = {
    "default": {},
    "linear": {"factor": 2.0},
    "dynamic": {"factor": 2.0},
    "yarn": {"factor": 2.0, "original_max_position_embeddings": 32},
    "llama3": {
        "factor": 4.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    },
}


@st.composite
def rope_parameters(draw: st.DrawFn) -> dict[str, Any]:
    """Draw the options of rotary positions."""
    kind = draw(st.sampled_from(sorted(ROPE)))
    partial = draw(st.sampled_from([None, 0.25, 0.5, 1.0]))
    others = {} if partial is None else {"partial_rotary_factor": partial}
    return {"rope_type": kind, "rope_theta": draw(st.sampled_from([50.0, 10000.0])), **ROPE[kind], **others}


ACTIVATIONS = st.sampled_from(["silu", "gelu", "gelu_new", "gelu_pytorch_tanh", "relu", "relu2"])
KEYS: dict[str, st.SearchStrategy[Any]] = {
    **dict.fromkeys(("num_hidden_layers", "n_layer"), st.integers(1, 4)),
    **dict.fromkeys(("hidden_size", "n_embd"), st.sampled_from([32, 48, 64])),
    **dict.fromkeys(("num_attention_heads", "n_head"), st.sampled_from([1, 2, 4])),
    **dict.fromkeys(("intermediate_size", "n_inner", "moe_intermediate_size"), st.integers(8, 100)),
    "num_key_value_heads": st.sampled_from([1, 2, 4]),
    "head_dim": st.sampled_from([4, 8, 16, 32]),
    **dict.fromkeys(("hidden_act", "activation_function", "hidden_activation"), ACTIVATIONS),
    **dict.fromkeys(("rms_norm_eps", "layer_norm_eps", "norm_epsilon", "layer_norm_epsilon"), st.floats(1e-8, 0.1)),
    "tie_word_embeddings": st.booleans(),
    **dict.fromkeys(("attention_bias", "mlp_bias", "use_bias", "qkv_bias"), st.booleans()),
    "rope_parameters": rope_parameters(),
    "sliding_window": st.sampled_from([None, 1, 5, 64]),
    "use_sliding_window": st.booleans(),
    "max_window_layers": st.integers(0, 4),
    "no_rope_layer_interval": st.integers(1, 4),
    **dict.fromkeys(("attn_logit_softcapping", "final_logit_softcapping"), st.sampled_from([None, 2.0, 30.0])),
    "query_pre_attn_scalar": st.integers(1, 300),
    "use_parallel_residual": st.booleans(),
    **dict.fromkeys(("num_experts", "num_local_experts", "moe_num_experts"), st.integers(2, 5)),
    **dict.fromkeys(("num_experts_per_tok", "moe_k"), st.integers(1, 4)),
    "shared_expert_intermediate_size": st.integers(8, 100),
    "moe_num_shared_experts": st.integers(0, 2),
    "norm_topk_prob": st.booleans(),
    "decoder_sparse_step": st.integers(1, 3),
    "mlp_only_layers": st.lists(st.integers(0, 3), max_size=2, unique=True),
    "scale_attn_by_inverse_layer_idx": st.booleans(),
    "scale_attn_weights": st.booleans(),
}
"""Key -> its values, some of which no model of a family can have."""


@st.composite
def configurations(draw: st.DrawFn) -> Any:
    """Draw a case of CONFIGS with up to five of its keys changed; skip what transformers itself refuses."""
    name = draw(st.sampled_from(sorted(CONFIGS)))
    prefix, fields = CONFIGS[name]
    kind = getattr(transformers, f"{prefix}Config")
    known = sorted(KEYS.keys() & kind(**fields).to_dict().keys())
    changed = draw(st.lists(st.sampled_from(known), max_size=5, unique=True))
    values = {key: draw(KEYS[key]) for key in changed}
    try:
        return kind(**{**fields, **values}, attn_implementation="eager")
    except Exception:
        assume(False)


def opened(folder: Path) -> HuggingFaceSource | None:
    """Open a folder; return None if it is refused by one line."""
    message = ""
    try:
        return HuggingFaceSource(folder)
    except CheckpointError as refused:
        message = str(refused)
    assert "\n" not in message
    return None


@pytest.mark.slow
@settings(max_examples=200)
@given(config=configurations())
def test_a_random_configuration_is_refused_or_has_the_logits(config: Any) -> None:
    try:
        theirs = case_of_config(config).theirs
        tame(theirs)
        context = make_context(ModelConfig(vocabulary_size=config.vocab_size), batch=2, length=40)
        with torch.no_grad():
            expected = theirs(context.tokens).logits
    except Exception:
        assume(False)
    assume(bool(expected.isfinite().all()))
    with tempfile.TemporaryDirectory() as folder:
        theirs.save_pretrained(folder)
        source = opened(Path(folder))
        if source is None:
            event("refused")
            return
        model, weights = source.contents.model, {each.name: source.read(each) for each in source.contents.tensors}
    event(f"equal: {config.model_type}")
    layers = bind_model(model)
    load(layers, weights)
    with torch.no_grad():
        logits = run(layers, replace(context, labels=None))
    assert (logits - expected).abs().max() <= 2e-5 * expected.abs().max()
