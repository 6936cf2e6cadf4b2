"""Score a trained GPT on tasks of EleutherAI's lm-evaluation-harness (lm-eval), on any tensor and pipeline ranks."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from megapipe.config import ConfigError
from megapipe.data import DataError
from megapipe.data.tokenizers import Tokenizer
from megapipe.inference.generation import CHUNK, Limits, StopStrings, generate
from megapipe.inference.settings import SamplingSettings, stop_problems
from megapipe.inference.trained_model import LoadedModel, Passes

if TYPE_CHECKING:
    from lm_eval.api.instance import Instance


def score(
    model: LoadedModel, pairs: Sequence[tuple[Sequence[int], Sequence[int]]], batch_size: int
) -> list[tuple[float, bool]]:
    """Return for each continuation its log probability, and whether all of its tokens are the most likely ones.

    A collective call. pairs: a context and its continuation, of at least one token each. If both together are longer
    than model.max_positions + 1, the start of the context is left out. batch_size: number of pairs per pass.

    Raises ValueError for an empty context or continuation, and for a continuation above model.max_positions.
    """
    longest = model.config.model.max_positions
    for context, continuation in pairs:
        if not context or not 0 < len(continuation) <= longest:
            raise ValueError(
                f"a context of {len(context)} tokens with a continuation of {len(continuation)}; both "
                f"need at least 1, the continuation at most {longest}, model.max_positions"
            )
    texts = [[*context, *continuation][-longest - 1 :] for context, continuation in pairs]
    # Texts of similar length are in one batch.
    order = sorted(range(len(texts)), key=lambda index: -len(texts[index]))
    if not order:
        return []
    width = min(CHUNK, len(texts[order[0]]) - 1)
    num_texts = min(batch_size, len(texts))
    capacity = -(-(len(texts[order[0]]) - 1) // width) * width
    passes = Passes(model, num_texts, capacity, {width})
    scores: list[tuple[float, bool]] = [(0.0, True)] * len(texts)
    for first in range(0, len(order), num_texts):
        group = order[first : first + num_texts]
        rows = [texts[index] for index in group] + [texts[group[0]]] * (num_texts - len(group))
        row_scores = _score_rows(model, passes, rows, width)
        for index, row in zip(group, row_scores, strict=False):
            end = len(texts[index]) - 1
            log_probabilities, likeliest = row[end - len(pairs[index][1]) : end].double().unbind(dim=-1)
            scores[index] = (float(log_probabilities.sum()), bool(likeliest.all()))
    return scores


def _score_rows(model: LoadedModel, passes: Passes, rows: Sequence[Sequence[int]], width: int) -> torch.Tensor:
    """Return the scores of every token after the first, float32 [rows, tokens, 2], on the CPU of every rank."""
    longest = -(-(max(map(len, rows)) - 1) // width) * width
    padded = torch.tensor([[*row, *[0] * (longest + 1 - len(row))] for row in rows])
    ends = torch.tensor([len(row) - 1 for row in rows])
    scores = torch.zeros(len(rows), longest, 2, device=model.mesh.device)
    for start in range(0, longest, width):
        positions = torch.arange(start, start + width).expand(len(rows), -1)
        piece = slice(start, start + width)
        piece_scores = passes.run(padded[:, :-1][:, piece], positions, ends - start, padded[:, 1:][:, piece])
        if piece_scores is not None:
            scores[:, piece] = piece_scores
    model.mesh.world.broadcast(scores, model.last_rank)
    return scores.cpu()


LENGTHS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")
"""Names for the number of new tokens in tasks, in the order in which lm-eval reads them."""
SAMPLING = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")


class TaskAnswers:
    """The methods of lm-eval's `TemplateLM` that need the model. Every rank must get the same requests.

    As in training, no token for the beginning of a text is added. A text without a context follows an end-of-document
    token.
    """

    def __init__(self, model: LoadedModel, tokenizer: Tokenizer, batch_size: int) -> None:
        """Raise DataError for a tokenizer without an end-of-document token."""
        super().__init__()
        if tokenizer.end_of_document is None:
            raise DataError(f"{tokenizer.spec} has no end-of-document token to start a text with; name another")
        self._end_of_document = tokenizer.end_of_document
        self._model = model
        self._tokens = tokenizer
        self._batch_size = batch_size
        self._positions = model.config.model.max_positions

    @property
    def eot_token_id(self) -> int:
        """The id of the end-of-document token."""
        return self._end_of_document

    @property
    def tokenizer_name(self) -> str:
        """Name under which lm-eval caches requests."""
        return self._tokens.fingerprint

    def tok_encode(self, string: str, **_: object) -> list[int]:
        """Return the token ids of a text."""
        return self._tokens.encode(string)

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[object, list[int], list[int]]], **_: object
    ) -> list[tuple[float, bool]]:
        return score(self._model, [(context, wanted) for _, context, wanted in requests], self._batch_size)

    def loglikelihood_rolling(self, requests: Sequence["Instance"], disable_tqdm: bool = False) -> list[float]:
        """Return the log probability of each whole text, in windows of the model's positions."""
        from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

        pairs: list[tuple[list[int], list[int]]] = []
        counts = []
        for request in requests:
            tokens = self._tokens.encode(request.args[0])
            windows = get_rolling_token_windows(tokens, self._end_of_document, self._positions, context_len=1)
            disjoint = [make_disjoint_window(window) for window in windows]
            pairs += disjoint
            counts.append(len(disjoint))
        scores = iter(score(self._model, pairs, self._batch_size))
        return [sum(next(scores)[0] for _ in range(count)) for count in counts]

    def generate_until(self, requests: Sequence["Instance"], disable_tqdm: bool = False) -> list[str]:
        """Return the continuation of each context, which ends before any of the task's stop strings."""
        answers = [""] * len(requests)
        groups: dict[str, list[int]] = {}
        for index, request in enumerate(requests):
            groups.setdefault(repr(request.args[1]), []).append(index)
        for indices in groups.values():
            settings, limits = self._generation(dict(requests[indices[0]].args[1]))
            prompts = [self._prompt(requests[index].args[0], limits.max_new_tokens) for index in indices]
            texts = generate(self._model, prompts, 1, settings, limits)
            for index, text in zip(indices, texts, strict=True):
                whole = self._tokens.decode(text.generated)
                answers[index] = whole[: len(whole) - text.num_cut]
        return answers

    def _generation(self, request: dict[str, Any]) -> tuple[SamplingSettings, Limits]:
        """Return settings and limits for the `generation_kwargs` of a task. Raises ConfigError."""
        until = request.pop("until", None) or []
        strings = tuple(string for string in ([until] if isinstance(until, str) else until) if string)
        lengths = [request.pop(name, None) for name in LENGTHS]
        new = int(next((length for length in lengths if length is not None), 256))
        samples = request.pop("do_sample", None)
        # As in transformers, top_k 0 keeps all tokens; one beam means no beam search.
        neutral = {("top_k", 0), ("num_beams", 1)}
        request = {name: each for name, each in request.items() if (name, each) not in neutral}
        chosen = {name: request.pop(name) for name in SAMPLING if request.get(name) is not None}
        if samples is False or (samples is None and "temperature" not in chosen):
            chosen["temperature"] = 0.0
        settings = SamplingSettings(**chosen)
        problems = settings.problems() + stop_problems(strings)
        if request:
            problems.append(
                f"generation_kwargs of the task has {', '.join(request)}; only {', '.join(_KNOWN)} are known"
            )
        if not 0 < new < self._positions:
            problems.append(
                f"the task generates {new} tokens, but the model has {self._positions} positions: set max_gen_toks in "
                f"generation_kwargs of the task to at most {self._positions - 1}"
            )
        if problems:
            raise ConfigError(problems)
        vocabulary = min(self._tokens.vocabulary_size, self._model.config.model.vocabulary_size)
        return settings, Limits(
            max_new_tokens=new,
            vocabulary_size=vocabulary,
            end_of_document=self._end_of_document,
            stop=StopStrings(strings, self._tokens),
            batch_size=self._batch_size,
        )

    def _prompt(self, context: str, new: int) -> list[int]:
        """Return the last tokens of a context that leave room for the new ones."""
        return self._tokens.encode(context)[new - self._positions :] or [self._end_of_document]


