"""Read run folders that may be damaged, incomplete, still growing, or not a run at all."""

import calendar
import os
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import yaml

from megapipe.config.files import MAX_YAML_BYTES, decode_yaml, flat, read_bytes
from megapipe.training.observe.metrics import (
    CONFIG,
    METRICS,
    RUN,
    RUNNING,
    LossHistory,
    count_in,
    is_number,
    read_records,
    read_starts,
)
from megapipe.training.observe.records import RANKS, SAVE_WAIT, TIME_PARTS

RATE_STEPS = 100
"""Number of last steps over which rates and times are averaged, so that slow first steps do not count."""

SEARCH_DEPTH = 3
"""Number of folder levels that are searched for runs."""

KILLED = "killed (no end was recorded)"


class Step(NamedTuple):
    """One step; fields that its line does not have are None. seconds: time of the whole step. data_seconds: part of it
    in which the step waited for samples."""

    tokens: float | None
    seconds: float | None
    data_seconds: float | None
    mfu: float | None


@dataclass
class RunStart:
    """One start of a run. started, ended: Unix time. first_step, last_step: numbers of its first and last step."""

    id: str
    status: str = RUNNING
    started: float | None = None
    ended: float | None = None
    first_step: int | None = None
    last_step: int | None = None
    command: str = ""

    @property
    def seconds(self) -> float | None:
        """Time from start to end; None if one of them is unknown."""
        return None if self.started is None or self.ended is None else max(0.0, self.ended - self.started)


@dataclass
class Run:
    """Content of a run folder. Every problem becomes one line in `problems`; what can be read is read.

    config: configuration of the last start, with dotted names. steps: steps that led to the newest weights, by number.
    ranks: values of the last event `ranks`, by part. events: notable events, as (step, text). step_seconds,
    evaluation_seconds, save_seconds: totals of all starts, including steps that were repeated. last_record: Unix time
    of the last change.
    """

    folder: Path
    starts: list[RunStart] = field(default_factory=list)
    config: dict[str, Any] = field(default_factory=dict)
    layout: dict[str, int] = field(default_factory=dict)
    schedule: str = ""
    parameters: int | None = None
    history: LossHistory = field(default_factory=LossHistory)
    steps: dict[int, Step] = field(default_factory=dict)
    ranks: dict[str, list[float]] = field(default_factory=dict)
    ranks_step: int | None = None
    events: list[tuple[int | None, str]] = field(default_factory=list)
    num_saves: int = 0
    last_save: int | None = None
    num_skipped: int = 0
    step_seconds: float = 0.0
    evaluation_seconds: float = 0.0
    save_seconds: float = 0.0
    last_record: float | None = None
    problems: list[str] = field(default_factory=list)

    @property
    def status(self) -> str:
        """Status of the last start."""
        return self.starts[-1].status if self.starts else "unknown"

    @property
    def last_step(self) -> int | None:
        """Number of the newest step that led to the newest weights; None before the first one."""
        return max(self.steps, default=None)

    @property
    def seconds(self) -> float:
        """Time of all starts together, without the time between them."""
        return sum(each.seconds or 0.0 for each in self.starts)

    @property
    def tokens(self) -> float:
        """Tokens of the steps that led to the newest weights."""
        return sum(each.tokens or 0.0 for each in self.steps.values())

    def recent(self) -> list[Step]:
        """Return the last RATE_STEPS steps that have a time."""
        last = [self.steps[step] for step in sorted(self.steps)[-RATE_STEPS:]]
        return [each for each in last if each.seconds]

    @property
    def tokens_per_second(self) -> float | None:
        """Rate over the last steps; None if none of them has a time."""
        recent = self.recent()
        seconds = sum(each.seconds or 0.0 for each in recent)
        return sum(each.tokens or 0.0 for each in recent) / seconds if recent else None

    @property
    def data_seconds(self) -> float | None:
        """Mean wait for samples in the last steps; None if no step has one."""
        waits = [each.data_seconds for each in self.recent() if each.data_seconds is not None]
        return fmean(waits) if waits else None

    @property
    def seconds_per_step(self) -> float | None:
        """Mean time of the last steps; None if none of them has a time."""
        recent = self.recent()
        return fmean(each.seconds or 0.0 for each in recent) if recent else None

    @property
    def mfu(self) -> float | None:
        """Mean MFU over the time of the last steps; None if no step has one."""
        timed = [each for each in self.recent() if each.mfu is not None]
        seconds = sum(each.seconds or 0.0 for each in timed)
        return sum((each.mfu or 0.0) * (each.seconds or 0.0) for each in timed) / seconds if timed else None

    @property
    def loss(self) -> float | None:
        """Training loss of the last step that has one."""
        return max(self.history.training.items(), default=(0, None))[1]

    @property
    def held_out_loss(self) -> float | None:
        """Validation loss of the last evaluation."""
        return max(self.history.evaluation.items(), default=(0, None))[1]


