"""Weights of transformers' GPT-2, Llama, Mistral, Mixtral, Qwen2, Qwen3 and Ernie 4.5 as canonical tensors, and back.

Every conversion is a permutation of elements, so that it carries gradients and optimizer moments as well as weights.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from megapipe.config.errors import nearest
from megapipe.config.model import ModelConfig
from megapipe.spec.layers import model_layers
from megapipe.spec.parameters import ParameterSpec

Family = Literal["gpt2", "llama", "mistral", "mixtral", "qwen2", "qwen3", "ernie4_5_moe"]

Join = Callable[[Sequence[Tensor]], Tensor]
Part = Callable[[Tensor], Sequence[Tensor]]

_GPT2_OUTER = {
    "embedding.word.weight": "transformer.wte.weight",
    "embedding.position.weight": "transformer.wpe.weight",
    "head.norm.weight": "transformer.ln_f.weight",
    "head.norm.bias": "transformer.ln_f.bias",
    "head.output.weight": "lm_head.weight",
}
_GPT2_BLOCK = {
    "attention_norm": ("ln_1",),
    "attention.qkv": ("attn.c_attn",),
    "attention.output": ("attn.c_proj",),
    "mlp_norm": ("ln_2",),
    "mlp.up": ("mlp.c_fc",),
    "mlp.down": ("mlp.c_proj",),
}
_LLAMA_OUTER = {
    "embedding.word.weight": "model.embed_tokens.weight",
    "head.norm.weight": "model.norm.weight",
    "head.output.weight": "lm_head.weight",
}
_LLAMA_BLOCK = {
    "attention_norm": ("input_layernorm",),
    "attention.qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "attention.query_norm": ("self_attn.q_norm",),
    "attention.key_norm": ("self_attn.k_norm",),
    "attention.output": ("self_attn.o_proj",),
    "mlp_norm": ("post_attention_layernorm",),
    "mlp.up": ("mlp.gate_proj", "mlp.up_proj"),
    "mlp.down": ("mlp.down_proj",),
}

_EXPERTS: Mapping[str, tuple[str, Mapping[str, tuple[str, ...]]]] = {
    "mixtral": ("block_sparse_moe", {"mlp.up": ("w1", "w3"), "mlp.down": ("w2",)}),
    "ernie4_5_moe": ("mlp", {"mlp.up": ("gate_proj", "up_proj"), "mlp.down": ("down_proj",)}),
}
"""Family -> the module of router and experts, and the matrices of an expert. Files have experts one by one:
transformers stacks them when it reads them."""


class WeightMappingError(ValueError):
    """Weights that do not fit the model; the message names the tensor and what was expected."""


@dataclass(frozen=True)
class Correspondence:
    """One canonical tensor and the tensors that hold its elements in transformers.

    join: their tensors -> ours. part: ours -> theirs.
    """

    spec: ParameterSpec
    theirs: tuple[str, ...]
    join: Join
    part: Part

    def check(self, shapes: Sequence[Sequence[int]]) -> None:
        """Raise WeightMappingError unless `shapes`, one for each of `theirs`, make a tensor of the spec's shape."""
        parts = self.part(torch.empty(self.spec.shape, device="meta"))
        for name, shape, part in zip(self.theirs, shapes, parts, strict=True):
            if tuple(shape) != tuple(part.shape):
                raise WeightMappingError(
                    f"{name} has the shape {tuple(shape)}, but the model configuration needs {tuple(part.shape)} for "
                    f"{self.spec.name}"
                )

    def joined(self, parts: Sequence[Tensor]) -> Tensor:
        """Return the canonical tensor. Raises WeightMappingError for a part of another shape."""
        self.check([part.shape for part in parts])
        return self.join(parts)


def from_hugging_face(theirs: Mapping[str, Tensor], model: ModelConfig, family: Family) -> dict[str, Tensor]:
    """Canonical global tensors by name from a transformers state dict.

    Rows of a padded vocabulary are not expected. A tied `lm_head.weight` and buffers of old checkpoints are ignored.
    Raises WeightMappingError for a tensor that is missing, left over or of the wrong shape.
    """
    advice = "check bias, qk_norm, num_layers and tie_embeddings"
    return joined(theirs, correspondences(model, family), family, lambda name: is_redundant(name, model), advice)


