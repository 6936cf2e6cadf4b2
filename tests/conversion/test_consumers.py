"""Programs that open an exported folder: transformers' auto classes and pipelines, and lm-eval.

The models are trained here, on shards of tokenizers that this project did not make.
"""

import importlib
import io
import json
import re
import subprocess
import sys
import tarfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
import tokenizers
import transformers
from tokenizers import decoders, models, pre_tokenizers, trainers

from megapipe.cli.trained_models import evaluate, fill_mask, generate
from megapipe.config.bert import BertModelConfig
from megapipe.config.run import PretrainConfig
from megapipe.data.shards import IndexedDataset
from megapipe.parallel.launch import LaunchEnvironment
from megapipe.training.pretrain import pretrain
from tests.conversion.test_command import convert
from tests.data.commands import preprocess, run_command, write_json_lines
from tests.data.small_tokenizers import write_tiktoken
from tests.support.bert_runs import make_bert_config, write_corpus
from tests.support.gpt_runs import LLAMA_SHAPE, make_config
from tests.support.launch import environment

TEXTS = ["The cat sat on the mat.", "A dog ate 12 green apples, naïvely.", "Two birds flew  over Köln — 東京!"]
FAST = {"learning_rate": 1e-2, "warmup_steps": 2}
WORDS = [text.split(" ") for text in TEXTS]
CHAT = "{% for each in messages %}{{ each.role }}: {{ each.content }}\n{% endfor %}"


def made_tokenizer(kind: str, folder: Path) -> tuple[str, int]:
    """Make a tokenizer without this project. Return its name for preprocessing, and the number of its ids."""
    if kind == "SentencePiece":
        written = io.BytesIO()
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(TEXTS * 20), model_writer=written, vocab_size=42, minloglevel=2
        )
        (folder / "theirs.model").write_bytes(written.getvalue())
        return str(folder / "theirs.model"), 42
    bpe = tokenizers.Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    special = [] if kind == "tiktoken" else ["<|endoftext|>"]
    letters = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=320, special_tokens=special, initial_alphabet=letters)
    bpe.train_from_iterator(TEXTS * 20, trainer)
    if kind == "byte-level BPE":
        bpe.save(str(folder / "theirs.json"))
        return str(folder / "theirs.json"), bpe.get_vocab_size()
    if kind == "folder":
        whole = transformers.PreTrainedTokenizerFast(
            tokenizer_object=bpe, eos_token="<|endoftext|>", pad_token="<|endoftext|>", chat_template=CHAT
        )
        whole.save_pretrained(folder / "theirs")
        return str(folder / "theirs"), bpe.get_vocab_size()
    write_tiktoken(folder / "theirs.tiktoken", bpe.get_vocab())
    return f"r50k_base:{folder / 'theirs.tiktoken'}", 50257


def exported(folder: Path, config: PretrainConfig) -> Path:
    """Train a run and return the folder of its export."""
    config.training = replace(config.training, directory=str(folder / "run"))
    assert pretrain(config, LaunchEnvironment()) == 0
    convert(folder / "run", "hf", folder / "exported")
    return folder / "exported"


def trained_gpt(folder: Path, kind: str, steps: int) -> tuple[Path, str]:
    """Return the export of a GPT trained on TEXTS, and the prefix of its shard."""
    spec, size = made_tokenizer(kind, folder)
    source = write_json_lines(folder / "text.jsonl", [{"text": text} for text in TEXTS * 20])
    preprocess("--input", source, "--tokenizer", spec, "--append-eod", "--output-prefix", folder / "corpus")
    prefix = str(folder / "corpus_text_document")
    model = replace(LLAMA_SHAPE, vocabulary_size=size, num_kv_heads=None, max_positions=32)
    # Attention sees one document, and every document starts a text.
    data = {"sequence_length": 32, "isolate_documents": True, "mask_end_of_document": True, "pack": "best_fit"}
    config = make_config(prefix, model, optimizer=FAST, training={"steps": steps}, data=data)
    return exported(folder, config), prefix