def is_run(folder: Path) -> bool:
    """Return whether a folder has one of the files of a run."""
    return any((folder / name).exists() for name in (RUN, METRICS))


def find_runs(folder: Path, depth: int = SEARCH_DEPTH) -> Iterator[Path]:
    """Yield the run folders in `folder`, sorted by path, or `folder` itself. Raises OSError only for `folder`."""
    if is_run(folder):
        yield folder
        return
    with os.scandir(folder) as entries:
        inner = sorted(each.name for each in entries if each.is_dir(follow_symlinks=False))
    for name in inner if depth else ():
        try:
            yield from find_runs(folder / name, depth - 1)
        except OSError:  # a folder without read permission, or one that was just removed
            continue


def read_run(folder: Path) -> Run:
    """Return the content of a run folder. No content raises an error."""
    run = Run(folder)
    _merge_starts(run, _read_metrics(run))
    if not run.config:
        _read_config(run)
    return run


def _read_metrics(run: Run) -> dict[str, RunStart]:
    """Read metrics.jsonl in one pass, and return its starts by id."""
    path, starts, damaged = run.folder / METRICS, dict[str, RunStart](), 0
    current: RunStart | None = None
    try:
        if not path.exists():
            run.problems.append(f"{path} does not exist: the run ended before its first step, or the file was moved")
            return starts
        if not path.is_file():
            run.problems.append(f"{path} is not a regular file and was not read")
            return starts
        run.last_record = path.stat().st_mtime
        for record in read_records(path):
            if record is None:
                damaged += 1
                continue
            returned = run.history.add(record)
            if returned is not None:
                run.steps = {key: each for key, each in run.steps.items() if key <= returned}
            if "event" not in record:
                _take_step(run, record, current)
                continue
            if record["event"] == "start" and isinstance(record.get("run"), str):
                current = starts.setdefault(record["run"], RunStart(record["run"]))
                current.started = _time(record.get("time"))
                current.first_step = None if (step := count_in(record, "step")) is None else step + 1
                _take_start(run, record)
            _take_event(run, record, current)
    except OSError as error:
        run.problems.append(f"cannot read {path}: {error.strerror}")
    if damaged:
        lines = "1 line that is" if damaged == 1 else f"{damaged:,} lines that are"
        run.problems.append(f"{path} has {lines} not a JSON object; the other lines were read")
    return starts


def _take_step(run: Run, record: Mapping[str, Any], start: RunStart | None) -> None:
    step = count_in(record, "step")
    if step is None:
        return
    taken = Step(*(record[name] if is_number(record.get(name)) else None for name in Step._fields))
    seconds = taken.seconds
    if seconds is not None and seconds < 0:
        seconds = None
    run.steps[step] = taken._replace(seconds=seconds)
    run.step_seconds += seconds or 0.0
    if start is not None:
        start.last_step = step
        if seconds is not None and start.ended is not None:
            start.ended += seconds  # estimate until the next event has a time
    if record.get("skipped") is True:
        run.num_skipped += 1
        run.events.append((step, "the loss or the gradients were not finite; the update was skipped"))


def _take_start(run: Run, record: Mapping[str, Any]) -> None:
    if isinstance(record.get("config"), dict):
        run.config = flat(record["config"])
    run.layout = _layout(record) or run.layout
    if isinstance(record.get("schedule"), str):
        run.schedule = record["schedule"]
    if (parameters := count_in(record, "parameters")) is not None:
        run.parameters = parameters