def joined(
    theirs: Mapping[str, Tensor],
    pairs: Sequence[Correspondence],
    family: str,
    redundant: Callable[[str], bool],
    advice: str,
) -> dict[str, Tensor]:
    """Canonical tensors by name; see `from_hugging_face`. advice: which fields to check when a tensor is left over."""
    found = {}
    left = dict(theirs)
    for pair in pairs:
        missing = [name for name in pair.theirs if name not in left]
        if missing:
            raise WeightMappingError(
                f"{pair.spec.name} needs {missing[0]!r}, which the {family} weights lack{nearest(missing[0], left)}"
            )
        found[pair.spec.name] = pair.joined([left.pop(name) for name in pair.theirs])
    unused = [name for name in left if not redundant(name)]
    if unused:
        raise WeightMappingError(
            f"the {family} weights contain {', '.join(unused[:4])}, but the model configuration has no such "
            f"parameters; {advice}"
        )
    return found


def to_hugging_face(ours: Mapping[str, Tensor], model: ModelConfig, family: Family) -> dict[str, Tensor]:
    """A transformers state dict from canonical global tensors by name; tied embeddings appear once, as the embedding.

    Raises WeightMappingError for a missing tensor and for a parameter that the family has no place for.
    """
    return parted(ours, correspondences(model, family))


def parted(ours: Mapping[str, Tensor], pairs: Sequence[Correspondence]) -> dict[str, Tensor]:
    """Their tensors by name; see `to_hugging_face`."""
    found = {}
    for pair in pairs:
        if pair.spec.name not in ours:
            raise WeightMappingError(f"tensor {pair.spec.name!r} is missing{nearest(pair.spec.name, ours)}")
        parts = pair.part(ours[pair.spec.name])
        found.update({name: part.contiguous() for name, part in zip(pair.theirs, parts, strict=True)})
    return found


def correspondences(model: ModelConfig, family: Family) -> list[Correspondence]:
    """Where every parameter of `model` lives in transformers' weights of a family."""
    if family not in get_args(Family):
        known = get_args(Family)
        raise WeightMappingError(f"unknown family {family!r}{nearest(family, known)}; families are {', '.join(known)}")
    specs = {spec.name: spec for layer in model_layers(model) for spec in layer.parameters.values()}
    return [_correspondence(spec, model, family) for spec in specs.values()]


def _correspondence(spec: ParameterSpec, model: ModelConfig, family: Family) -> Correspondence:
    outer, block = (_GPT2_OUTER, _GPT2_BLOCK) if family == "gpt2" else (_LLAMA_OUTER, _LLAMA_BLOCK)
    if spec.name in outer:
        return Correspondence(spec, (outer[spec.name],), only, alone)
    _, _, inner = spec.name.partition("blocks.")
    index, _, path = inner.partition(".")
    module, _, leaf = path.rpartition(".")
    if family in _EXPERTS and path.startswith("mlp."):
        return _expert_correspondence(spec, f"model.layers.{index}", module, leaf, model, family)
    if module not in block or (module == "mlp.up" and (model.activation == "swiglu") == (family == "gpt2")):
        raise _no_place(spec, family)
    if model.num_experts is not None and path.startswith("mlp."):
        raise _no_place(spec, family)
    prefix = "transformer.h" if family == "gpt2" else "model.layers"
    theirs = tuple(f"{prefix}.{index}.{name}.{leaf}" for name in block[module])
    if module == "attention.qkv":
        join, part = query_key_value(model, fused=len(theirs) == 1, interleaved=family == "ernie4_5_moe")
    else:
        join, part = _stacked(len(theirs))
    if family == "gpt2" and leaf == "weight" and not module.endswith("norm"):
        return Correspondence(spec, theirs, lambda parts: join([parts[0].t()]), lambda ours: [part(ours)[0].t()])
    return Correspondence(spec, theirs, join, part)


