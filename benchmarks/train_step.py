"""Compare training steps of megapipe, Hugging Face's GPT2LMHeadModel and a plain torch GPT in tokens per second.

All contestants have the same size, dtype, micro-batches, gradient clip and AdamW. On a CPU they take turns, so that a
change of the machine's load affects all of them, and a second part compares a pipeline of two megapipe ranks with one
rank that has the same number of threads. On a GPU the peers are compiled by torch.compile, and the contestants run one
after another, so that each can use all of the memory. The last line of the output is one JSON object; on a GPU, an
object with the results so far also follows each contestant.

    python benchmarks/train_step.py --repeats 9
    python benchmarks/train_step.py --device cuda --precision bf16 --models 124m 350m 1.3b
"""

import argparse
import json
import math
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import torch
from train_step_contest.contestants import Setting, configuration, contestants
from train_step_contest.models import MODELS
from train_step_contest.pipeline import ALONE, PIPELINE, pipeline_seconds
from train_step_contest.timing import Rate, in_turns, one_by_one, paired_ratio, rates, ratio_to_best_peer, show, timed

from megapipe.spec.layers import model_layers
from megapipe.training.observe.display import UtilisationMeter, device_peak

Result = dict[str, Any]


def measure(name: str, setting: Setting, options: argparse.Namespace, report: Callable[[Result], None]) -> Result:
    """Measure all contestants with one model in this process. report: on a GPU, called with the results so far after
    each contestant."""
    print(f"{name}, {setting.precision}, {setting.device.type}", flush=True)
    makers = contestants(setting)
    config = configuration(setting, 1, compiled=False)
    peak = device_peak(setting.device, setting.precision)
    meter = UtilisationMeter(config, model_layers(config.model), peak, 1)
    tokens = setting.training.num_tokens

    def rates_of(seconds: dict[str, list[float]]) -> dict[str, Rate]:
        return rates(seconds, tokens, lambda elapsed: meter.mfu(tokens, elapsed))

    def result(seconds: dict[str, list[float]], failures: dict[str, str]) -> Result:
        return {
            "model": name,
            "contestants": {each: asdict(rate) for each, rate in rates_of(seconds).items()},
            "failures": dict(failures),
            "ratio_to_best_peer": ratio_to_best_peer(seconds),
        }

    failures: dict[str, str] = {}
    if setting.device.type == "cuda":
        seconds, failures = one_by_one(
            makers, setting.device, options.repeats, options.deadline, lambda *results: report(result(*results))
        )
    else:
        steps = {contestant: build() for contestant, build in makers.items()}
        turns = {each: lambda s=step: timed(s, setting.device) for each, step in steps.items()}
        seconds = in_turns(turns, options.repeats)
    show(f"{name}, {setting.precision}, {tokens} tokens a step, peak {peak}", rates_of(seconds))
    print(f"  megapipe over the best peer: {ratio_to_best_peer(seconds)}")
    return result(seconds, failures)


def measure_pipeline(setting: Setting, repeats: int) -> dict[str, Any]:
    """Compare a pipeline of two ranks with one rank."""
    seconds = pipeline_seconds(setting, repeats)
    step_rates = rates(seconds, setting.training.num_tokens, lambda elapsed: None)
    ratio = paired_ratio([seconds[PIPELINE]], [seconds[ALONE]])
    show("two threads in all", step_rates)
    print(f"  two ranks over one: {ratio}")
    return {"contestants": {each: asdict(rate) for each, rate in step_rates.items()}, "ratio": ratio}


def summary(results: list[dict[str, Any]]) -> str:
    """Return one line for a table of many benchmarks."""
    parts = []
    for result in results:
        rates_of_ours = [rate for name, rate in result["contestants"].items() if name.startswith("megapipe")]
        best = max(rates_of_ours, key=lambda rate: rate["tokens_per_second"], default=None)
        if best is None:
            parts.append(f"{result['model']}: megapipe failed")
            continue
        mfu = "unknown" if best["mfu"] is None else f"{best['mfu']:.1%}"
        ratio = result["ratio_to_best_peer"]
        comparison = "no peer ran" if ratio is None else f"{ratio} of the best peer"
        lost = f", without {', '.join(result['failures'])}" if result["failures"] else ""
        parts.append(f"{result['model']}: {best['tokens_per_second']:,.0f} tokens/s, MFU {mfu}, {comparison}{lost}")
    return "; ".join(parts)


def arguments() -> argparse.Namespace:
    """Parse the command line."""
    on_gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=list(MODELS), help="5m on a processor, all real ones on a GPU")
    parser.add_argument("--precision", choices=["fp32", "bf16"], default="fp32")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if on_gpu else "cpu")
    parser.add_argument(
        "--compile", action=argparse.BooleanOptionalAction, help="also compile the peers; the default on a GPU"
    )
    parser.add_argument("--threads", type=int, default=1, help="threads of a process on a CPU")
    parser.add_argument("--repeats", type=int, default=9, help="at least 2")
    parser.add_argument(
        "--seconds", type=float, default=math.inf, help="on a GPU: start no contestant later than this"
    )
    options = parser.parse_args()
    if options.device == "cuda" and not on_gpu:
        parser.error("no NVIDIA GPU is visible to torch; use --device cpu")
    if options.repeats < 2:
        parser.error(f"--repeats is {options.repeats}; quartiles need at least 2")
    options.deadline = time.monotonic() + options.seconds
    options.compile = options.device == "cuda" if options.compile is None else options.compile
    options.models = options.models or (["124m", "350m", "1.3b"] if options.device == "cuda" else ["5m"])
    return options


def main() -> None:
    """Measure, print tables, and print one JSON object at the end."""
    options = arguments()
    torch.set_num_threads(options.threads)
    device = torch.device(options.device)
    settings = {name: Setting(MODELS[name], options.precision, device, options.compile) for name in options.models}
    recorded = {name: value for name, value in vars(options).items() if name not in ("seconds", "deadline")}
    results: list[Result] = []

    def facts(models: list[Result]) -> Result:
        about = {"benchmark": "train_step", "arguments": recorded, "torch": torch.__version__}
        return {**about, "models": models, "summary": summary(models)}

    for name, setting in settings.items():
        results.append(
            measure(name, setting, options, lambda result: print(json.dumps(facts([*results, result])), flush=True))
        )
    pipeline = (
        {} if device.type == "cuda" else {"pipeline": measure_pipeline(settings[options.models[0]], options.repeats)}
    )
    print(json.dumps(facts(results) | pipeline))


if __name__ == "__main__":
    main()
