"""Hugging Face -> megapipe -> Hugging Face: the same bits, and logits that transformers and we agree on.

The folders are written and read by transformers, which is the oracle throughout.
"""

from dataclasses import replace
from pathlib import Path

import pytest
import safetensors.torch
import torch
import transformers
from torch import Tensor, nn

from megapipe.checkpoint import CheckpointError
from megapipe.config.bert import BertModelConfig
from megapipe.config.model import ModelConfig
from megapipe.conversion.command import main
from megapipe.conversion.formats import Contents, StoredTensor
from megapipe.conversion.hugging_face import HuggingFaceSource, exported_config
from megapipe.conversion.megapipe_format import MegapipeSource, MegapipeTarget
from tests.layers.bound import bind_model, make_context, run
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
def trip(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """A family's name, and a folder with what transformers wrote, our checkpoint of it, and what we export."""
    folder = tmp_path_factory.mktemp(request.param)
    theirs_of(request.param).save_pretrained(folder / "theirs", max_shard_size="100KB")
    assert main(["convert", str(folder / "theirs"), "--to", "megapipe", str(folder / "ours")]) == 0
    exported = ["convert", str(folder / "ours"), "--to", "hf", str(folder / "back"), "--max_shard_bytes", "150000"]
    assert main(exported) == 0
    return request.param, folder


def test_every_bit_comes_back(trip: tuple[str, Path]) -> None:
    _, folder = trip
    expected, actual = tensors_of(folder / "theirs"), tensors_of(folder / "back")
    assert actual.keys() == expected.keys()
    for name, tensor in expected.items():
        assert actual[name].dtype == tensor.dtype
        assert torch.equal(actual[name], tensor), name


def test_the_exported_configuration_is_the_one_that_was_read(trip: tuple[str, Path]) -> None:
    """All that shapes the model; dropout and the like are a run's own."""
    _, folder = trip
    before, after = (transformers.AutoConfig.from_pretrained(folder / place) for place in ("theirs", "back"))
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


def test_transformers_and_we_agree_on_logits(trip: tuple[str, Path]) -> None:
    name, folder = trip
    source = MegapipeSource(folder / "ours")
    weights = {tensor.name: source.read(tensor) for tensor in source.contents.tensors}
    model = source.contents.model
    for ours, expected in logits_of(folder / "back", model, weights):
        assert 0.5 < expected.std() < 50.0
        assert (ours - expected).abs().max() <= 1e-5 * expected.abs().max(), name


def logits_of(folder: Path, model: ModelConfig, weights: dict[str, Tensor]) -> list[tuple[Tensor, Tensor]]:
    """Ours and theirs."""
    kind = transformers.AutoConfig.from_pretrained(folder).architectures[0]
    theirs, report = getattr(transformers, kind).from_pretrained(
        folder, attn_implementation="eager", output_loading_info=True
    )
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    theirs.eval()
    with torch.no_grad():
        if isinstance(model, BertModelConfig):
            context = bert.make_context(model)
            layers = bert.bound(model, weights, torch.float32)
            real = torch.arange(bert.LENGTH) < context.lengths[:, None]
            actual, expected = (
                bert.run(layers, replace(context, labels=None, training=False)),
                bert.their_logits(theirs, context),
            )
            rows = (real, slice(None))
            return [(ours[row], theirs[row]) for ours, theirs, row in zip(actual, expected, rows, strict=False)]
        bound = bind_model(model)
        for layer in bound:
            for name, parameter in layer.parameters().items():
                parameter.copy_(weights[name])
        decoder_context = make_context(model, batch=3, length=40)
        return [
            (run(bound, replace(decoder_context, labels=None, training=False)), theirs(decoder_context.tokens).logits)
        ]


@pytest.mark.parametrize("name", ["roberta", *(pytest.param(name, marks=pytest.mark.exhaustive) for name in BERTS)])
def test_an_untied_head_keeps_the_bias_that_transformers_reads(name: str, tmp_path: Path) -> None:
    """Its files have two biases, one of which transformers ignores."""
    tied = theirs_of(name)
    torch.manual_seed(0)
    theirs = type(tied)(type(tied.config)(**{**tied.config.to_dict(), "tie_word_embeddings": False})).eval()
    for parameter in theirs.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    theirs.save_pretrained(tmp_path / "theirs")
    assert main(["convert", str(tmp_path / "theirs"), "--to", "megapipe", str(tmp_path / "ours")]) == 0
    assert main(["convert", str(tmp_path / "ours"), "--to", "hf", str(tmp_path / "back")]) == 0
    back, report = type(theirs).from_pretrained(tmp_path / "back", output_loading_info=True)
    assert not report["missing_keys"]
    context = bert.make_context(HuggingFaceSource(tmp_path / "theirs").contents.model)
    for ours, expected in zip(
        bert.their_logits(back.eval(), context), bert.their_logits(theirs, context), strict=True
    ):
        assert torch.equal(ours, expected)


def test_tokenizers_whose_padding_differs_from_positions_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    theirs_of("roberta").save_pretrained(tmp_path / "theirs")
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *(f"w{number}" for number in range(92))]
    (tmp_path / "vocab.txt").write_text("\n".join(words) + "\n")
    named = ["--tokenizer", f"bert-cased:{tmp_path}/vocab.txt"]
    command = ["convert", str(tmp_path / "theirs"), "--to", "hf", str(tmp_path / "out"), *named]
    assert main(command) == 2
    assert "padding has the id 0, but the model's positions count from the row after 1" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_bf16_is_what_torch_rounds_to(tmp_path: Path) -> None:
    theirs_of("qwen2").save_pretrained(tmp_path / "theirs")
    command = ["convert", str(tmp_path / "theirs"), "--to", "hf", str(tmp_path / "half"), "--precision", "bf16"]
    assert main(command) == 0
    halves = tensors_of(tmp_path / "half")
    assert halves
    for name, tensor in tensors_of(tmp_path / "theirs").items():
        assert torch.equal(halves[name], tensor.bfloat16()), name
    assert transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "half").dtype == torch.bfloat16


