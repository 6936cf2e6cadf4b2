"""Model families of Hugging Face transformers as data: keys of config.json and names of tensors, both ways.

Each file of `megapipe/spec/families` registers one family; all of them are imported when a family is first looked up.
An installed package lists its families as entry points of the group ``megapipe.families``: the entry point has the
model_type of the family, and names the module that registers it.
A key of config.json that a family does not list may change the model's results, so a configuration with it is refused.
The lists contain the keys that transformers 4 and 5 write; a test changes every key that transformers writes and
compares logits.
"""

import json
import pkgutil
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module
from itertools import cycle, islice
from typing import Any, Literal, NamedTuple

from megapipe.config import nearest
from megapipe.config.bert import BertModelConfig
from megapipe.config.field_types import outside, type_hints
from megapipe.config.files import DECODING_ERRORS
from megapipe.config.model import ModelConfig
from megapipe.spec.layers import model_layers
from megapipe.spec.parameters import LayerSpec, ParameterSpec

GROUP = "megapipe.families"
BUILT_IN = "megapipe.spec.families"
Step = Literal[
    "transposed", "query_key_value", "rotary_pairs", "rotary_last", "stacked", "row", "input_first", "interleaved"
]


class FamilyError(ValueError):
    """A model that a family cannot express, or a configuration that we cannot express; the message is one line."""


class Tensors(NamedTuple):
    """Tensors of a family that hold one of our parameters.

    names: without `.weight` and `.bias`. `{layer}` is the number of the block; with `{expert}` the names are repeated
    for every expert. steps: how our tensor is made from theirs, in order; after that, leading axes are split as in our
    shape.

    - transposed: matrices have their input on axis 0.
    - query_key_value: the rows of query, key and value are in three tensors, or one after the other in one tensor; our
      tensor groups them by key and value head.
    - rotary_pairs: in the result of the previous step, channels 2i and 2i + 1 of queries and keys rotate together,
      instead of i and i + head_dim / 2.
    - rotary_last: rotated channels are the last ones of each head, or after the latent of keys and values, and
      channels 2i and 2i + 1 of them rotate together; ours are the first ones of each head, and i and i + half do.
    - stacked: several tensors are stacked along a new leading axis.
    - row: a vector is stored as a matrix with one row.
    - input_first: matrices of all experts, in one tensor, have their input on the axis before the last one.
    - interleaved: in a tensor of all experts, each row of the gate is followed by the same row of `up`.
    """

    names: tuple[str, ...]
    steps: tuple[Step, ...] = ()

    def then(self, step: Step) -> "Tensors":
        """Return the same tensors with one more step."""
        return self._replace(steps=(*self.steps, step))


class ParameterPlace(NamedTuple):
    """Place of a parameter in a family's files: the full names of its tensors, and the steps of `Tensors`. model:
    configuration of its layer."""

    spec: ParameterSpec
    model: ModelConfig
    names: tuple[str, ...]
    steps: tuple[Step, ...]


def keys(names: str) -> frozenset[str]:
    """Return the words of a text."""
    return frozenset(names.split())


_WITHOUT_EFFECT = keys(
    # Origin of the file, and transformers' representation of the model.
    "transformers_version architectures model_type auto_map _name_or_path dtype torch_dtype "
    "torchscript use_bfloat16 _commit_hash attn_implementation _attn_implementation "
    "_attn_implementation_autoset _flash_attn_2_enabled experts_implementation "
    "_experts_implementation "
    # Results of a forward pass other than logits, and how they are computed.
    "output_hidden_states output_attentions return_dict use_cache chunk_size_feed_forward "
    "gradient_checkpointing tie_last_hidden_states tf_legacy_loss "
    # Heads for other tasks, and their labels.
    "id2label label2id num_labels problem_type finetuning_task task_specific_params classifier_dropout "
    # Training only: dropout, initial weights.
    "initializer_range "
    # Tokens and generation, which the tokenizer and generation_config.json define.
    "tokenizer_class prefix bos_token_id eos_token_id pad_token_id sep_token_id "
    "decoder_start_token_id max_length min_length do_sample early_stopping num_beams "
    "num_beam_groups diversity_penalty temperature top_k top_p typical_p repetition_penalty "
    "length_penalty no_repeat_ngram_size encoder_no_repeat_ngram_size bad_words_ids "
    "num_return_sequences output_scores return_dict_in_generate forced_bos_token_id "
    "forced_eos_token_id remove_invalid_values exponential_decay_length_penalty "
    "suppress_tokens begin_suppress_tokens cross_attention_hidden_size tie_encoder_decoder "
    # Written by tools for fine-tuning.
    "unsloth_fixed unsloth_version neftune_noise_alpha"
)
"""Keys that do not affect logits, in every family."""

