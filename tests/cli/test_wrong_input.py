"""Wrong command lines: the last line on the screen is the reason, and the exit status is 2."""

import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from megapipe.cli.main import main
from tests.support.gpt_runs import write_shard
from tests.support.launch import ROOT

WRONG = """
trian | did you mean 'train'?
evaluation | unknown command 'evaluation'
--config quickstart | unknown command '--config'
help trian | unknown field or command 'trian'; did you mean 'train'?
help parallel.tensr | did you mean 'parallel.tensor'?
help n_embd | nanoGPT's n_embd is --model.hidden_size here
help every | a field of several groups: write one of recompute.every,
help parallel.tensor 2 | unexpected argument '2'
train --kind t5 --config quickstart | invalid choice: 't5'
train --config quikstart | did you mean quickstart or bert_quickstart?
train --config nothing_like_it | the packaged ones are bert_quickstart,
train --model llama_8b | did you mean llama3_8b
train --model quickstart | pass the packaged file of this name as --config quickstart
train --parallel pipeline | pass the packaged file of this name as --config pipeline
train --data.pairs order --data.isolate true | unknown configuration key 'data.isolate'
train -n 0 --config quickstart | is 0, but must be at least 1
train -n two --config quickstart | is 'two', but must be a whole number
train -n 2 --nodes 2 --config quickstart | needs --rendezvous HOST:PORT
train -n 2 --nodes 2 --rendezvous node0 --config quickstart | must be HOST:PORT
train -n 2 --nodes 2 --rendezvous localhost:0 --config quickstart | must be HOST:PORT
train -n 2 --nodes 2 --rendezvous no-such-host.invalid:29500 --config quickstart | is not known here
train -n 2 --restarts -1 --config quickstart | must be at least 0
train -n 2 --config quikstart | did you mean quickstart or bert_quickstart?
train --config gpt_tiny --data.prefix nowhere | nowhere.idx does not exist
train --config gpt_tiny --data.prefix corpus --parallel.data 2 | start that many, as with megapipe train -n 2
train --config gpt_tiny --data.prefix corpus --data.split 9,-1 | data.split is '9,-1'; it must be one to three
train --config gpt_tiny --data.prefix corpus --training.directory '' | training.directory is empty; name a folder
train --config gpt_tiny --data.prefix corpus --plan nowhere.yaml | nowhere.yaml
train --config gpt_tiny --data.prefix corpus --init_from nowhere | nowhere
preprocess | required: --input, --tokenizer, --output-prefix
preprocess --input nowhere --output-prefix out --tokenizer bytes | nowhere
preprocess --input text.txt --output-prefix out --tokenizer nowhere | nowhere
preprocess --input text.txt --output-prefix out --tokenizer bytes --workers x | whole number
preprocess train-tokenizer --input text.txt --type word --vocabulary-size 99 --output t.json | invalid choice: 'word'
plan serch | did you mean 'search'?
plan search --devices 8 --batch.global_size 8 | --hardware is missing
plan search --hardware h1000 --devices 8 --batch.global_size 8 | h1000
plan search --hardware h100 --devices 0 --model llama3_8b --batch.global_size 8 | --devices is 0; it must be at least 1
plan predict --model gpt3_1.3b --hardware a100-80 --devices 1 --pictures text.txt/p | text.txt/p cannot be written
plan search --hardware h100 --devices 8 --model llama3_9b | did you mean llama3_8b
plan predict --config missing.yaml --hardware h100 --devices 8 | missing.yaml: the file does not exist
plan links --hardware h100 --output links.yaml --megabytes 1e400 | --megabytes is inf; it must be from 0.000001
plan profile --output machine.yaml --ranks 1000000000000 | --ranks is 1,000,000,000,000; it must be from 1 to 1024
plan dry-run nowhere.yaml --devices 8 | nowhere.yaml
schedule | a command is missing; write one of list, validate
schedule shwo | invalid choice: 'shwo'
schedule show --schedule 1f2b | unknown schedule '1f2b'
schedule show --ranks 0 | the number of pipeline ranks of 1f1b is 0
schedule validate nowhere.txt | nowhere.txt
schedule overlay nowhere | nowhere
data inspect nowhere | nowhere
data stalls --config missing.yaml | missing.yaml
data stalls --config gpt_tiny --ingestion-tokens-per-second 1e-300 | must be a finite number of tokens of at least 1
convert | a command is missing; write one of convert, inspect
convert convert nowhere --to hf out | nowhere
convert inspect text.txt | text.txt
generate --prompt x | required: --checkpoint
generate --checkpoint nowhere --prompt x | nowhere
generate --checkpoint . | nothing to generate
generate --checkpoint . --prompt-file nowhere | cannot read nowhere
generate --checkpoint . --prompt x --top-p 2 | top-p is 2.0
generate --checkpoint . --prompt x --stop '' | stop string 1 is ''
evaluate | required: --checkpoint
evaluate --checkpoint nowhere | nowhere is not a folder
evaluate --checkpoint . --split all | invalid choice: 'all'
evaluate --checkpoint . --split test --data-prefix corpus | --split selects a split of the training data
evaluate --checkpoint . --tokenizer bytes | --tasks-folder and --tokenizer are for --tasks
evaluate --checkpoint . --tasks hellaswag --split test | --tasks has its own texts
evaluate --checkpoint . --tasks hellaswag --tasks-folder nowhere | --tasks-folder nowhere is not a folder
fill-mask --text x | required: --checkpoint
fill-mask --checkpoint nowhere --text x | nowhere
"""
"""Arguments, and a part of the last line. config/test_load.py has wrong files and flags of a run."""
CASES = [tuple(part.strip() for part in line.split("|")) for line in WRONG.strip().splitlines()]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.chdir(tmp_path)
    write_shard(tmp_path)
    (tmp_path / "text.txt").write_text("some text\n")
    handlers = {number: signal.getsignal(number) for number in signal.valid_signals()}
    yield tmp_path
    for number, handler in handlers.items():
        if handler is not None and signal.getsignal(number) != handler:
            signal.signal(number, handler)


@pytest.mark.slow
def test_the_last_line_is_the_reason(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    wrong = []
    for arguments, reason in CASES:
        try:
            status: object = main(shlex.split(arguments))
        except SystemExit as end:
            status = end.code
        output, errors = capsys.readouterr()
        last = (errors.splitlines() or [""])[-1]
        started = output not in ("", "loading torch\n")
        if status != 2 or reason not in last or started or len(errors.splitlines()) > 1:
            wrong.append((arguments, reason, status, output, errors))
    assert not wrong


def test_wrong_flags_of_trained_models_are_refused_before_torch_is_imported() -> None:
    program = (
        "import shlex, sys\nfrom megapipe.cli.main import main\n"
        "for line in sys.stdin:\n"
        "    try:\n        main(shlex.split(line))\n    except SystemExit:\n        pass\n"
        "    assert 'torch' not in sys.modules, line\n"
    )
    lines = "\n".join(line for line, _ in CASES if line.startswith(("generate", "evaluate", "fill-mask")))
    done = subprocess.run([sys.executable, "-c", program], input=lines, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