_KNOWN = ("until", "do_sample", *SAMPLING, *LENGTHS)


class Tasks:
    """Tasks of lm-eval by name, or by the path of a YAML file."""

    def __init__(self, names: Sequence[str], folder: str | None) -> None:
        """Find the tasks. folder: of task files; if it is not None, names refer only to tasks in it.

        Raises ConfigError without lm-eval, and for a name that no task has.
        """
        try:
            from lm_eval.tasks import TaskManager
        except ModuleNotFoundError as error:
            missing = str(error.name).partition(".")[0]
            raise ConfigError(
                f"--tasks needs lm-eval, but {missing} is not installed: "
                "pip install '.[evaluation]' in megapipe's folder"
            ) from error
        self._manager = TaskManager(include_path=folder, include_defaults=folder is None)
        self._names = list(names)
        for name in names:
            if not Path(name).is_file() and not self._manager.match_tasks([name]):
                known = (
                    f"it has {', '.join(self._manager.all_tasks) or 'none'}"
                    if folder
                    else "lm-eval ls tasks lists them"
                )
                raise ConfigError(f"no task {name!r} in {folder or 'lm-eval'}: {known}")

    def evaluate(
        self, model: LoadedModel, tokenizer: Tokenizer, *, batch_size: int, limit: int | None
    ) -> dict[str, dict[str, Any]]:
        """Return the metrics of each task; a collective call.

        batch_size: texts per pass. limit: number of documents of each task; None for all.
        """
        from lm_eval import simple_evaluate
        from lm_eval.api.model import TemplateLM

        class HarnessModel(TaskAnswers, TemplateLM):
            pass

        answer = simple_evaluate(
            HarnessModel(model, tokenizer, batch_size), tasks=self._names, task_manager=self._manager, limit=limit
        )
        # lm-eval returns nothing on ranks other than the first of a host.
        return {} if answer is None else answer["results"]
