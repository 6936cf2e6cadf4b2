"""The kernel benchmark: every op has a race, contestants compute the same, bytes are right, tables say what was found.

Nothing here judges a time; speed is a GPU's to show.
"""

import argparse
import importlib
import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.kernel_speed_contest import race, table
from benchmarks.kernel_speed_contest.case import Case, Draw, Entry, Size, Work
from benchmarks.kernel_speed_contest.cases import CASES
from benchmarks.kernel_speed_contest.clock import Ceiling, Clock
from benchmarks.kernel_speed_contest.race import BOTH, FORWARD, Figure, gradients_of, result_gradients
from benchmarks.kernel_speed_contest.table import Findings
from megapipe.kernels.ops import OPS

CPU = torch.device("cpu")
CEILING = Ceiling(copy=1e12, product=1e15)
LOSSES = ("cross_entropy", "linear_cross_entropy", "softcapped_linear_cross_entropy")
OTHERWISE = ("dropout", "bias_dropout_residual", "adamw", "stochastic_rounding", "weight_gradient", *LOSSES)
"""Ops whose contestants draw other random numbers, or give their results in other ways."""

BYTES = {
    "layer_norm": (4, 10),
    "layer_norm, after a sum": (8, 16),
    "rms_norm": (4, 10),
    "rms_norm, after a sum": (8, 16),
    "softmax, plain": (4, 10),
    "gelu": (4, 10),
    "bias_gelu": (4, 10),
    "swiglu": (6, 16),
    "rotary": (4, 8),
    "cross_entropy": (2, 4),
    "adamw, fp32, bf16 copy": (30, None),
    "gradient_norm, fp32": (4, None),
}
"""Bytes an element in bf16, forward and with the backward, as the literature counts them."""


def named(name: str) -> Case:
    return next(case for case in CASES if case.name == name)


def ours(case: Case, inputs: Sequence[Tensor]) -> Entry:
    return case.entry(OPS.with_overrides({case.op: "reference"}).pick(case.op, inputs[0]))


def drawn(case: Case) -> list[Tensor]:
    """In fp32, so that contestants differ by rounding alone."""
    return case.draw(case.tiny, Draw(CPU, torch.float32, 0))


def tuple_of(results: Any) -> tuple[Tensor, ...]:
    return (results,) if isinstance(results, Tensor) else tuple(results)


def figure(contestant: str, seconds: float | None, direction: str = FORWARD, failure: str | None = None) -> Figure:
    """A figure of a softmax that moves 1 GB."""
    share = None if seconds is None else 1e9 / CEILING.copy / seconds
    return Figure("softmax, plain", "softmax", 8, 4, direction, contestant, 1e9, 0.0, seconds, share, failure)


def test_every_op_of_the_registry_has_a_race() -> None:
    assert {case.op for case in CASES} == {op.name for op in OPS.ops}
    assert len({case.name for case in CASES}) == len(CASES)


@pytest.mark.parametrize("case", [case for case in CASES if case.op not in OTHERWISE], ids=lambda case: case.name)
def test_contestants_compute_the_same(case: Case) -> None:
    inputs = drawn(case)
    entry = ours(case, inputs)
    actual, expected = entry.forward(*inputs), case.torch.forward(*case.torch.prepare(inputs))
    for one, other in zip(tuple_of(actual), tuple_of(expected), strict=True):
        torch.testing.assert_close(one, other, check_dtype=False)
    if case.work(case.tiny, 4)[1] is not None:
        gradients = result_gradients(case.torch, inputs, 1)
        _, actual = gradients_of(entry, inputs, gradients)
        _, expected = gradients_of(case.torch, inputs, gradients)
        torch.testing.assert_close(actual, expected)


IN_PLACE = [
    ("adamw, fp32, bf16 copy", (0, 3), None),
    ("weight_gradient, 4096 outputs", (2,), None),
    ("stochastic_rounding, fp32 to bf16", (1,), 2**-7),
]


@pytest.mark.parametrize(("name", "written", "relative"), IN_PLACE)
def test_contestants_write_the_same_in_place(name: str, written: tuple[int, ...], relative: float | None) -> None:
    """Rounding at random gives a neighbour of what torch rounds to."""
    case = named(name)
    mine, theirs, untouched = drawn(case), drawn(case), drawn(case)
    ours(case, mine).forward(*mine)
    case.torch.forward(*case.torch.prepare(theirs))
    for place in written:
        exact = theirs[place] if relative is None else theirs[0].to(theirs[place].dtype)
        torch.testing.assert_close(mine[place], exact, rtol=relative, atol=None if relative is None else 0)
        assert not torch.equal(mine[place], untouched[place])


