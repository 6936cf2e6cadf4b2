"""What a run tells while it goes: one line per interval on rank 0, and every step in a JSON-lines file."""

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TextIO

from megapipe.engine.step import StepResult


class Metrics:
    """Writes `metrics.jsonl` in the run's folder and prints progress. Used on rank 0 alone.

    The file is appended to and flushed line by line, so that a run never destroys what an earlier one wrote.
    """

    def __init__(self, directory: Path, *, steps: int, log_every: int, printer: Callable[[str], None] = print) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self.path = directory / "metrics.jsonl"
        self._file: TextIO = self.path.open("a", encoding="utf-8")
        self._steps = steps
        self._log_every = log_every
        self._print = printer
        self._interval_tokens = 0.0
        self._interval_start = self._step_start = time.perf_counter()

    def event(self, name: str, **fields: Any) -> None:
        """Record something that is not a step, such as the start of the run."""
        self._write({"event": name, "time": time.time(), **fields})

    def step(self, step: int, result: StepResult, *, learning_rate: float, consumed_samples: int) -> None:
        """Record a finished step (numbered from 1) and print at every interval's end."""
        now = time.perf_counter()
        seconds, self._step_start = now - self._step_start, now
        self._write(
            {
                "step": step,
                "loss": result.loss,
                "learning_rate": learning_rate,
                "gradient_norm": result.gradient_norm,
                "skipped": result.skipped,
                "tokens": result.token_count,
                "consumed_samples": consumed_samples,
                "seconds": seconds,
            }
        )
        self._interval_tokens += result.token_count
        if result.skipped:
            self._print(f"step {step}: gradients are not finite (norm {result.gradient_norm}); the update is skipped")
        if step % self._log_every == 0 or step in (1, self._steps) or result.stop:
            rate = self._interval_tokens / (now - self._interval_start)
            self._print(
                f"step {step:>{len(str(self._steps))}}/{self._steps} | loss {result.loss:.4f} | "
                f"learning rate {learning_rate:.2e} | gradient norm {result.gradient_norm:.3f} | {rate:,.0f} tokens/s"
            )
            self._interval_tokens, self._interval_start = 0.0, now

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _write(self, record: dict[str, Any]) -> None:
        self._file.write(json.dumps(record) + "\n")
        self._file.flush()
