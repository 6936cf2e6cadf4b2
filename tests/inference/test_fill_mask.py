"""tools/fill_mask.py as users run it: its candidates against transformers' BERT, and every kind of wrong input."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers

from megapipe.cli.trained_models import fill_mask as main
from megapipe.cli.trained_models import generate
from megapipe.config.bert import BertDataConfig, BertModelConfig, BertPretrainConfig
from megapipe.training.loop.replica import Replica
from tests.data.bert_shards import SPECIAL
from tests.data.commands import Printed, run_command
from tests.inference.test_generate_command import save_run, save_step
from tests.models.hugging_face import exported
from tests.support.gpt_runs import assembled, shards

WORDS = [*SPECIAL, "def", "self", "name", "(", ")", ":", "in", "for", "##s", "##ing"]
MODEL = BertModelConfig(
    vocabulary_size=len(WORDS), num_layers=2, hidden_size=32, num_heads=4, max_positions=32, init_std=0.3
)
TEXT = "def [MASK](self, name[MASK]):"

Fill = Callable[..., Printed]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("bert")
    (path / "vocab.txt").write_text("".join(f"{word}\n" for word in WORDS))
    return path


@pytest.fixture(scope="module")
def replica(folder: Path) -> Replica:
    data = BertDataConfig(prefix="no-shard", tokenizer=f"bert-uncased:{folder}/vocab.txt", sequence_length=16)
    return save_step(folder, BertPretrainConfig(model=MODEL, data=data))


@pytest.fixture
def fill(folder: Path, replica: Replica) -> Fill:
    def run(*words: object, checkpoint: Path = folder, status: int = 0) -> Printed:
        return run_command(main, "--checkpoint", checkpoint, "--device", "cpu", *words, status=status)

    return run


def test_candidates_are_those_of_transformers(fill: Fill, folder: Path, replica: Replica) -> None:
    sizes = {"num_hidden_layers": 2, "hidden_size": 32, "intermediate_size": 128, "num_attention_heads": 4}
    config = transformers.BertConfig(
        **sizes, vocab_size=len(WORDS), max_position_embeddings=32, attn_implementation="eager"
    )
    theirs = transformers.BertForPreTraining(config).eval()
    states = replica.states()
    weights = assembled([shards(states, [state.master for state in states])])
    theirs.load_state_dict(exported(weights, MODEL, "bert"), strict=False)
    theirs.tie_weights()
    tokenizer = transformers.BertTokenizer(str(folder / "vocab.txt"))
    with torch.no_grad():
        inputs = tokenizer(TEXT, return_tensors="pt")
        logits = theirs(**inputs).prediction_logits[0]
    expected = logits[inputs.input_ids[0] == WORDS.index("[MASK]")].softmax(-1).topk(3)
    filled, *gaps = fill("--text", TEXT, "--top-k", "3").out.splitlines()
    assert len(gaps) == 2
    for number, (gap, places, shares) in enumerate(zip(gaps, expected.indices, expected.values, strict=True), start=1):
        choices = [f"{WORDS[place]} {share:.1%}" for place, share in zip(places, shares.tolist(), strict=True)]
        assert gap == f"  gap {number}: {', '.join(choices)}"
    first, second = (WORDS[place].removeprefix("##") for place in expected.indices[:, 0])
    assert filled == f"def {first}(self, name{second}):"


def test_several_texts_and_a_steps_folder(fill: Fill, folder: Path) -> None:
    output, messages = fill("--text", "[MASK]", "--text", "for [MASK]")
    assert len(re.findall(r"^  gap 1: (\S+ \d+\.\d%(, )?){5}$", output, re.MULTILINE)) == 2
    assert f"{folder}/checkpoints/step-00000007 (step 7), tokenizer bert-uncased:" in messages
    step = folder / "checkpoints/step-00000007"
    assert fill("--text", "[MASK]", "--text", "for [MASK]", checkpoint=step).out == output


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (["def name"], ["'def name' has no gap", "[MASK]"]),
        (["name " * 14 + "[MASK]"], ["has 17 tokens with [CLS] and [SEP]", "trained on samples of 16"]),
        (["[MASK]\udcff"], ["is not UTF-8"]),
        (["[MASK]", "--tokenizer", "bytes"], ["bytes has no [CLS], [SEP], [MASK]"]),
        (["[MASK]", "--tokenizer", "no-such-file"], ["no tokenizer 'no-such-file'"]),
        (["[MASK]", "--top-k", "16"], ["--top-k is 16; it must be at most 15, the tokens of the vocabulary"]),
        (["while [MASK]", "--tokenizer", "bert-uncased:vocab.txt"], ["has token 15 but the model's vocabulary is 15"]),
    ],
)
def test_a_wrong_input_names_value_and_rule(
    fill: Fill, words: list[str], parts: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("vocab.txt").write_text("".join(f"{word}\n" for word in [*WORDS, "while"]))
    output, messages = fill("--text", *words, status=2)
    assert output == ""
    for part in parts:
        assert part in messages


def test_missing_and_other_checkpoints_are_reported(
    fill: Fill, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "no complete checkpoint in" in fill("--text", "[MASK]", checkpoint=tmp_path, status=2).err
    output, messages = fill("--text", "[MASK]", checkpoint=save_run(tmp_path, ""), status=2)
    assert output == ""
    assert "the checkpoint is a GPT, which" in messages
    assert "megapipe generate" in messages
    words = ["--checkpoint", folder, "--device", "cpu", "--prompt", "def "]
    output, messages = run_command(generate, *words, status=2)
    assert output == ""
    assert "the checkpoint is a BERT, which" in messages
    assert "megapipe fill-mask" in messages
    ranks = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}
    for name, value in {**ranks, "MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}.items():
        monkeypatch.setenv(name, value)
    assert "2 ranks were started" in fill("--text", "[MASK]", status=2).err
