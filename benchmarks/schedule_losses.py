"""Measure how stale gradients change the losses of a model: train the quickstart's GPT with several schedules.

Every schedule trains the same model from the same initial weights on the same batches, in a pipeline of two processes.
Schedules of one numerical class give the same bits; 2bw, whose gradients are one step old, does not. The losses are
drawn in one picture, and the final losses are printed. Corpus and tokenizer are those that `make quickstart` makes.

    .venv/bin/python benchmarks/schedule_losses.py --schedules 1f1b 2bw --steps 200
"""

import argparse
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--schedules", nargs="+", default=["1f1b", "2bw"], metavar="NAME")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--learning-rate", type=float, default=1e-3, help="peak; stale gradients need a lower one")
    parser.add_argument("--quickstart", type=Path, default=Path("runs/quickstart"), help="folder of `make quickstart`")
    parser.add_argument("--folder", type=Path, default=Path("runs/schedule_losses"), help="where the runs go")
    parser.add_argument("--picture", type=Path, default=None, help="default: losses.png in the folder")
    return parser.parse_args()


def train(name: str, arguments: argparse.Namespace) -> Path:
    """Train with one schedule, and return the folder of the run."""
    folder = arguments.folder / name
    prefix = arguments.quickstart / "corpus_text_document"
    if not prefix.with_suffix(".bin").is_file():
        sys.exit(f"{prefix}.bin does not exist; run `make quickstart` first, or name its folder with --quickstart")
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", "pretrain_gpt.py",
        "--config", "examples/quickstart.yaml", "--data.prefix", str(prefix), "--training.directory", str(folder),
        "--training.steps", str(arguments.steps), "--optimizer.warmup_steps", str(max(1, arguments.steps // 10)),
        "--training.precision", "fp32", "--parallel.pipeline", "2", "--schedule.name", name,
        "--optimizer.learning_rate", str(arguments.learning_rate),
        "--checkpoint.every", "null", "--checkpoint.at_end", "false",
        "--evaluation.every", str(max(1, arguments.steps // 4)),
    ]  # fmt: skip
    subprocess.run(command, cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": "1"}, check=True)
    return folder


def main() -> None:
    arguments = parse()
    for path in ("quickstart", "folder"):
        setattr(arguments, path, getattr(arguments, path).resolve())
    folders = {name: train(name, arguments) for name in arguments.schedules}

    # Imported after the runs, because torch takes a second, and wrong arguments should be reported without this delay.
    from megapipe.config.load import parse as parse_config
    from megapipe.training.loop.batches import reference_losses, split_samples
    from megapipe.training.observe.metrics import METRICS, draw_loss_curves, read_losses

    histories = {name: read_losses(folder / METRICS) for name, folder in folders.items()}
    prefix = str(arguments.quickstart / "corpus_text_document")
    config = parse_config(["--config", str(ROOT / "examples/quickstart.yaml"), "--data.prefix", prefix])
    references = reference_losses(split_samples(config, "train"), config.model.vocabulary_size)
    picture = arguments.picture or arguments.folder / "losses.png"
    title = f"quickstart GPT, two pipeline ranks, {arguments.steps} steps, learning rate {arguments.learning_rate:g}"
    draw_loss_curves(picture, histories, references, title)
    print(f"\n{'schedule':<20}{'last training loss':>20}{'mean of last 20':>18}{'held-out loss':>16}")
    for name, history in histories.items():
        last = [history.training[step] for step in sorted(history.training)[-20:]]
        held_out = history.evaluation[max(history.evaluation)]
        print(f"{name:<20}{last[-1]:>20.4f}{sum(last) / len(last):>18.4f}{held_out:>16.4f}")
    print(f"picture: {picture}")


if __name__ == "__main__":
    main()
