"""examples/bert_quickstart.yaml does what its comment says, and learns more than the frequencies of tokens."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
EXAMPLE = ROOT / "examples/bert_quickstart.yaml"
MARGIN = 0.5


@pytest.mark.slow
def test_masked_tokens_are_told_better_than_by_their_frequency(tmp_path: Path) -> None:
    pytest.importorskip("sentencex")  # splits sentences
    comment = "\n".join(line[1:].strip() for line in EXAMPLE.read_text().splitlines() if line.startswith("#"))
    commands = [
        command.replace("\\\n", " ") for command in re.findall(r"^python (?:.*\\\n)*.*$", comment, re.MULTILINE)
    ]
    assert len(commands) == 2
    (tmp_path / "data/bert").mkdir(parents=True)
    (tmp_path / "tools").symlink_to(ROOT / "tools")
    for command in commands:
        subprocess.run([sys.executable, *command.split()[1:]], cwd=tmp_path, check=True, timeout=300)
    program = [sys.executable, str(ROOT / "pretrain_bert.py"), "--config", str(EXAMPLE)]
    told = subprocess.run(program, cwd=tmp_path, check=True, timeout=1500, capture_output=True, text=True).stdout
    unigram = float(re.findall(r"unigram entropy (\d+\.\d+)", told)[0])
    lines = (tmp_path / "runs/bert_quickstart/metrics.jsonl").read_text().splitlines()
    evaluations = [record for record in map(json.loads, lines) if record.get("event") == "evaluation"]
    assert evaluations[-1]["terms"]["mlm"] < unigram - MARGIN
    assert evaluations[-1]["accuracies"]["mlm"] > 0.15