@pytest.fixture(scope="module")
def gpt(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A GPT that knows TEXTS by heart."""
    return trained_gpt(tmp_path_factory.mktemp("gpt"), "byte-level BPE", steps=40)[0]


@pytest.mark.parametrize(
    "kind",
    [
        "folder",
        *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("SentencePiece", "tiktoken")),
        pytest.param("byte-level BPE", marks=pytest.mark.exhaustive),
    ],
)
def test_exported_tokenizers_give_the_ids_of_the_shard(kind: str, tmp_path: Path) -> None:
    folder, prefix = trained_gpt(tmp_path, kind, steps=1)
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    shard = IndexedDataset(prefix)
    for number, text in enumerate(TEXTS):
        ids = shard.document(number).tolist()
        assert [*theirs(text, add_special_tokens=False).input_ids, theirs.eos_token_id] == ids
    if kind == "folder":
        messages = [{"role": "user", "content": TEXTS[0]}, {"role": "assistant", "content": TEXTS[1]}]
        assert theirs.apply_chat_template(messages, tokenize=False) == f"user: {TEXTS[0]}\nassistant: {TEXTS[1]}\n"
        assert theirs(TEXTS, padding=True).attention_mask[0][-1] == 0
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    assert model.generation_config.eos_token_id == model.config.eos_token_id == theirs.eos_token_id


def llama_cpp(folder: Path) -> Path:
    """Download llama.cpp's Python sources, which a source distribution contains; skip where that is impossible."""
    version = "0.3.36"
    words = f"-m pip download llama-cpp-python=={version} --no-deps --no-binary llama-cpp-python".split()
    try:
        subprocess.run([sys.executable, *words], cwd=folder, capture_output=True, timeout=300, check=True)
    except subprocess.SubprocessError:
        pytest.skip("llama-cpp-python cannot be downloaded")
    name = f"llama_cpp_python-{version}"
    wanted = re.compile(f"{name}/vendor/llama.cpp/(convert_hf_to_gguf.py|conversion/|gguf-py/).*")
    with tarfile.open(folder / f"{name}.tar.gz") as archive:
        archive.extractall(folder, [each for each in archive if wanted.match(each.name)], filter="data")
    return folder / name / "vendor" / "llama.cpp"


@pytest.mark.exhaustive
def test_a_gguf_converter_reads_an_exported_llama(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With llama.cpp's own converter: every tensor, and the pieces and scores of the SentencePiece model."""
    converter = llama_cpp(tmp_path)
    monkeypatch.syspath_prepend(converter / "gguf-py")
    reader_of = importlib.import_module("gguf").GGUFReader
    folder, _ = trained_gpt(tmp_path, "SentencePiece", steps=1)
    command = [sys.executable, str(converter / "convert_hf_to_gguf.py"), str(folder), "--outtype", "f32"]
    command += ["--outfile", str(tmp_path / "model.gguf")]
    finished = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=120, check=False)
    assert finished.returncode == 0, finished.stderr
    reader = reader_of(tmp_path / "model.gguf")
    fields = {name: each.contents() for name, each in reader.fields.items()}
    pieces = sentencepiece.SentencePieceProcessor(model_file=str(tmp_path / "theirs.model"))
    ids = range(pieces.get_piece_size())
    assert fields["tokenizer.ggml.tokens"] == [pieces.id_to_piece(each) for each in ids]
    assert fields["tokenizer.ggml.scores"] == pytest.approx([pieces.get_score(each) for each in ids])
    config = transformers.AutoConfig.from_pretrained(folder)
    assert fields["general.architecture"] == "llama"
    assert fields["tokenizer.ggml.eos_token_id"] == config.eos_token_id
    # In this format, the rows of queries and keys have another order within each head.
    weights = transformers.AutoModelForCausalLM.from_pretrained(folder).state_dict().values()
    expected = sorted(sorted(each.flatten().tolist()) for each in weights)
    assert sorted(sorted(each.data.flatten().tolist()) for each in reader.tensors) == expected


def test_text_generation_ends_with_the_document(gpt: Path) -> None:
    """Single texts and a padded batch are continued."""
    writer: Any = transformers.pipeline("text-generation", model=str(gpt))
    for text, (first, *_) in zip(TEXTS, WORDS, strict=True):
        (generated,) = writer(first, max_new_tokens=28, do_sample=False)
        assert generated["generated_text"] == text
        words = ["--prompt", first, "--temperature", 0, "--max-new-tokens", 24, "--device", "cpu"]
        assert run_command(generate, "--checkpoint", gpt, *words).out == f"{text}\n"
    tokenizer = writer.tokenizer
    tokenizer.padding_side, tokenizer.pad_token = "left", tokenizer.eos_token  # as for any GPT trained without padding
    prompts = [" ".join(words[: number + 1]) for number, words in enumerate(WORDS)]
    assert len({len(tokenizer(prompt).input_ids) for prompt in prompts}) > 1
    batch = writer(prompts, batch_size=len(prompts), max_new_tokens=28, do_sample=False)
    assert [generated["generated_text"] for (generated,) in batch] == TEXTS


def test_gaps_are_filled_by_a_pipeline(tmp_path: Path) -> None:
    data = write_corpus(tmp_path)
    data.tokenizer = f"bert-uncased:{data.tokenizer}"
    model = BertModelConfig(vocabulary_size=61, num_layers=2, hidden_size=32, num_heads=4, max_positions=32)
    folder = exported(tmp_path, make_bert_config(data, model, training={"steps": 3}))
    text = "word1 word2 [MASK] word4"
    filler: Any = transformers.pipeline("fill-mask", model=str(folder))
    assert type(filler.model) is transformers.BertForMaskedLM
    (filled,) = filler(text, top_k=1)
    printed = run_command(fill_mask, "--checkpoint", folder, "--text", text, "--top-k", 1, "--device", "cpu")
    assert f"gap 1: {filled['token_str']} {filled['score']:.1%}\n" in printed.out
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    first, second = tokenizer(["word1", "word2 word3"], ["word4", "word5"], padding=True).input_ids
    names = "[CLS] word1 [SEP] word4 [SEP] [PAD]", "[CLS] word2 word3 [SEP] word5 [SEP]"
    assert [first, second] == [tokenizer.convert_tokens_to_ids(each.split()) for each in names]


KINDS = {
    "ends": {
        "output_type": "multiple_choice",
        "doc_to_text": "{{start}}",
        "doc_to_choice": "{{ends}}",
        "doc_to_target": "right",
        "metric_list": [{"metric": "acc"}],
    },
    "whole": {
        "output_type": "loglikelihood_rolling",
        "doc_to_text": "",
        "doc_to_target": "{{start}}{{ends[0]}}{{ends[0]}}{{ends[0]}}{{ends[0]}}",
        "metric_list": [{"metric": "word_perplexity"}, {"metric": "bits_per_byte"}],
    },
    "written": {
        "output_type": "generate_until",
        "doc_to_text": "{{start}}",
        "doc_to_target": "{{ends[0].split('t')[0]}}",
        "generation_kwargs": {"until": ["t", "ï"], "max_gen_toks": 20, "repetition_penalty": 1.05},
        "metric_list": [{"metric": "exact_match"}],
    },
}
"""Tasks of every kind of request."""


@pytest.fixture
def tasks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of tasks that ask for the ends of TEXTS."""
    pytest.importorskip("lm_eval", reason="lm-eval is not installed (extra `evaluation`)")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    documents = [
        {"start": first, "ends": [text.removeprefix(first), " other words."], "right": 0}
        for text, (first, *_) in zip(TEXTS, WORDS, strict=True)
    ]
    write_json_lines(tmp_path / "ends.jsonl", documents)
    for name, kind in KINDS.items():
        task = {
            "task": name,
            "dataset_path": "json",
            "dataset_kwargs": {"data_files": {"test": str(tmp_path / "ends.jsonl")}},
            "test_split": "test",
            "target_delimiter": "",
            **kind,
        }
        (tmp_path / f"{name}.yaml").write_text(json.dumps(task))
    return tmp_path


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.exhaustive)])
def test_tasks_have_the_scores_of_lm_evals_own_loader(ranks: int, gpt: Path, tasks: Path) -> None:
    from lm_eval import simple_evaluate
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    theirs = simple_evaluate(
        HFLM(pretrained=str(gpt), device="cpu", batch_size=2),
        tasks=list(KINDS),
        task_manager=TaskManager(include_path=str(tasks), include_defaults=False),
    )["results"]
    assert theirs["ends"]["acc,none"] == 1.0
    words = ["--checkpoint", str(gpt), "--device", "cpu", "--json", "--tasks", ",".join(KINDS)]
    words += ["--tasks-folder", str(tasks), "--tensor", str(ranks)]
    if ranks == 1:
        output = run_command(evaluate, *words).out
    else:
        torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}", "-m", "megapipe"]
        command = [sys.executable, *torchrun, "evaluate", *words]
        finished = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=120, check=False)
        assert finished.returncode == 0, finished.stderr
        output = finished.stdout
    scores = json.loads(output.splitlines()[-1])["tasks"]
    for name in KINDS:
        numbers = {metric: each for metric, each in theirs[name].items() if isinstance(each, float)}
        assert numbers
        for metric, number in numbers.items():
            assert scores[name][metric] == pytest.approx(number, rel=1e-4, nan_ok=True), (name, metric)


@pytest.mark.slow
def test_tasks_that_cannot_be_answered_are_refused(gpt: Path, tasks: Path) -> None:
    words = ["--checkpoint", gpt, "--device", "cpu", "--tasks-folder", tasks, "--tasks"]
    messages = run_command(evaluate, *words, "end", status=2).err
    assert f"no task 'end' in {tasks}: it has ends, whole, written" in messages
    changed = KINDS["written"] | {"generation_kwargs": {"max_gen_toks": 40, "num_beams": 2}}
    task = json.loads((tasks / "written.yaml").read_text()) | changed
    (tasks / "written.yaml").write_text(json.dumps(task))
    messages = run_command(evaluate, *words, "written", status=2).err
    assert "generation_kwargs of the task has num_beams" in messages
    assert "the task generates 40 tokens, but the model has 32 positions" in messages