def test_values_beyond_fp16_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    theirs = theirs_of("gpt2")
    theirs.transformer.ln_f.weight.data[3] = 1e6
    theirs.save_pretrained(tmp_path / "theirs")
    command = ["convert", str(tmp_path / "theirs"), "--to", "hf", str(tmp_path / "half"), "--precision", "fp16"]
    assert main(command) == 2
    assert "head.norm.weight has values beyond 65504" in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["theirs"]


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
def test_models_of_no_family_are_refused_with_their_fields(
    name: str, changes: dict[str, object], message: str
) -> None:
    model = replace(case_of(name).model, **{"family": "", **changes})
    with pytest.raises(CheckpointError) as raised:
        exported_config(model, "F32")
    assert message in str(raised.value)


def balanced(folder: Path) -> tuple[ModelConfig, dict[str, Tensor]]:
    """A model whose experts are balanced, with Mixtral's random weights and random biases, and its checkpoint."""
    theirs_of("mixtral").save_pretrained(folder / "theirs")
    source = HuggingFaceSource(folder / "theirs")
    model = replace(source.contents.model, family="", **BALANCE)
    values = {tensor.name: source.read(tensor) for tensor in source.contents.tensors}
    generator = torch.Generator().manual_seed(0)
    values |= {f"blocks.{block}.mlp.router.bias": torch.randn(4, generator=generator) for block in range(2)}
    described = tuple(StoredTensor(name, "weights", tuple(each.shape), "F32") for name, each in values.items())
    target = MegapipeTarget(folder / "ours", Contents(model, described))
    for tensor in described:
        target.add(tensor, values[tensor.name])
    target.finish()
    return model, values


def test_a_model_with_balanced_experts_is_exported(tmp_path: Path) -> None:
    model, values = balanced(tmp_path)
    assert main(["convert", str(tmp_path / "ours"), "--to", "hf", str(tmp_path / "back")]) == 0
    assert transformers.AutoConfig.from_pretrained(tmp_path / "back").model_type == "ernie4_5_moe"
    ((ours, expected),) = logits_of(tmp_path / "back", model, values)
    assert (ours - expected).abs().max() <= 1e-5 * expected.abs().max()
    ((without, _),) = logits_of(tmp_path / "theirs", replace(model, expert_balance_rate=0.0), values)
    assert (ours - without).abs().max() > 0.1 * expected.abs().max(), "the biases decided nothing"


def test_router_and_biases_may_be_fp32_among_bf16(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As transformers saves an Ernie that it loaded in bf16."""
    theirs, ours, back = (str(tmp_path / name) for name in ("theirs", "ours", "back"))
    theirs_of("ernie4_5_moe").save_pretrained(tmp_path / "fp32")
    load = transformers.AutoModelForCausalLM.from_pretrained
    load(tmp_path / "fp32", dtype=torch.bfloat16).save_pretrained(theirs)
    stored = tensors_of(tmp_path / "theirs")
    assert {tensor.dtype for tensor in stored.values()} == {torch.bfloat16, torch.float32}
    assert main(["convert", theirs, "--to", "megapipe", ours]) == 0
    assert main(["convert", ours, "--to", "hf", back]) == 2
    assert "choose it with --precision" in capsys.readouterr().err
    assert main(["convert", ours, "--to", "hf", back, "--precision", "fp32"]) == 0
    tensors = tensors_of(tmp_path / "back")
    assert tensors.keys() == stored.keys()
    for name, tensor in stored.items():
        assert torch.equal(tensors[name], tensor.float()), name
