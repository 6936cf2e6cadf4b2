"""Compare the speed of kernels with the speed of memory, and with torch, torch.compile, apex and Liger.

Every op of the registry is measured in bf16, forward only and with the backward. The bytes that the op must move by
its definition, divided by its time, are reported as a fraction of the device's measured copy speed.

    python benchmarks/kernel_speed.py --write               # every size, some 20 minutes, on a GPU
    python benchmarks/kernel_speed.py --quick               # one size of each op, three minutes at most
    python benchmarks/kernel_speed.py --ops rms_norm softmax
    python benchmarks/kernel_speed.py --device cpu          # tries the script; its figures mean nothing
"""

import argparse
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path

import torch
from kernel_speed_contest.case import Case, Size
from kernel_speed_contest.cases import CASES
from kernel_speed_contest.clock import Clock, measured_ceiling
from kernel_speed_contest.race import Figure, failure_of, run
from kernel_speed_contest.table import MEANINGLESS, Findings, document, summary, write

RESULTS = Path(__file__).parent / "results"
QUICK_SECONDS = 170.0


def sizes_of(case: Case, device: torch.device, quick: bool) -> Sequence[Size]:
    """Return the sizes of a case that a run measures; on a CPU only a tiny one."""
    if device.type != "cuda":
        return [case.tiny]
    return [case.quick] if quick else case.sizes


def measure(
    cases: Sequence[Case],
    device: torch.device,
    options: argparse.Namespace,
    keep: Callable[[Findings], object] = lambda findings: None,
) -> Findings:
    """Run all races, or until the time is up, and print the figures of each race when it ends.

    keep: called after each race with the findings so far.
    """
    deadline = time.monotonic() + options.seconds
    clock = Clock(device)
    figures: list[Figure] = []
    absent: dict[str, str] = {}
    left_out: list[str] = []
    findings = Findings(figures, absent, left_out, measured_ceiling(clock), device)
    for case in cases:
        for size in sizes_of(case, device, options.quick):
            place = f"{case.name}, {size.rows} x {size.width}"
            if time.monotonic() > deadline:
                left_out.append(f"{place}: the time was up")
                continue
            try:
                new_figures, missing = run(case, size, clock, findings.ceiling, options.repeats)
            except torch.OutOfMemoryError:
                left_out.append(f"{place}: its inputs need more memory than the device has")
                continue
            except Exception as error:  # the other races continue, and the document reports the failure
                left_out.append(f"{place}: {failure_of(error)}")
                continue
            figures += new_figures
            absent |= {name: why for name, why in missing.items() if name not in absent}
            for figure in new_figures:
                print(figure_line(figure), flush=True)
            keep(findings)
    return findings


def figure_line(figure: Figure) -> str:
    """Return a figure as a line of text."""
    result = figure.failure if figure.share is None else f"{figure.share:.0%} of the ceiling"
    place = f"{figure.case}, {figure.rows} x {figure.width}, {figure.direction}"
    return f"{place:<60}{figure.contestant:<15}{result}"


def arguments(names: Sequence[str]) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--ops", nargs="+", choices=names, default=names, metavar="OP", help=", ".join(names))
    parser.add_argument("--quick", action="store_true", help="one size of each op")
    parser.add_argument(
        "--seconds", type=float, help="start no race later than this; 170 with --quick, else unlimited"
    )
    parser.add_argument("--repeats", type=int, default=7, help="rounds, of which the median counts")
    parser.add_argument("--json", action="store_true", help="end with one JSON object")
    parser.add_argument(
        "--write",
        nargs="?",
        type=Path,
        const=RESULTS,
        metavar="FOLDER",
        help="write kernels_<device>.md; without a folder to benchmarks/results",
    )
    options = parser.parse_args()
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("no NVIDIA GPU is visible to torch; --device cpu tries the script at tiny sizes")
    if options.seconds is None:
        options.seconds = QUICK_SECONDS if options.quick else float("inf")
    return options


def main() -> None:
    """Measure, print the tables, and print a JSON object at the end if it is requested."""
    options = arguments(list(dict.fromkeys(case.op for case in CASES)))
    device = torch.device(options.device)
    cases = [case for case in CASES if case.op in options.ops]
    if device.type != "cuda":
        print(MEANINGLESS)

    def keep(findings: Findings) -> None:
        if options.write is not None:
            write(document(findings, cases), options.write, device)

    findings = measure(cases, device, options, keep)
    text = document(findings, cases)
    print(text)
    if options.write is not None:
        print(f"written to {write(text, options.write, device)}")
    if options.json:
        facts = {
            "benchmark": "kernel_speed",
            "device": options.device,
            "torch": torch.__version__,
            "copy_bytes_per_second": findings.ceiling.copy,
            "product_flops_per_second": findings.ceiling.product,
            "summary": summary(findings, cases),
            "absent": findings.absent,
            "left_out": findings.left_out,
            "figures": [asdict(figure) for figure in findings.figures],
        }
        print(json.dumps(facts))


if __name__ == "__main__":
    main()
