"""A Hugging Face folder as an argument: its model, its weights, and text from it."""

import json
from pathlib import Path

import pytest
import tokenizers
import torch
import transformers

from megapipe.cli.trained_models import fill_mask, generate
from megapipe.config import ConfigError
from megapipe.config.load import kind_of, parse_as
from megapipe.config.model import ModelConfig
from megapipe.config.run import PretrainConfig
from megapipe.conversion.hugging_face import HuggingFaceSource
from megapipe.layout.validation import run_problems
from megapipe.spec.model_folder import with_model_folders
from tests.models.hugging_face import case_of, drawn
from tests.models.test_bert_hugging_face import case_of as bert_of


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    base = tmp_path_factory.mktemp("models")
    for name in ("llama", "gpt2", "qwen3_moe"):
        case_of(name).theirs.save_pretrained(base / name)
    bert_of().theirs.save_pretrained(base / "bert")
    bert_of(sentence_head=False, form="pre").theirs.save_pretrained(base / "megatron-bert")
    return {path.name: path for path in base.iterdir()}


def model_by(*words: str) -> ModelConfig:
    arguments = with_model_folders(words)
    return parse_as(kind_of(arguments), arguments).model


FURTHER = [pytest.param(name, marks=pytest.mark.exhaustive) for name in ("gpt2", "megatron-bert")]


@pytest.mark.parametrize("name", ["llama", "qwen3_moe", "bert", *FURTHER])
def test_a_folder_sets_the_model_of_its_weights(name: str, folders: dict[str, Path]) -> None:
    folder = folders[name]
    expected = HuggingFaceSource(folder).contents.model
    for words in (["--model", str(folder)], [f"--model={folder}/config.json"], ["--init-from", str(folder)]):
        assert model_by(*words) == expected


def test_later_flags_override_a_folder(folders: dict[str, Path]) -> None:
    llama, gpt2 = str(folders["llama"]), str(folders["gpt2"])
    assert model_by("--model", llama, "--model.num_layers", "7").num_layers == 7
    assert model_by("--model.num_layers", "7", "--init_from", llama).num_layers == 7
    assert model_by("--init_from", llama, "--model", gpt2).family == "gpt2"


def test_a_family_is_of_the_kind_of_the_run(folders: dict[str, Path]) -> None:
    words = with_model_folders(["--model", str(folders["gpt2"]), "--data.pairs", "order", "--data.sequence_length=8"])
    (problem,) = run_problems(parse_as(kind_of(words), words), 1)
    assert "'gpt2', a family of GPT models, but this run is a BERT; train with --kind gpt, leave out" in problem
    (problem,) = run_problems(parse_as(PretrainConfig, ["--model.family", "bert"]), 1)
    assert problem.endswith("but this run is a GPT; train with --kind bert, or choose a model of the other kind")
    (problem,) = run_problems(parse_as(PretrainConfig, ["--model.family", "lama"]), 1)
    assert problem.startswith("model.family: model_type 'lama' is not supported; did you mean 'llama'?")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"attention_chunk_size": 8}, "attention_chunk_size is 8, which is not known for llama"),
        ({"model_type": "lama"}, "model_type 'lama' is not supported; did you mean 'llama'"),
        ({"hidden_act": "tanh"}, "hidden_act 'tanh' is not supported"),
        ({"architectures": 5}, "architectures is 5; it must be a list"),
        ({"model_type": "gemma2", "query_pre_attn_scalar": -1}, "attention_scale would be the root of a negative"),
        ({"model_type": "gemma2", "num_hidden_layers": 10**9}, "num_hidden_layers is 1000000000; it must be from 1"),
    ],
)
def test_unknown_models_are_refused_by_name(
    changes: dict, message: str, folders: dict[str, Path], tmp_path: Path
) -> None:
    config = json.loads((folders["llama"] / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | changes))
    with pytest.raises(ConfigError, match=message) as raised:
        with_model_folders(["--model", str(tmp_path)])
    assert str(raised.value).startswith(f"--model {tmp_path}")


def test_generated_text_is_that_of_transformers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With a tokenizer that another library trained."""
    trained = tokenizers.ByteLevelBPETokenizer()
    trained.train_from_iterator([Path(__file__).read_text()], vocab_size=300, special_tokens=["<|endoftext|>"])
    wrapped = transformers.PreTrainedTokenizerFast(tokenizer_object=trained._tokenizer, eos_token="<|endoftext|>")
    wrapped.save_pretrained(tmp_path)
    config = transformers.LlamaConfig(
        **{**case_of("llama").theirs.config.to_dict(), "vocab_size": 300, "eos_token_id": wrapped.eos_token_id}
    )
    torch.manual_seed(0)
    theirs = transformers.LlamaForCausalLM(config).eval()
    theirs.save_pretrained(tmp_path)
    prompt = "def test_a"
    inputs = wrapped(prompt, return_tensors="pt")
    new = theirs.generate(**inputs, max_new_tokens=16, do_sample=False, pad_token_id=0)[0]
    greedy = ["--temperature", "0", "--max-new-tokens", "16"]
    assert generate(["--checkpoint", str(tmp_path), "--prompt", prompt, *greedy]) == 0
    printed, messages = capsys.readouterr()
    assert printed == wrapped.decode(new, skip_special_tokens=True) + "\n"
    assert str(tmp_path) in messages


def test_a_roberta_folder_fills_gaps(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With the tokens of its own vocabulary, of which the one for a gap takes the space before it."""
    trained = tokenizers.ByteLevelBPETokenizer()
    special = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
    trained.train_from_iterator([Path(__file__).read_text()], vocab_size=300, special_tokens=special)
    trained.save_model(str(tmp_path))
    tokenizer = transformers.RobertaTokenizerFast.from_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    base = case_of("roberta").theirs.config.to_dict()
    torch.manual_seed(0)
    theirs = transformers.RobertaForMaskedLM(transformers.RobertaConfig(**{**base, "vocab_size": len(tokenizer)}))
    drawn(theirs).save_pretrained(tmp_path)
    assert fill_mask(["--checkpoint", str(tmp_path), "--text", "def [MASK] return", "--top-k", "1"]) == 0
    filled, gap = capsys.readouterr().out.splitlines()
    inputs = tokenizer("def <mask> return", return_tensors="pt")
    with torch.no_grad():
        logits = theirs(**inputs).logits[0][inputs.input_ids[0] == tokenizer.mask_token_id][0]
    best = tokenizer.decode([int(logits.argmax())])
    assert filled == f"def {best.removeprefix(' ')} return"
    assert gap.endswith(f"{best} {float(logits.softmax(-1).max()):.1%}")
