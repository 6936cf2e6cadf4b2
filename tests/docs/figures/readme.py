"""Figures that the README repeats from the pages and measurements that they come from."""

import re

from tests.docs.figures import read, sentence


@sentence("README.md", "errors of the cost model", r"not fitted to are within ([\d.]+)%")
def errors_of_the_cost_model() -> list[str]:
    errors = re.findall(r"\| ([+-]\d+\.\d)% \|[^|]*\| not fitted \|", read("docs/cost_model.md"))
    assert len(errors) == 5
    return [str(max(abs(float(each)) for each in errors))]


@sentence("README.md", "number of layouts", r"(\d+) layouts, run by a test")
def number_of_layouts() -> list[str]:
    layouts = read("docs/parallelism.md").partition("<!-- figure: layouts of one result -->")[2]
    return [str(len(re.findall(r"^[|] [0-9]", layouts.partition("<!-- end")[0], re.MULTILINE)))]


@sentence("README.md", "stall of a save", r"for ([\d.]+) times as long as a copy")
def stall_of_a_save() -> list[str]:
    return re.findall(r"megapipe, asynchronous \| [\d.]+ s \| ([\d.]+) ", read("docs/checkpoints.md"))[:1]


@sentence(
    "README.md", "speed relative to peers", r"([\d.]+) times the speed of the faster of plain torch and transformers"
)
def speed_relative_to_peers() -> list[str]:
    pattern = r"megapipe over the best peer, median of the rounds' ratios: \*\*([\d.]+)\*\*"
    return [f"{float(re.findall(pattern, read('benchmarks/results/cpu.md'))[0]):.2f}"]


@sentence(
    "README.md", "time lost in a pipeline", r"([\d.]+) to ([\d.]+) of the time that torch.distributed.pipelining loses"
)
def time_lost_in_a_pipeline() -> list[str]:
    engine = read("benchmarks/results/cpu.md").partition("## Pipeline engine")[2].partition("\n## ")[0]
    losses = []
    for table in engine.split("\n\n"):
        rows = [line.strip("| ").split(" | ") for line in table.splitlines() if line.startswith("|")]
        if rows and "of torch" in rows[0]:
            losses += [float(row[rows[0].index("of torch")]) for row in rows[2:]]
    assert len(losses) > 40
    return [str(min(losses)), str(max(losses))]
