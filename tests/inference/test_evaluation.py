"""Scores of continuations on every layout, and wrong input of `megapipe evaluate --tasks`."""

import sys
from pathlib import Path

import pytest
import torch

from megapipe.cli.trained_models import evaluate
from megapipe.inference import evaluation
from megapipe.inference.evaluation import score
from megapipe.inference.trained_model import LoadedModel
from megapipe.parallel.mesh import Mesh
from tests.data.commands import run_command
from tests.inference.test_generate import filled_with, make_config
from tests.inference.test_generate_command import save_run
from tests.models.hugging_face import Case, case_of, opened
from tests.support.meshes import run_mesh

PAIRS = [([7], [9, 2, 2, 6, 8, 1]), ([1] * 30, [3, 9]), ([2, 3], list(range(1, 12))), ([4] * 9, [4])]


def their_scores(case: Case, pairs: list[tuple[list[int], list[int]]], longest: int) -> list[tuple[float, bool]]:
    scores = []
    for context, continuation in pairs:
        text = torch.tensor([*context, *continuation][-longest - 1 :])
        wanted = text[-len(continuation) :]
        with torch.no_grad():
            logits = case.theirs(text[None, :-1]).logits[0, -len(continuation) :]
        best = logits.log_softmax(-1).gather(-1, wanted[:, None]).sum()
        scores.append((float(best), bool((logits.argmax(-1) == wanted).all())))
    return scores


@pytest.mark.parametrize(("sizes", "chunk"), [({}, 256), ({"pipeline": 2, "tensor": 2}, 5)], ids=str)
def test_scores_equal_those_of_transformers(
    sizes: dict[str, int], chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(evaluation, "CHUNK", chunk)
    case = case_of("mistral")
    model, weights = opened(case.theirs)
    model.max_positions = 24  # cuts one context
    likeliest = int(case.theirs(torch.tensor([[5, 1, 4]])).logits[0, -1].argmax())
    pairs = [([5, 1, 4], [likeliest]), *PAIRS]
    expected = their_scores(case, pairs, 24)

    def run(mesh: Mesh) -> list[tuple[float, bool]]:
        loaded = LoadedModel(make_config(model, mesh), mesh, filled_with(weights))
        return score(loaded, pairs, batch_size=3)

    for scores in run_mesh(sizes, run, backend="threads"):
        assert [number for number, _ in scores] == pytest.approx([number for number, _ in expected], abs=1e-4)
        assert [greedy for _, greedy in scores] == [greedy for _, greedy in expected]
    assert {greedy for _, greedy in expected} == {True, False}


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (["--tasks", "t", "--split", "test"], "leave out --data-prefix and --split"),
        (["--tokenizer", "bytes"], "--tasks-folder and --tokenizer are for --tasks"),
    ],
)
def test_options_that_exclude_each_other_are_refused(words: list[str], part: str) -> None:
    assert part in run_command(evaluate, "--checkpoint", "nowhere", *words, status=2).err


def test_tasks_without_lm_eval_name_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [each for each in sys.modules if each.startswith("lm_eval.")]:
        monkeypatch.delitem(sys.modules, name)  # of other tests, where it is installed
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    words = ["--checkpoint", save_run(tmp_path, ""), "--tokenizer", "bytes", "--device", "cpu", "--tasks", "t"]
    message = "--tasks needs lm-eval, but lm_eval is not installed: pip install 'megapipe[evaluation]'"
    assert message in run_command(evaluate, *words, status=2).err
