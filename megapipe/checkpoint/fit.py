"""Checks that a checkpoint fits a run: the same parameters and, for a resume, the same model, samples and data.

`RULES` is the table of the fields that may change on a resume; docs/checkpoints.md prints it, and a test compares the
two.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from megapipe.checkpoint.manifest import Manifest
from megapipe.checkpoint.storage import CheckpointError
from megapipe.config.model import ACTIVATIONS, ModelConfig
from megapipe.config.run import PretrainConfig
from megapipe.data.identity import DataIdentity
from megapipe.spec.parameters import ParameterSpec

_SHOWN = 3
"""Largest number of problems in one message."""


class Rule(Enum):
    """The effect on a resume when a field of the configuration differs from the checkpoint."""

    REFUSED = "refused"
    ASKED = "refused unless accepted"
    """The field decides which samples a step sees; checkpoint.accept_other_data accepts the change."""
    REPORTED = "allowed and reported"
    """The field changes later results, which may be intended."""
    ALLOWED = "allowed"


def _names(text: str) -> tuple[str, ...]:
    return tuple(text.split())


RULES: Mapping[Rule, Mapping[str, tuple[str, ...]]] = {
    Rule.REFUSED: {
        "model": _names(
            "vocabulary_size num_layers hidden_size num_heads num_kv_heads head_size "
            "ffn_hidden_size num_experts experts_per_token normalize_expert_shares "
            "max_positions layer_kinds layer_pattern normalization norm_epsilon norm_position "
            "activation positions rope_theta rope_scaling.kind rope_scaling.factor "
            "rope_scaling.low_frequency_factor rope_scaling.high_frequency_factor "
            "rope_scaling.original_length rope_scaling.beta_fast rope_scaling.beta_slow "
            "rope_scaling.truncate rope_scaling.attention_factor rope_scaling.mscale "
            "rope_scaling.mscale_all_dim rope_scaling.short_factor rope_scaling.long_factor "
            "rotary_fraction attention_scale attention_softcap qk_norm_over parallel_residual "
            "embedding_scale residual_scale logit_scale logit_softcap attention_sinks "
            "embedding_norm attention_chunk_size bias qk_norm sliding_window tie_embeddings "
            "sentence_head expert_bias first_position token_types attention_norm "
            "transform_bias transform_activation embedding_size shared_blocks swiglu_alpha "
            "swiglu_limit router_scores router_scale router_bias router_groups "
            "router_groups_chosen shared_expert_size shared_expert_gate query_latent_size "
            "kv_latent_size rotary_head_size value_head_size mtp_layers"
        ),
        "optimizer": ("name",),
    },
    Rule.ASKED: {
        "data": _names(
            "prefix blend tokenizer split sequence_length mask_end_of_document "
            "isolate_documents pack order fim_rate fim_suffix_first fim_tokens pairs "
            "short_sequence_probability mask_probability whole_words max_ngram ngram_lengths"
        ),
        "batch": _names("global_size ramp_start ramp_samples"),
        "training": ("seed",),
    },
    Rule.REPORTED: {
        "model": _names(
            "embedding_dropout attention_dropout hidden_dropout expert_balance_rate attention mtp_loss_weight"
        ),
        "parallel": ("layers",),
        "zero": ("reduce_dtype",),
        "schedule": _names("name file"),
        "optimizer": _names(
            "learning_rate betas epsilon moment_dtype momentum weight_decay clip_norm "
            "muon.momentum muon.nesterov muon.newton_schulz_steps muon.scale "
            "muon.elementwise_rate decay warmup_steps decay_steps floor"
        ),
        "loss_scale": _names("kind initial window hysteresis minimum patience"),
        "training": _names("steps precision master_weights fp8 fp8_first_kept fp8_last_kept compile"),
        "kernels": ("backends",),
        "reliability": _names("skip_non_finite skip_samples"),
    },
}
"""Fields by rule and by group of the configuration. Fields that are not listed are allowed."""

BY_CONTENT = ("data.prefix", "data.blend", "data.tokenizer")
"""Fields with paths, which are compared by the content of their files (`DataIdentity`). The weights of a blend are
also compared."""

_RULE_OF = {
    f"{group}.{name}": rule for rule, groups in RULES.items() for group, names in groups.items() for name in names
}


def rule_of(field: str, config: PretrainConfig) -> Rule:
    """Return the rule for a field by its dotted name. config: the run's configuration; data.order megatron has an
    additional rule."""
    if field == "training.steps" and config.data.order == "megatron":
        return Rule.ASKED  # that order is built for exactly this number of steps
    return _RULE_OF.get(field, Rule.ALLOWED)


@dataclass(frozen=True)
class RunFit:
    """Differences between a run and the run that saved a checkpoint. Each entry contains a field or shard, and both
    values.

    reported: allowed changes that affect results. other_data: accepted changes of samples or data. unknown_data: the
    checkpoint does not contain the identity of its data.
    """

    reported: tuple[str, ...]
    other_data: tuple[str, ...]
    unknown_data: bool


def check_run(path: Path, manifest: Manifest, config: PretrainConfig, data: DataIdentity) -> RunFit:
    """Compare a run with the run that saved the checkpoint at `path`, by `RULES` and by the identity of the data.

    Groups that the checkpoint lacks are not compared. If it lacks a field, the field's default is compared.

    Raises:
        CheckpointError: the model or the optimizer differs, or the samples differ and
            checkpoint.accept_other_data is false.
    """
    differing: dict[Rule, list[str]] = {rule: [] for rule in Rule}
    for name, here, was in _differences(config, manifest.run.config):
        words = "the list of data.blend's weights" if name == "data.blend" else name
        differing[rule_of(name, config)].append(f"{words} is {here!r} and was {was!r}")
    if manifest.run.data is not None:
        differing[Rule.ASKED] += data.differences(manifest.run.data)
    if differing[Rule.REFUSED]:
        raise CheckpointError(
            f"{path} was saved with another model or optimizer: {_listed(differing[Rule.REFUSED])}; set that back to "
            "resume, or start another run in another training.directory"
        )
    if differing[Rule.ASKED] and not config.checkpoint.accept_other_data:
        raise CheckpointError(
            f"{path} was trained on other samples: {_listed(differing[Rule.ASKED])}; set that back to continue the "
            "run as it was, set checkpoint.accept_other_data true to continue on the samples given here, or start "
            f"another run from its weights with init_from {path} in another training.directory"
        )
    return RunFit(tuple(differing[Rule.REPORTED]), tuple(differing[Rule.ASKED]), manifest.run.data is None)


def _differences(config: PretrainConfig, stored: Mapping[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    """Yield every field whose value differs: (dotted name, value here, stored value)."""
    default = type(config)()
    for group in fields(config):
        here, was = getattr(config, group.name), stored.get(group.name)
        if not (is_dataclass(here) and isinstance(was, Mapping)):
            continue
        same = _same_sizes(here, was) if isinstance(here, ModelConfig) else ()
        for name, value, stored_value in _group_differences(group.name, here, was, getattr(default, group.name)):
            if name not in same:
                yield name, value, stored_value


def _group_differences(
    prefix: str, here: Any, stored: Mapping[str, Any], default: Any
) -> Iterator[tuple[str, Any, Any]]:
    """Yield the differences of one group. A field that is not stored has the value in `default`."""
    for key, value in vars(here).items():
        name, initial = f"{prefix}.{key}", getattr(default, key)
        was = stored.get(key, initial)
        if is_dataclass(value):
            yield from _group_differences(name, value, was if isinstance(was, Mapping) else {}, initial)
            continue
        if name == "data.blend":
            value, was = (list(each.values()) if isinstance(each, Mapping) else each for each in (value, was))
        elif name in BY_CONTENT:
            continue
        if _plain(value) != _plain(was):
            yield name, value, was


def _same_sizes(here: ModelConfig, stored: Mapping[str, Any]) -> list[str]:
    """Return the sizes that are equal when each null is replaced by the number that it means."""
    was = type(here)(**{name: stored[name] for name in vars(here) if name in stored})
    sizes = {
        "model.num_kv_heads": (here.kv_heads, was.kv_heads),
        "model.head_size": (here.own_head_size, was.own_head_size),
    }
    # A newer version may have saved an unknown activation.
    if {here.activation, was.activation} <= ACTIVATIONS.keys():
        sizes["model.ffn_hidden_size"] = (here.ffn_size, was.ffn_size)
    return [name for name, (one, other) in sizes.items() if one == other]


def _plain(value: Any) -> Any:
    """Return a value as JSON would return it: a tuple becomes a list."""
    return list(value) if isinstance(value, tuple) else value


def check_model(manifest: Manifest, specs: Iterable[ParameterSpec], model: Mapping[str, Any]) -> None:
    """Raise CheckpointError unless the checkpoint contains exactly the parameters `specs`, in their shapes.

    specs: all parameters of the model. model: its configuration as plain values; the message names differing fields.
    """
    stored = manifest.shapes()
    expected = {spec.name: spec.shape for spec in specs}
    problems = [f"{name} is missing" for name in expected if name not in stored]
    problems += [
        f"{name} has shape {stored[name]} instead of {shape}"
        for name, shape in expected.items()
        if name in stored and stored[name] != shape
    ]
    problems += [f"{name} is not a parameter of this model" for name in stored if name not in expected]
    if not problems:
        return
    differing = model_differences(manifest, model)
    reason = "; ".join(differing) or "the configurations agree, so different code wrote the checkpoint"
    raise CheckpointError(f"its parameters differ from those of this model: {_listed(problems, ', ')}. {reason}")


def model_differences(manifest: Manifest, model: Mapping[str, Any]) -> list[str]:
    """Return the fields of the model's configuration that differ from the checkpoint's, one message each."""
    stored: Mapping[str, Any] = manifest.run.config.get("model", {})
    return [
        f"model.{name} is {value!r} here and {stored[name]!r} in the checkpoint"
        for name, value in model.items()
        if name in stored and stored[name] != _plain(value)
    ]


def _listed(problems: list[str], separator: str = "; ") -> str:
    more = f" and {len(problems) - _SHOWN} more" if len(problems) > _SHOWN else ""
    return separator.join(problems[:_SHOWN]) + more