_ALWAYS = {"is_encoder_decoder": (False,), "add_cross_attention": (False,), "pruned_heads": ({},)}
"""Permitted values of each key, in every family."""
_QUANTIZED = {
    "mxfp4": "Mxfp4Config",
    "fp8": "FineGrainedFP8Config",
    "compressed-tensors": "CompressedTensorsConfig",
}
"""Number format of weights, as quantization_config names it -> transformers' class that can convert such weights to
other formats."""
_OF_A_RUN = keys(
    "max_positions embedding_dropout attention_dropout hidden_dropout init_std "
    "scale_residual_init attention family mtp_layers mtp_loss_weight"
)
"""Fields that do not affect logits, so that any value fits any family."""
_SIZES = keys(
    "vocabulary_size num_layers hidden_size num_heads num_kv_heads head_size "
    "ffn_hidden_size norm_epsilon activation tie_embeddings"
)
"""Fields that every family sets."""
_ORIGINAL = {"original_max_position_embeddings": "original_length"}
ROPE_SCALING: Mapping[str, Mapping[str, str]] = {
    "none": {},
    "linear": {"factor": "factor"},
    "dynamic": {"factor": "factor"},
    "llama3": {
        "factor": "factor",
        "low_freq_factor": "low_frequency_factor",
        "high_freq_factor": "high_frequency_factor",
        **_ORIGINAL,
    },
    "yarn": {
        **{name: name for name in ("factor", "attention_factor", "beta_fast", "beta_slow", "truncate")},
        **{name: name for name in ("mscale", "mscale_all_dim")},
        **_ORIGINAL,
    },
    "longrope": {
        **{name: name for name in ("factor", "attention_factor", "short_factor", "long_factor")},
        **_ORIGINAL,
    },
}
"""Kind of RoPE scaling -> key of transformers' rotary parameters -> field of RopeScaling."""
_TIED = "tie_word_embeddings"
OMITTED = object()
"""Value of a key that is not written."""


