"""Hugging Face -> megapipe -> Hugging Face: the same bits, and logits that transformers and we agree on.

The folders are written and read by transformers, which is the oracle throughout.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import transformers
from torch import Tensor, nn

from megapipe.checkpoint import CheckpointError
from megapipe.config.bert import BertModelConfig
from megapipe.config.model import ModelConfig
from megapipe.conversion.formats import Contents, Source, StoredTensor
from megapipe.conversion.hugging_face import HuggingFaceSource, exported_config
from megapipe.conversion.megapipe_format import MegapipeSource
from tests.conversion.foreign.weights import write
from tests.conversion.test_command import convert
from tests.layers.bound import bind_model, load, make_context, run
from tests.models import test_bert_hugging_face as bert
from tests.models.hugging_face import CONFIGS, ENCODERS, case_of

BERTS = {
    "bert": {},
    "bert_without_sentence_head": {"sentence_head": False, "activation": "gelu_tanh"},
    "megatron_bert": {"form": "pre"},
    "albert_for_pretraining": {"form": "shared"},
}


def theirs_of(name: str) -> nn.Module:
    return bert.case_of(**BERTS[name]).theirs if name in BERTS else case_of(name).theirs


def tensors_of(folder: Path) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    for file in folder.glob("*.safetensors"):
        tensors.update(safetensors.torch.load_file(file))
    return tensors


FAMILIES = [
    name
    if name in ("gpt2", "llama", "mixtral", "ernie4_5_moe", "bert")
    else pytest.param(name, marks=pytest.mark.exhaustive)
    for name in (*CONFIGS, *BERTS, *ENCODERS)
]


@pytest.fixture(scope="module", params=FAMILIES)
def trip(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what transformers wrote, our checkpoint of it, and what we export."""
    folder = tmp_path_factory.mktemp(request.param)
    theirs_of(request.param).save_pretrained(folder / "theirs", max_shard_size="100KB")
    there_and_back(folder, "--max_shard_bytes", 150_000)
    return folder


def there_and_back(folder: Path, *options: object) -> None:
    """Convert FOLDER/theirs to FOLDER/ours and FOLDER/back."""
    convert(folder / "theirs", "megapipe", folder / "ours")
    convert(folder / "ours", "hf", folder / "back", *options)


def test_every_bit_comes_back(trip: Path) -> None:
    expected, actual = tensors_of(trip / "theirs"), tensors_of(trip / "back")
    assert actual.keys() == expected.keys()
    for name, tensor in expected.items():
        assert actual[name].dtype == tensor.dtype
        assert torch.equal(actual[name], tensor), name


def test_the_exported_configuration_is_the_one_that_was_read(trip: Path) -> None:
    """All that shapes the model; dropout and the like are a run's own."""
    before, after = (transformers.AutoConfig.from_pretrained(trip / place) for place in ("theirs", "back"))
    assert type(before) is type(after)
    ignored = {"bos_token_id", "eos_token_id", "pad_token_id", "transformers_version", "_name_or_path"}
    expected = {**before.to_dict()}
    if expected.get("n_inner", 0) is None:  # GPT-2 for four times the width
        expected["n_inner"] = 4 * expected["n_embd"]
    if "moe_intermediate_size" in expected:  # every layer has experts, so the dense width is unused
        del expected["intermediate_size"]
    for name, value in after.to_dict().items():
        if name in expected and name not in ignored:
            assert value == expected[name], name


def test_transformers_and_we_agree_on_logits(trip: Path) -> None:
    source = MegapipeSource(trip / "ours")
    assert all(0.5 < expected.std() < 50.0 for _, expected in check_logits(trip / "back", source))


def check_logits(folder: Path, source: Source, what: str = "") -> list[tuple[Tensor, Tensor]]:
    """Compare ours of a source with theirs of a folder, and return both. what: said if they differ."""
    weights = {each.name: source.read(each) for each in source.contents.tensors if each.kind == "weights"}
    both = logits_of(folder, source.contents.model, weights)
    for ours, expected in both:
        assert (ours - expected).abs().max() <= 1e-5 * expected.abs().max(), what
    return both


