"""Measure how precisions and optimizers change the losses of a small GPT over bytes, and draw a picture for each.

Every run starts from the same weights on the same batches in one process on a CPU, where bf16, fp16 and fp8 round as
they do on a GPU (fp8 is emulated) but save no time. The data are those of examples/gpt_tiny.yaml.

    .venv/bin/python benchmarks/precision_losses.py --steps 150
"""

import argparse
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

PRECISIONS = {
    "fp32": ["--training.precision=fp32"],
    "bf16": ["--training.precision=bf16"],
    "bf16, no master": ["--training.precision=bf16", "--training.master_weights=false"],
    "fp16": ["--training.precision=fp16", "--loss_scale.window=100"],
    "bf16, fp8 tensorwise": ["--training.precision=bf16", "--training.fp8=tensorwise"],
    "bf16, fp8 rowwise": ["--training.precision=bf16", "--training.fp8=rowwise"],
}
MUON = ["--training.precision=fp32", "--optimizer.name=muon"]
HIGHER = "--optimizer.learning_rate=0.004"
OPTIMIZERS = {
    "adamw": PRECISIONS["fp32"],
    "adamw, 4e-3": [*PRECISIONS["fp32"], HIGHER],
    "muon": MUON,
    "muon, 4e-3": [*MUON, HIGHER],
}
PICTURES = {"precision_loss.png": PRECISIONS, "optimizer_loss.png": OPTIMIZERS}

MODEL = [
    "--model.num_layers=2", "--model.hidden_size=64", "--model.num_heads=4", "--data.sequence_length=64",
    "--batch.micro_size=8",
]  # fmt: skip


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--learning-rate", type=float, default=1.5e-3, help="peak, unless a run sets its own")
    parser.add_argument("--prefix", type=Path, default=Path("data/stdlib_text_document"), help="shard of bytes")
    parser.add_argument("--folder", type=Path, default=Path("runs/precision_losses"), help="where the runs go")
    parser.add_argument(
        "--pictures", type=Path, default=None, help="folder of the pictures; default: that of the runs"
    )
    return parser.parse_args()


def train(name: str, options: list[str], arguments: argparse.Namespace) -> Path:
    """Train one run and return its folder."""
    folder: Path = arguments.folder / name.replace(", ", "_").replace(" ", "_")
    if not arguments.prefix.with_suffix(".bin").is_file():
        sys.exit(f"{arguments.prefix}.bin does not exist; examples/gpt_tiny.yaml says how to make it, or use --prefix")
    command = [
        sys.executable, "pretrain_gpt.py", "--config", "examples/gpt_tiny.yaml", "--data.prefix",
        str(arguments.prefix), *MODEL, "--parallel.device=cpu", "--training.directory", str(folder),
        "--training.steps", str(arguments.steps), "--optimizer.warmup_steps", str(max(1, arguments.steps // 10)),
        "--optimizer.learning_rate", str(arguments.learning_rate), "--training.log_every=50",
        "--checkpoint.every", "null", "--checkpoint.at_end", "false",
        "--evaluation.every", str(max(1, arguments.steps // 4)), *options,
    ]  # fmt: skip
    subprocess.run(command, cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": "1"}, check=True)
    return folder


def main() -> None:
    arguments = parse()
    for path in ("prefix", "folder"):
        setattr(arguments, path, getattr(arguments, path).resolve())
    done: dict[tuple[str, ...], Path] = {}
    folders: dict[str, dict[str, Path]] = {picture: {} for picture in PICTURES}
    for picture, runs in PICTURES.items():
        for name, options in runs.items():
            if tuple(options) not in done:  # fp32 is in both pictures
                done[tuple(options)] = train(name, options, arguments)
            folders[picture][name] = done[tuple(options)]

    # Imported after the runs, because torch takes a second, and wrong arguments should be reported without this delay.
    from megapipe.config.load import parse as parse_config
    from megapipe.training.loop.batches import reference_losses, split_samples
    from megapipe.training.observe.metrics import METRICS, LossHistory, draw_loss_curves, read_losses

    data = ["--config", str(ROOT / "examples/gpt_tiny.yaml"), "--data.prefix", str(arguments.prefix)]
    config = parse_config(data)
    references = reference_losses(split_samples(config, "train"), config.model.vocabulary_size)
    print(f"\n{'run':<24}{'mean of last 20':>18}{'held-out loss':>16}{'skipped':>9}")
    for picture, runs in folders.items():
        histories = {name: read_losses(folder / METRICS) for name, folder in runs.items()}
        title = f"GPT over bytes, {arguments.steps} steps, learning rate {arguments.learning_rate:g}"
        path = (arguments.pictures or arguments.folder) / picture
        training = {name: LossHistory(history.training) for name, history in histories.items()}
        draw_loss_curves(path, training, references, title)
        for name, history in histories.items():
            last = [history.training[step] for step in sorted(history.training)[-20:]]
            lines = (runs[name] / METRICS).read_text().splitlines()
            skipped = sum('"skipped": true' in line for line in lines)
            held_out = history.evaluation[max(history.evaluation)]
            print(f"{name:<24}{sum(last) / len(last):>18.4f}{held_out:>16.4f}{skipped:>9}")
        print(f"picture: {path}")


if __name__ == "__main__":
    main()