def _expert_correspondence(
    spec: ParameterSpec, layer: str, module: str, leaf: str, model: ModelConfig, family: str
) -> Correspondence:
    """Router and experts. Theirs come one by one, gate and up apart."""
    folder, matrices = _EXPERTS[family]
    prefix = f"{layer}.{folder}"
    if leaf == "weight" and module == "mlp.router":
        return Correspondence(spec, (f"{prefix}.gate.weight",), only, alone)
    if leaf == "bias" and module == "mlp.router" and family == "ernie4_5_moe":
        name = f"{prefix}.moe_statics.e_score_correction_bias"
        return Correspondence(spec, (name,), lambda parts: parts[0][0], lambda ours: [ours[None]])
    if leaf != "weight" or model.num_experts is None or model.activation != "swiglu":
        raise _no_place(spec, family)
    names = matrices[module]
    theirs = tuple(f"{prefix}.experts.{expert}.{name}.weight" for expert in range(model.num_experts) for name in names)
    leading = spec.shape[: 1 if len(names) == 1 else 2]

    def join(parts: Sequence[Tensor]) -> Tensor:
        return torch.stack([*parts]).view(*leading, *parts[0].shape)

    return Correspondence(spec, theirs, join, lambda ours: ours.flatten(0, len(leading) - 1).unbind(0))


def _no_place(spec: ParameterSpec, family: str) -> WeightMappingError:
    return WeightMappingError(
        f"{family} weights have no tensor for {spec.name} of shape {spec.shape}; check positions, normalization, "
        "activation, qk_norm, num_experts and expert_balance_rate of the model"
    )


def query_key_value(model: ModelConfig, fused: bool, interleaved: bool = False) -> tuple[Join, Part]:
    """(kv groups, query heads per group + 2, head_dim, ...) from and to query, key and value, in one or three.

    interleaved: theirs rotates channels 2i and 2i + 1 of a head together, ours i and i + head_dim / 2.
    """
    groups, width = model.kv_heads, model.head_dim
    heads = model.num_heads // groups
    rows = [model.num_heads * width, groups * width, groups * width]

    def regrouped(pieces: Sequence[Tensor], *pairs: int) -> list[Tensor]:
        """Queries and keys with the two indices of a channel exchanged; values as they are."""
        *rotated, value = pieces
        return [*(each.unflatten(2, pairs).transpose(2, 3).flatten(2, 3) for each in rotated), value]

    def join(parts: Sequence[Tensor]) -> Tensor:
        pieces = parts[0].split(rows) if fused else parts
        shaped = [
            piece.reshape(groups, count, width, *piece.shape[1:])
            for piece, count in zip(pieces, (heads, 1, 1), strict=True)
        ]
        return torch.cat(regrouped(shaped, width // 2, 2) if interleaved else shaped, dim=1)

    def part(ours: Tensor) -> Sequence[Tensor]:
        shaped = ours.split([heads, 1, 1], dim=1)
        pieces = [piece.flatten(0, 2) for piece in (regrouped(shaped, 2, width // 2) if interleaved else shaped)]
        return [torch.cat(pieces)] if fused else pieces

    return join, part


def _stacked(count: int) -> tuple[Join, Part]:
    return (only, alone) if count == 1 else (lambda parts: torch.stack([*parts]), lambda ours: ours.unbind(0))


def only(parts: Sequence[Tensor]) -> Tensor:
    """Join a parameter that they store as one tensor, as it is."""
    return parts[0]


def alone(ours: Tensor) -> Sequence[Tensor]:
    """Split a parameter that they store as one tensor: nothing to do."""
    return [ours]


def is_redundant(name: str, model: ModelConfig) -> bool:
    """Whether a left-over tensor repeats another or holds no weight."""
    if name == "lm_head.weight":
        return model.tie_embeddings
    return name.endswith((".attn.bias", ".attn.masked_bias", "rotary_emb.inv_freq"))