def logits_of(folder: Path, model: ModelConfig, weights: dict[str, Tensor]) -> list[tuple[Tensor, Tensor]]:
    """Ours and theirs."""
    kind = getattr(transformers, transformers.AutoConfig.from_pretrained(folder).architectures[0])
    theirs, report = kind.from_pretrained(folder, attn_implementation="eager", output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    theirs.eval()
    with torch.no_grad():
        if isinstance(model, BertModelConfig):
            context = bert.make_context(model)
            layers = bert.bound(model, weights, torch.float32)
            actual = bert.run(layers, replace(context, labels=None, training=False))
            rows = (torch.arange(bert.LENGTH) < context.lengths[:, None], slice(None))
            both = zip(actual, bert.their_logits(theirs, context), rows, strict=False)
            return [(ours[row], expected[row]) for ours, expected, row in both]
        bound = bind_model(model)
        load(bound, weights)
        context = make_context(model, batch=3, length=40)
        ours = run(bound, replace(context, labels=None, training=False))
        return [(ours, theirs(context.tokens).logits)]


@pytest.mark.parametrize("name", ["roberta", *(pytest.param(name, marks=pytest.mark.exhaustive) for name in BERTS)])
def test_an_untied_head_keeps_the_bias_that_transformers_reads(name: str, tmp_path: Path) -> None:
    """Its files have two biases, one of which transformers ignores."""
    tied = theirs_of(name)
    torch.manual_seed(0)
    theirs = type(tied)(type(tied.config)(**{**tied.config.to_dict(), "tie_word_embeddings": False})).eval()
    for parameter in theirs.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    theirs.save_pretrained(tmp_path / "theirs")
    there_and_back(tmp_path)
    back, report = type(theirs).from_pretrained(tmp_path / "back", output_loading_info=True)
    assert not report["missing_keys"]
    context = bert.make_context(HuggingFaceSource(tmp_path / "theirs").contents.model)
    both = zip(bert.their_logits(back.eval(), context), bert.their_logits(theirs, context), strict=True)
    assert all(torch.equal(ours, expected) for ours, expected in both)


def test_tokenizers_whose_padding_differs_from_positions_are_refused(tmp_path: Path) -> None:
    theirs_of("roberta").save_pretrained(tmp_path / "theirs")
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *(f"w{number}" for number in range(92))]
    (tmp_path / "vocab.txt").write_text("\n".join(words) + "\n")
    named = ["--tokenizer", f"bert-cased:{tmp_path}/vocab.txt"]
    error = convert(tmp_path / "theirs", "hf", tmp_path / "out", *named, status=2).err
    assert "padding has the id 0, but the model's positions count from the row after 1" in error
    assert not (tmp_path / "out").exists()


def test_bf16_is_what_torch_rounds_to(tmp_path: Path) -> None:
    theirs_of("qwen2").save_pretrained(tmp_path / "theirs")
    convert(tmp_path / "theirs", "hf", tmp_path / "half", "--precision", "bf16")
    halves = tensors_of(tmp_path / "half")
    assert halves
    for name, tensor in tensors_of(tmp_path / "theirs").items():
        assert torch.equal(halves[name], tensor.bfloat16()), name
    assert transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "half").dtype == torch.bfloat16


def test_values_beyond_fp16_are_refused(tmp_path: Path) -> None:
    theirs = theirs_of("gpt2")
    theirs.transformer.ln_f.weight.data[3] = 1e6
    theirs.save_pretrained(tmp_path / "theirs")
    refused = convert(tmp_path / "theirs", "hf", tmp_path / "half", "--precision", "fp16", status=2)
    assert "head.norm.weight has values beyond 65504" in refused.err
    assert [path.name for path in tmp_path.iterdir()] == ["theirs"]