def _take_event(run: Run, record: Mapping[str, Any], start: RunStart | None) -> None:
    get, step = record.get, count_in(record, "step")
    name = get("event")
    if start is not None and (moment := _time(get("time"))) is not None:
        start.ended = moment
    seconds = get("seconds")
    if not is_number(seconds):
        seconds = 0.0
    if name == "start" and start is not None:
        run.events.append((step, f"start {start.id}"))
    elif name == "evaluation":
        run.evaluation_seconds += seconds
    elif name == SAVE_WAIT:
        run.save_seconds += seconds
    elif name == "checkpoint":
        run.num_saves, run.last_save = run.num_saves + 1, step
    elif name == "rewind":
        loss = f" to {get('loss'):.4f}" if is_number(get("loss")) else ""
        run.events.append((step, f"the loss jumped up{loss} at step {get('spiked')}: back to the checkpoint"))
    elif name == "skipped_samples":
        run.events.append((step, f"samples {get('first')} up to {get('stop')} were skipped"))
    elif name == "other_data":
        differences = get("differences")
        words = "; ".join(map(str, differences)) if isinstance(differences, list) else "unknown differences"
        run.events.append((step, f"continued on other data: {words}"))
    elif name == "end":
        status = get("status")
        text = "finished" if status == 0 else f"stopped with status {status}"
        run.events.append((step, text))
        if start is not None:
            start.status = text
    elif name == "failed":
        run.events.append((start.last_step if start is not None else None, f"failed: {get('error')}"))
        if start is not None:
            start.status = f"failed: {get('error')}"
    elif name == RANKS:
        columns = {part: get(part) for part in (*TIME_PARTS, "peak_bytes")}
        if all(isinstance(each, list) and each and all(map(is_number, each)) for each in columns.values()):
            run.ranks, run.ranks_step = {part: list(each or []) for part, each in columns.items()}, step


def _merge_starts(run: Run, recorded: dict[str, RunStart]) -> None:
    """Set the starts of a run from run.json, and from its metrics where run.json lacks them."""
    path, entries = run.folder / RUN, list[dict[str, Any]]()
    try:
        entries = read_starts(path)
    except FileNotFoundError:
        run.problems.append(f"{path} does not exist; the starts were taken from {METRICS}")
    except OSError as error:
        run.problems.append(f"cannot read {path}: {error.strerror}")
    except ValueError as error:
        run.problems.append(f"{error}; the starts were taken from {METRICS}")
    listed = []
    for entry in entries:
        start = recorded.pop(entry["id"], RunStart(entry["id"]))
        if isinstance(entry.get("status"), str) and entry["status"] != RUNNING:
            start.status = entry["status"]
        start.started = _written_time(entry.get("start")) or start.started
        start.ended = _written_time(entry.get("end")) or start.ended
        for name in ("first_step", "last_step"):
            if getattr(start, name) is None:
                setattr(start, name, count_in(entry, name))
        start.command = entry["command"] if isinstance(entry.get("command"), str) else ""
        run.layout = run.layout or _layout(entry)
        listed.append(start)
    run.starts = sorted([*listed, *recorded.values()], key=lambda each: each.started or 0.0)
    for earlier in run.starts[:-1]:
        if earlier.status == RUNNING:
            earlier.status = KILLED
    if run.starts and run.starts[-1].status == RUNNING and run.last_record is not None:
        run.starts[-1].ended = max(run.last_record, run.starts[-1].started or 0.0)


def _read_config(run: Run) -> None:
    """Read config.yaml, because the metrics of a run without steps have no configuration."""
    path = run.folder / CONFIG
    try:
        value = decode_yaml(read_bytes(path, ValueError, MAX_YAML_BYTES).decode("utf-8"))
    except OSError:
        run.problems.append(f"{path} does not exist, and {METRICS} has no configuration either")
    except (ValueError, yaml.YAMLError) as error:
        run.problems.append(f"{path} cannot be read: {error}")
    else:
        if isinstance(value, dict):
            run.config = flat(value)
        else:
            run.problems.append(f"{path} is not a configuration: it has no groups of fields")


def _layout(record: Mapping[str, Any]) -> dict[str, int]:
    """Return the sizes of the dimensions; empty if the record has none."""
    layout = record.get("layout")
    return {name: size for name, size in layout.items() if type(size) is int} if isinstance(layout, dict) else {}


def _time(value: Any) -> float | None:
    """Return a Unix time before the year 9999."""
    return float(value) if is_number(value) and 0 <= value < 2.5e11 else None


def _written_time(value: Any) -> float | None:
    try:
        return float(calendar.timegm(time.strptime(value, "%Y-%m-%dT%H:%M:%SZ")))
    except (TypeError, ValueError):
        return None