@pytest.mark.parametrize("case", [case for case in CASES if case.op in LOSSES], ids=lambda case: case.name)
def test_losses_and_their_gradients_are_the_same(case: Case) -> None:
    inputs = drawn(case)
    entry = ours(case, inputs)
    loss, expected = gradients_of(case.torch, inputs)
    with torch.no_grad():
        offset, total, target = entry.forward(*inputs)
        torch.testing.assert_close((offset + total.log() - target).sum(), loss)
    assert entry.both is not None
    _, *actual = entry.both(*inputs)
    for one, other in zip(actual, expected, strict=True):
        torch.testing.assert_close(one.detach(), other, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", BYTES)
def test_predicted_bytes(name: str) -> None:
    size = Size(64, 32)
    for work, expected in zip(named(name).work(size, 2), BYTES[name], strict=True):
        assert (None if work is None else work.bytes / size.elements) == expected


def test_the_ceiling_is_the_slower_of_memory_and_products() -> None:
    assert CEILING.seconds(Work(bytes=2e12)) == 2
    assert CEILING.seconds(Work(bytes=2e12, flops=5e15)) == 5


def test_a_contestant_that_dies_leaves_the_others_running() -> None:
    def broken(x: Tensor) -> Tensor:
        raise RuntimeError("no such kernel\nfurther lines")

    case = replace(named("gelu"), torch=Entry(broken))
    sets = [case.draw(case.tiny, Draw(CPU, torch.bfloat16, 0))]
    calls = race._forward_calls({"torch": case.torch, "reference": ours(case, sets[0])}, sets)
    dead, alive = race._measured(case, case.tiny, FORWARD, Work(1.0), calls, Clock(CPU), 3)
    assert (dead.seconds, dead.failure) == (None, "RuntimeError: no such kernel")
    assert alive.seconds is not None
    assert alive.failure is None


def test_a_table_has_rates_shares_and_failures() -> None:
    figures = [figure("triton", 1.25e-3), figure("torch.compile", 2e-3), figure("apex", None, failure="dead")]
    assert table.table(figures).splitlines() == [
        "| op | rows x width | predicted MB | triton | apex | torch.compile |",
        "|---|---|---|---|---|---|",
        "| softmax, plain | 8 x 4 | 1,000 | 800 (80%) | failed | 500 (50%) |",
    ]


def test_kernels_below_an_aim_or_the_compiler_are_named() -> None:
    def said(*figures: Figure) -> list[str]:
        return table.verdicts(Findings(figures, {}, [], CEILING, CPU), CASES)

    assert said(figure("triton", 1.1e-3), figure("torch.compile", 1.2e-3)) == ["all 1 measurements meet them"]
    assert said(figure("torch", 1e-3)) == ["no kernel of ours was measured"]
    # The better of our backends counts.
    assert said(figure("triton", 2e-3), figure("cuda", 1.1e-3)) == ["all 1 measurements meet them"]
    below = "softmax, plain, 8 x 4, forward+backward: 80% of the ceiling, the aim is 85%"
    slower = "softmax, plain, 8 x 4, forward+backward: torch.compile takes 96% of our time"
    assert said(figure("triton", 1.25e-3, BOTH), figure("torch.compile", 1.2e-3, BOTH)) == [below, slower]


def test_a_document_lists_backends_that_did_not_run() -> None:
    left_out = ["gelu, 1 x 2: the time was up"]
    findings = Findings([figure("triton", 1e-3)], {"Liger": "No module"}, left_out, CEILING, CPU)
    text = table.document(findings, CASES)
    for reported in ("- Liger did not run: No module", "- gelu, 1 x 2: the time was up", table.MEANINGLESS):
        assert reported in text
    assert table.summary(findings, CASES) == "1 measurements, median 100% of the ceiling, 0 misses, 1 left out"


def script(monkeypatch: pytest.MonkeyPatch, *flags: str) -> ModuleType:
    """Return the script with these flags; it imports its folder by its own path."""
    monkeypatch.setattr(sys, "argv", ["kernel_speed.py", *flags])
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "benchmarks")
    return importlib.import_module("benchmarks.kernel_speed")


def test_the_script_runs_every_op_on_a_processor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    script(monkeypatch, "--device", "cpu", "--repeats", "1", "--json", "--write", str(tmp_path)).main()
    printed = capsys.readouterr().out.splitlines()
    assert printed[0] == table.MEANINGLESS
    facts = json.loads(printed[-1])
    assert all(each["picked"][0] in ("bfloat16", "float32") and each["picked"][1] > 0 for each in facts["figures"])
    measured = {(each["case"], each["direction"]) for each in facts["figures"] if each["seconds"] is not None}
    expected = {(case.name, FORWARD) for case in CASES}
    expected |= {(case.name, BOTH) for case in CASES if case.work(case.tiny, 2)[1] is not None}
    assert measured == expected
    assert facts["absent"].keys() == {"triton", "cuda", "apex"}
    assert facts["absent"]["triton"] == "needs a GPU"
    text = (tmp_path / "kernels_cpu.md").read_text()
    assert all(case.name in text for case in CASES)
    assert "--repeats 1" in text  # the command


def test_races_too_large_for_the_device_are_omitted(monkeypatch: pytest.MonkeyPatch) -> None:
    def too_large(size: Size, draw: Draw) -> list[Tensor]:
        raise torch.OutOfMemoryError("no")

    cases = [replace(named("gelu"), draw=too_large), named("rotary")]
    chosen = argparse.Namespace(seconds=float("inf"), quick=False, repeats=1)
    findings = script(monkeypatch).measure(cases, CPU, chosen)
    assert findings.left_out == ["gelu, 32 x 64: its inputs need more memory than the device has"]
    assert {figure.op for figure in findings.figures} == {"rotary"}


def test_no_race_starts_when_the_time_is_up(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    script(monkeypatch, "--device", "cpu", "--seconds", "-1", "--json").main()
    facts = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert facts["figures"] == []
    assert len(facts["left_out"]) == len(CASES)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_the_script_names_another_device(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        script(monkeypatch).main()
    assert "--device cpu" in capsys.readouterr().err