BALANCE = {"expert_balance_rate": ModelConfig().expert_balance_rate}


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("gpt2", {"bias": "none"}, "set model.bias to 'all'"),
        ("gpt2", {"num_kv_heads": 2}, "set model.num_kv_heads to 4"),
        ("gpt2", {"head_size": 32}, "set model.head_size to 16"),
        ("gpt2", {"activation": "swiglu"}, "set model.activation to 'gelu_tanh'"),
        ("gpt2", {"normalization": "rms_norm"}, "set model.normalization to 'layer_norm'"),
        ("gpt2", {"sliding_window": 5}, "set model.sliding_window to None"),
        ("gpt2", {"positions": "none"}, "set model.positions to 'learned'"),
        ("gpt2", {"qk_norm": True}, "set model.qk_norm to False"),
        ("gpt2", {"family": "qwen3", "qk_norm": True, "bias": "qkv"}, "its family, qwen3, would need another model"),
        ("mixtral", {**BALANCE, "expert_bias": "scores"}, "set model.expert_bias to 'shares'"),
        ("mixtral", {**BALANCE, "sliding_window": 7}, "set model.sliding_window to None"),
        ("mixtral", {**BALANCE, "normalize_expert_shares": False}, "set model.normalize_expert_shares to True"),
    ],
    ids=str,
)
def test_models_of_no_family_are_refused_with_their_fields(name: str, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        exported_config(replace(case_of(name).model, **{"family": "", **changes}), "F32")


def test_the_usual_activation_of_a_head_may_be_named() -> None:
    model = BertModelConfig()
    named = replace(model, transform_activation=model.usual_transform_activation)
    assert exported_config(named, "F32") == exported_config(model, "F32")
    with pytest.raises(CheckpointError, match=r"set model\.transform_activation to None"):
        exported_config(replace(model, transform_activation="silu"), "F32")


def test_a_model_with_balanced_experts_is_exported(tmp_path: Path) -> None:
    """With Mixtral's random weights and random biases of the experts."""
    theirs_of("mixtral").save_pretrained(tmp_path / "theirs")
    source = HuggingFaceSource(tmp_path / "theirs")
    model = replace(source.contents.model, family="", **BALANCE)
    plain = {tensor.name: source.read(tensor) for tensor in source.contents.tensors}
    generator = torch.Generator().manual_seed(0)
    values = plain | {f"blocks.{block}.mlp.router.bias": torch.randn(4, generator=generator) for block in range(2)}
    described = tuple(StoredTensor(name, "weights", tuple(each.shape), "F32") for name, each in values.items())
    write("megapipe", tmp_path / "ours", Contents(model, described), {each: values[each.name] for each in described})
    convert(tmp_path / "ours", "hf", tmp_path / "back")
    assert transformers.AutoConfig.from_pretrained(tmp_path / "back").model_type == "ernie4_5_moe"
    ((_, expected),) = check_logits(tmp_path / "back", MegapipeSource(tmp_path / "ours"))
    ((without, _),) = logits_of(tmp_path / "theirs", replace(model, expert_balance_rate=0.0), plain)
    assert (expected - without).abs().max() > 0.1 * expected.abs().max(), "the biases decided nothing"


def test_router_and_biases_may_be_fp32_among_bf16(tmp_path: Path) -> None:
    """As transformers saves an Ernie that it loaded in bf16."""
    theirs, ours, back = (tmp_path / name for name in ("theirs", "ours", "back"))
    theirs_of("ernie4_5_moe").save_pretrained(tmp_path / "fp32")
    load_theirs = transformers.AutoModelForCausalLM.from_pretrained
    load_theirs(tmp_path / "fp32", dtype=torch.bfloat16).save_pretrained(theirs)
    stored = tensors_of(theirs)
    assert {tensor.dtype for tensor in stored.values()} == {torch.bfloat16, torch.float32}
    convert(theirs, "megapipe", ours)
    assert "choose it with --precision" in convert(ours, "hf", back, status=2).err
    convert(ours, "hf", back, "--precision", "fp32")
    tensors = tensors_of(back)
    assert tensors.keys() == stored.keys()
    for name, tensor in stored.items():
        assert torch.equal(tensors[name], tensor.float()), name
