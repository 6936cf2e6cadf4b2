"""Requests to `megapipe plan`, and their answers in tests/golden/answers.json.xz.

    python -m tests.golden.answers --write

asks all of them again and writes the file. A change of an answer belongs to the commit that explains it.
"""

import contextlib
import io
import json
import lzma
import random
import sys
from pathlib import Path
from typing import Any

from megapipe.cli.main import plan

ANSWERS = Path(__file__).parent / "answers.json.xz"
DENSE = ("gpt2_124m", "gpt3_1.3b", "gpt3_6.7b", "llama3.2_1b", "llama3_8b", "qwen3_8b", "mistral_7b", "megatron_18.4b")
OTHERS = ("mixtral_8x7b", "bert_large", "megatron_bert_1.3b")
HARDWARE = ("a100-80", "a100-40", "h100", "v100-32", "h200")
SCHEDULES: tuple[dict[str, Any], ...] = (
    *({"name": name} for name in ("gpipe", "1f1b", "zb_h1", "zb_h2", "2bw", "pipedream")),
    *({"name": name, "chunks": 2} for name in ("interleaved_1f1b", "modular", "zb_v")),
)
SEARCHES = (
    ("gpt3_1.3b", "a100-80", 16, 512),
    ("llama3_8b", "h100", 32, 256),
    ("mixtral_8x7b", "h100", 64, 512),
    ("bert_large", "v100-32", 8, 256),
    ("megatron_39.1b", "a100-80", 64, 1536),
    ("llama2_13b", "a100-40", 24, 480),
)
SEARCH_FLAGS = ((), ("--schedule.name", "zb_h1"), ("--parallel.tensor", "2"), ("--recompute.method", "selective"))


def requests() -> list[list[str]]:
    """Return the arguments of every request: predictions and dry runs of random layouts, and searches."""
    draw = random.Random(13)
    drawn = [_layout(draw, "predict") for _ in range(150)]
    drawn += [_layout(draw, "dry-run") for _ in range(26)]
    for model, hardware, devices, batch in SEARCHES:
        for flags in SEARCH_FLAGS:
            named = ["--hardware", hardware, "--devices", str(devices), "--batch.global_size", str(batch)]
            drawn.append(["search", *_model(model), *named, "--json", *flags])
    return drawn


def answer(arguments: list[str]) -> dict[str, Any]:
    """Return the exit status of a request, and its JSON or its error lines."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        status = plan(arguments)
    printed = json.loads(out.getvalue() or "null")
    for timed in (printed, (printed or {}).get("search")) if arguments[0] != "predict" else ():
        if timed:
            timed.pop("seconds", None)  # of the clock
    return {"status": status, "answer": printed, "errors": err.getvalue().splitlines()}


def stored() -> list[dict[str, Any]]:
    """Return the answers in the file, in the order of the requests."""
    answers: list[dict[str, Any]] = json.loads(lzma.decompress(ANSWERS.read_bytes()))
    return answers


def _model(name: str) -> list[str]:
    return ["--model", name]


def _layout(draw: random.Random, command: str) -> list[str]:
    others = OTHERS if command == "predict" else OTHERS[:1]
    model = draw.choice(DENSE if draw.random() < 0.7 else others)
    tensor, pipeline, data = draw.choice([1, 1, 2, 4]), draw.choice([1, 2, 4, 8]), draw.choice([1, 2, 4])
    context = draw.choice([1, 1, 1, 2])
    schedule = draw.choice(SCHEDULES) if pipeline > 1 else {"name": "1f1b"}
    fields: dict[str, Any] = {
        "parallel.tensor": tensor,
        "parallel.pipeline": pipeline,
        "parallel.context": context,
        "batch.micro_size": draw.choice([1, 2, 4]),
        "batch.global_size": 16 * draw.choice([1, 2, 4]),
        "training.precision": draw.choice(["bf16", "bf16", "bf16", "fp32", "fp16"]),
        **{f"schedule.{name}": value for name, value in schedule.items()},
    }
    if tensor > 1 and draw.random() < 0.5:
        fields["parallel.sequence"] = "true"
        fields["parallel.sequence_chunks"] = draw.choice([1, 2])
    if context > 1:
        fields["parallel.context_attention"] = draw.choice(["ring", "all_to_all"])
    if data * context > 1:
        fields["zero.stage"] = draw.choice([0, 1, 2, 3])
    if draw.random() < 0.5:
        fields["recompute.method"] = draw.choice(["full", "selective"])
    if draw.random() < 0.2:
        fields["recompute.logits"] = "true"
    if draw.random() < 0.2:
        fields["optimizer.name"] = draw.choice(["muon", "sgd"])
    if draw.random() < 0.15:
        fields |= draw.choice(
            [
                {"offload.optimizer": "true"},
                {"offload.activations": "blocks"},
                {"offload.optimizer": "true", "offload.weights": "true"},
                {"training.fp8": "tensorwise"},
                {"data.isolate_documents": "true"},
                {"schedule.two_bp": "true"},
            ]
        )
    if schedule["name"] in ("2bw", "pipedream"):
        fields |= {"optimizer.clip_norm": "null", "model.tie_embeddings": "false"}
    devices = str(tensor * pipeline * data * context)
    flags = ["--hardware", draw.choice(HARDWARE), "--devices", devices, "--json"]
    named = [word for name, value in fields.items() for word in (f"--{name}", str(value))]
    file = [] if command == "predict" else ["quickstart"]
    return [command, *file, *_model(model), *flags, *named]


if __name__ == "__main__":
    if sys.argv[1:] != ["--write"]:
        sys.exit(__doc__)
    text = json.dumps([answer(arguments) for arguments in requests()], sort_keys=True)
    ANSWERS.write_bytes(lzma.compress(text.encode()))