@dataclass(frozen=True, kw_only=True)
class Family:
    """One model_type of transformers. Creating it registers it.

    Args:
        model_type: as in config.json.
        kind: kind of our model configuration, `gpt` or `bert`.
        fields: key of config.json -> our field, one to one.
        activation: key of the activation function, which `words` translates to ours.
        aliases: other name of a key -> the key that exports write.
        needs: our field -> the value that all such models have. Fields that no entry names have our default.
        reads: further keys, from which each function of `more` returns fields. A function raises FamilyError if it
            cannot.
        writes: further key -> one of our fields, a function of the model, or a value to write. OMITTED values are not
            written.
        ignored: keys that do not affect logits, without those that `writes` says are fields that do not.
        fixed: key -> the values that our model configuration can express.
        defaults: values that transformers uses for missing keys; other keys are required.
        tensors: module of ours -> module of theirs or `Tensors`. A path that starts with `blocks.` has no number; a
            path that starts with `experts.` is for blocks with experts, if they differ from other blocks. A key may
            also be the path of a parameter, if its names differ from those of its module; its names are then complete.
        body: prefix of all names except names in `heads`; files of a model without a head lack it.
        heads: prefixes of names of heads.
        buffers: ends of names of tensors that the model does not use.
        old_ends: ends of names in older files -> current ends.
        repeats: name of a tensor -> the name of the tensor that it repeats.
        optional: our field -> prefixes of the tensors that a model has if the field is true.
        more_layers: whether files may have layers after the last one, which predict further tokens. They are ignored
            unless model.mtp_layers has a number.
        mtp: module of ours in the prediction of a further token, except its block -> module of theirs. Exports to
            families without `mtp` leave out all parameters of this prediction.
        order: among families that fit a model, an export takes the one with the lowest order, then the first by name.
    """

    model_type: str
    kind: Literal["gpt", "bert"]
    fields: Mapping[str, str]
    activation: str
    words: Mapping[str, str]
    aliases: Mapping[str, str] = field(default_factory=dict)
    needs: Mapping[str, Any] = field(default_factory=dict)
    reads: frozenset[str] = frozenset()
    more: tuple[Callable[[Mapping[str, Any]], Mapping[str, Any]], ...] = ()
    writes: Mapping[str, Any] = field(default_factory=dict)
    ignored: frozenset[str] = frozenset()
    fixed: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    defaults: Mapping[str, Any] = field(default_factory=dict)
    tensors: Mapping[str, str | Tensors]
    body: str = "model."
    heads: tuple[str, ...] = ("lm_head.",)
    buffers: tuple[str, ...] = ("rotary_emb.inv_freq",)
    old_ends: Mapping[str, str] = field(default_factory=dict)
    repeats: Mapping[str, str] = field(default_factory=dict)
    optional: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    more_layers: bool = False
    mtp: Mapping[str, str] = field(default_factory=dict)
    order: int = 1

    def __post_init__(self) -> None:
        _FAMILIES[self.model_type] = self

    @property
    def known_keys(self) -> frozenset[str]:
        """The keys that determine the model."""
        return self.reads | self.fields.keys() | {self.activation}

    @property
    def output(self) -> str:
        """Name of the output matrix."""
        return next(iter(self._tensors("head.output.weight").names))

    @property
    def embedding(self) -> str:
        """Name of the matrix of the embeddings."""
        return next(iter(self._tensors("embedding.word.weight").names))

    def model_fields(self, config: Mapping[str, Any], tensors: Collection[str]) -> dict[str, Any]:
        """Return the model fields that a config.json sets, with optional sizes resolved.

        tensors: names as in `canonical_names`; they decide whether embeddings are tied if neither the configuration
        nor the family does. Raises FamilyError for an unknown or missing key, or if the model configuration cannot
        express a key's value.
        """
        try:
            return self._model_fields(config, tensors)
        except FamilyError:
            raise
        except KeyError as error:
            raise FamilyError(f"it lacks the key {error}, which its model_type needs") from error
        except DECODING_ERRORS as error:
            raise FamilyError(f"it has a value that its model_type cannot have: {error}") from error

    def _model_fields(self, config: Mapping[str, Any], tensors: Collection[str]) -> dict[str, Any]:
        config = {self.aliases.get(key, key): value for key, value in config.items()}
        config = self._checked({_TIED: self.output not in tensors, **self.defaults, **config})
        values = {name: config[key] for key, name in self.fields.items()}
        self._check_bounds(config)
        key = self.activation
        values["activation"] = known_word(self.words, config[key], f"{key} ")
        heads = values["num_heads"]
        values["num_kv_heads"] = values.get("num_kv_heads") or heads
        values["head_size"] = values.get("head_size") or values["hidden_size"] // heads
        for name, prefixes in self.optional.items():
            values[name] = all(any(each.startswith(prefix) for each in tensors) for prefix in prefixes)
        values = {**_defaults(self.kind), **self.needs, **values}
        for more in self.more:
            values |= more(config)
        for name, value in values.items():
            if isinstance(value, complex):
                raise FamilyError(f"model.{name} would be the root of a negative number; its sizes must be positive")
        return values

    def _check_bounds(self, config: Mapping[str, Any]) -> None:
        """Raise FamilyError for a number outside the bounds of our field, before it sizes a list."""
        hints = type_hints(BertModelConfig if self.kind == "bert" else ModelConfig)
        for key, name in self.fields.items():
            for _, value, rule in outside(hints[name], config[key], key):
                raise FamilyError(f"{key} is {value}; it must be {rule}")

    def run_fields(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """Return the fields of a config.json that do not affect logits: dropout, initial weights, longest sequence."""
        return {
            "family": self.model_type,
            **{name: config[key] for key, name in self.run_keys.items() if key in config},
        }

    @property
    def run_keys(self) -> dict[str, str]:
        """Keys of fields that do not affect logits -> our fields."""
        return {key: name for key, name in self.writes.items() if isinstance(name, str) and name in _OF_A_RUN}

    def config(self, model: ModelConfig) -> dict[str, Any]:
        """Return a config.json for a model. The caller must compare its `model_fields` with the model, which may not
        fit."""
        values = model_values(model)
        word_of = {name: word for word, name in reversed(list(self.words.items()))}
        written = {key: values[name] for key, name in self.fields.items()}
        written[self.activation] = word_of.get(model.activation, self.defaults.get(self.activation))
        for key, value in self.writes.items():
            value = values[value] if isinstance(value, str) and value in values else value
            written[key] = value(model) if callable(value) else value
        return {
            "model_type": self.model_type,
            **{key: value for key, value in written.items() if value is not OMITTED},
        }

    def _checked(self, config: dict[str, Any]) -> dict[str, Any]:
        fixed = {**_ALWAYS, **self.fixed}
        accepted = self.known_keys | self.ignored | _WITHOUT_EFFECT | self.run_keys.keys()
        for key, value in config.items():
            if key in fixed:
                # In Python, 0 equals False; in JSON, it does not.
                if not any(value == one and isinstance(value, bool) == isinstance(one, bool) for one in fixed[key]):
                    raise FamilyError(
                        f"{key} is {_shown(value)}, which the model configuration cannot "
                        f"express; it can be {' or '.join(map(_shown, fixed[key]))}"
                    )
            elif key not in accepted and value is not None:
                if key == "quantization_config":
                    raise FamilyError(f"{key} is {_shown(value)}: {_how_to_convert(value)}")
                raise FamilyError(
                    f"{key} is {_shown(value)}, which is not known for {self.model_type} and "
                    "may change what the model computes; remove the key if you know that it does not"
                )
        return config

    def places(self, model: ModelConfig) -> Iterator[ParameterPlace]:
        """Yield the place of every parameter of a model. Raises FamilyError for a parameter that has no place."""
        specs: dict[str, tuple[LayerSpec, str, ParameterSpec]] = {}
        for layer in model_layers(model):
            for path, spec in layer.parameters.items():
                specs.setdefault(spec.name, (layer, path, spec))
        for layer, path, spec in specs.values():
            config = model.of_kind(layer.variant)
            index, in_block = layer.index, layer.kind == "block"
            further = re.fullmatch(r"mtp\.([0-9]+)\.(block\.)?(.*)\.(\w+)", path)
            if further is not None:
                if not self.mtp:
                    continue
                depth, block, module, leaf = further.groups()
                index, in_block, path = model.num_layers + int(depth), block is not None, f"{module}.{leaf}"
            roots = ("experts.", "blocks.")[config.num_experts is None :]
            candidates = [root + path for root in roots] if in_block else [spec.name]
            listed = (name for name in candidates if {name, name.rpartition(".")[0]} & self.tensors.keys())
            if further is not None and not in_block:
                names, steps = Tensors((f"{self.mtp[module]}.{leaf}",))
            else:
                names, steps = self._tensors(next(listed, candidates[-1]), spec)
            experts = range(config.num_experts or 0) if "{expert}" in "".join(names) else (0,)
            names = tuple(name.format(layer=index, expert=each) for each in experts for name in names)
            yield ParameterPlace(spec, config, names, steps)

    def _tensors(self, path: str, spec: ParameterSpec | None = None) -> Tensors:
        """Return the tensors that hold a parameter, by their full names. path: of the parameter, without a block's
        number."""
        module, dot, leaf = path.rpartition(".")
        module, end = (path, "") if path in self.tensors else (module, dot + leaf)
        tensors = self.tensors.get(module)
        if tensors is None:
            assert spec is not None, f"{self.model_type} has no {path}"
            raise FamilyError(
                f"{self.model_type} weights have no tensor for {spec.name} of shape "
                f"{spec.shape}; check positions, normalization, activation, qk_norm, num_experts "
                "and expert_balance_rate of the model"
            )
        names, steps = Tensors((tensors,)) if isinstance(tensors, str) else tensors
        return Tensors(tuple(name + end for name in names), steps)

    def canonical_names(self, stored: Collection[str]) -> dict[str, str]:
        """Map each stored tensor to its name in transformers' model with a head.

        Raises FamilyError if a folder contains a tensor under both its old and its new name.
        """
        bare = not any(name.startswith(self.body) for name in stored)
        names: dict[str, str] = {}
        origins: dict[str, str] = {}
        for name in stored:
            canonical = name
            for old, new in self.old_ends.items():
                canonical = canonical.removesuffix(old) + new if canonical.endswith(old) else canonical
            canonical = self.body + canonical if bare and not canonical.startswith(self.heads) else canonical
            if canonical in origins:
                raise FamilyError(
                    f"the weights contain both {origins[canonical]!r} and {name!r}, two names "
                    "of the same tensor; remove the wrong one"
                )
            names[name] = canonical
            origins[canonical] = name
        for repeat, first in self.repeats.items():
            if first not in origins and repeat in names:
                names[repeat] = first
        return names

    def is_redundant(self, name: str, model: ModelConfig) -> bool:
        """Return whether an unused tensor repeats another, is not a weight, or belongs to a part that the model does
        not have."""
        if name == self.output:
            return model.tie_embeddings
        layer = re.match(rf"{re.escape(self.body)}layers\.([0-9]+)\.", name)
        if self.more_layers and layer is not None and int(layer[1]) >= model.num_layers:
            return True
        absent = (starts for flag, starts in self.optional.items() if not vars(model)[flag])
        return name in self.repeats or name.endswith(self.buffers) or any(map(name.startswith, absent))


_FAMILIES: dict[str, Family] = {}


def families(kind: str | None = None) -> dict[str, Family]:
    """Return the families of a kind of model, or all, by model_type in alphabetical order."""
    package = import_module(BUILT_IN)
    for module in pkgutil.iter_modules(package.__path__):
        import_module(f"{BUILT_IN}.{module.name}")
    _package_errors()
    return {key: each for key, each in sorted(_FAMILIES.items()) if kind in (None, each.kind)}


@cache
def _package_errors() -> dict[str, str]:
    """Import the families of installed packages, and return why some cannot be used, by model_type."""
    from importlib.metadata import entry_points  # takes long to import

    errors = {}
    for each in entry_points(group=GROUP):
        before, problem = dict(_FAMILIES), ""
        try:
            each.load()
        except Exception as error:
            problem = f"cannot be loaded: {type(error).__name__}: {' '.join(str(error).split())}"
        replaced = [name for name, family in before.items() if _FAMILIES[name] is not family]
        if replaced:
            problem = f"registers {', '.join(replaced)} a second time"
        elif not problem and each.name not in _FAMILIES:
            problem = f"does not register {each.name!r}"
        if problem:
            _FAMILIES.clear()
            _FAMILIES.update(before)
            package = each.dist.name if each.dist is not None else each.value
            errors[each.name] = (
                f"model_type {each.name!r} of the package {package} cannot be used: "
                f"{each.value} {problem}; fix or uninstall the package"
            )
    return errors


def family_of(model_type: Any, kind: str | None = None) -> Family:
    """Return the family of a model_type. Raises FamilyError unless it is known and of this kind."""
    registered = families(kind)
    if isinstance(model_type, str) and model_type in _package_errors():
        raise FamilyError(_package_errors()[model_type])
    if not isinstance(model_type, str) or model_type not in registered:
        near = nearest(model_type, registered) if isinstance(model_type, str) else ""
        raise FamilyError(
            f"model_type {model_type!r} is not supported{near}; weights can be taken from {', '.join(registered)}"
        )
    return registered[model_type]


def family_problems(model: ModelConfig) -> list[str]:
    """Return at most one message: `model.family` is unknown, or its models are of another kind than this one."""
    if not model.family:
        return []
    family = families().get(model.family)
    if family is not None and family.kind != model.kind:
        hint = ", leave out options of BERT such as data.pairs" if model.kind == "bert" else ""
        return [
            f"model.family is {model.family!r}, a family of {family.kind.upper()} models, but "
            f"this run is a {model.kind.upper()}; train with --kind {family.kind}{hint}, or "
            "choose a model of the other kind"
        ]
    try:
        family_of(model.family, model.kind)
    except FamilyError as error:
        return [f"model.family: {error}; or leave it empty"]
    return []


def exporting_family(model: ModelConfig) -> tuple[Family, list[str]]:
    """Return the family that a model is exported to, and what differs from it: nothing if the family can express it.

    That is the family that `model.family` names, or else the first by `order` of those that can. If none can, it is
    the one with the fewest differences.
    """
    if model.family:
        family = family_of(model.family, model.kind)
        return family, _export_problems(model, family)
    pairs = [(each, _export_problems(model, each)) for each in families(model.kind).values()]
    return min(pairs, key=lambda pair: (_UNREADABLE in pair[1], len(pair[1]), pair[0].order))


_UNREADABLE = "its family has no configuration like this"


def _export_problems(model: ModelConfig, family: Family) -> list[str]:
    """Return the differences between a model and what a family can express of it, one message each."""
    present = [prefix for flag, prefixes in family.optional.items() if vars(model)[flag] for prefix in prefixes]
    try:
        return field_differences(model, family.model_fields(family.config(model), present))
    except FamilyError as error:
        return [_UNREADABLE, str(error)]


def model_values(model: ModelConfig) -> dict[str, Any]:
    """Return the fields of a model by name, with optional sizes resolved; those of RoPE scaling start with
    `rope_scaling.`."""
    sizes = {"num_kv_heads": model.kv_heads, "head_size": model.own_head_size, "ffn_hidden_size": model.ffn_size}
    if model.kv_latent_size is not None:
        sizes["value_head_size"] = model.value_dim
    scaling = {f"rope_scaling.{name}": each for name, each in vars(model.rope_scaling).items()}
    values = {**vars(model), **sizes, **scaling}
    del values["rope_scaling"]
    return values


def _defaults(kind: str) -> dict[str, Any]:
    """Return the default of every field that affects logits, without the fields that every family sets."""
    values = model_values(BertModelConfig() if kind == "bert" else ModelConfig())
    return {name: value for name, value in values.items() if name not in _OF_A_RUN | _SIZES}


def field_differences(model: ModelConfig, wanted: Mapping[str, Any]) -> list[str]:
    """Return one message for each field of `model` that differs from `wanted`."""
    wanted, actual = _comparable(wanted, model), _comparable(model_values(model), model)
    if wanted["expert_balance_rate"] and model.expert_balance_rate:
        del wanted["expert_balance_rate"]  # any rate matches: it belongs to the training
    if not actual.get("sentence_head", True):
        del wanted["sentence_head"]  # a model without a sentence head ignores the folder's
    return [
        f"set model.{name} to {value!r} (it is {actual[name]!r})"
        for name, value in wanted.items()
        if actual[name] != value and not _without_effect(name, actual, wanted)
    ]


def _comparable(fields: Mapping[str, Any], model: ModelConfig) -> dict[str, Any]:
    """Return fields of `model`, or of a model that it is compared with, in one form for all values that mean the
    same."""
    values = dict(fields)
    if values["attention_scale"] == model.head_dim**-0.5:
        values["attention_scale"] = None  # the usual one
    kinds, pattern = values.pop("layer_kinds"), values["layer_pattern"]
    layers = [dict(kinds.get(kind, {})) for kind in islice(cycle(pattern), model.num_layers)]
    if values.get("embedding_norm") == (values["norm_position"] == "post"):
        values["embedding_norm"] = None  # the usual one
    if isinstance(model, BertModelConfig) and values["transform_activation"] == model.usual_transform_activation:
        values["transform_activation"] = None
    layers = [{name: value for name, value in each.items() if values.get(name, ...) != value} for each in layers]
    for each in (values, *layers):
        window = each.get("sliding_window")
        if window is not None and window >= model.max_positions:
            each["sliding_window"] = None  # a window of the longest sequence hides nothing
    values["layer_pattern"] = layers if any(layers) else []
    return values


def _without_effect(name: str, actual: Mapping[str, Any], wanted: Mapping[str, Any]) -> bool:
    """Return whether a field changes nothing in both models: it is about experts or rotations, and neither model has
    them."""
    if name.startswith(("expert", "router_", "shared_expert", "normalize_expert")):
        return actual["num_experts"] is None and wanted["num_experts"] is None
    rotates = "rotary" in (actual["positions"], wanted["positions"])
    if name.startswith("rope_") and name != "rope_scaling.kind":
        stretched = {actual["rope_scaling.kind"], wanted["rope_scaling.kind"]}
        short = name.removeprefix("rope_scaling.")
        used = any(short in ROPE_SCALING[kind].values() for kind in stretched)
        return not rotates or (short not in ("rope_theta", "factor") and not used)
    if name == "rotary_fraction":
        return not rotates
    return False


def _how_to_convert(quantization: Any) -> str:
    """Return why quantized weights cannot be read, and how to convert them."""
    method = quantization.get("quant_method") if isinstance(quantization, Mapping) else None
    if method not in _QUANTIZED:
        return "its weights are quantized; use the model that they were made from"
    return (
        f"its weights are in {method}; write them in bf16 to another folder with transformers: "
        "from_pretrained(FOLDER, dtype='bfloat16', "
        f"quantization_config={_QUANTIZED[method]}(dequantize=True)), then save_pretrained(OTHER)"
    )


def known_word(words: Mapping[str, str], word: str, key: str = "") -> str:
    """Return our word for a word of another program. Raises FamilyError for a word that is not in the table."""
    if word not in words:
        raise FamilyError(f"{key}{word!r} is not supported; supported are {', '.join(words)}")
    return words[word]


def _shown(value: Any) -> str:
    """Return a value as JSON, shortened."""
    text = json.dumps(value)
    return text if len(text) <= 60 else text[:57] + "..."
