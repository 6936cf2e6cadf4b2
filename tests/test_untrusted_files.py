"""Every file that a stranger may have written, mutated: a reader gives a value or one line, and soon."""

import json
import random
import struct
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from megapipe.checkpoint import CheckpointError, newest_whole
from megapipe.checkpoint.directory import steps
from megapipe.checkpoint.manifest import MANIFEST, _checksum, read_manifest
from megapipe.config import ConfigError
from megapipe.config.files import decode_json
from megapipe.config.load import parse
from megapipe.config.run import PretrainConfig
from megapipe.conversion.archive import Archive, Sandbox
from megapipe.conversion.formats import FORMATS, UnknownFormatError
from megapipe.data import DataError
from megapipe.data.bert_parts import BertVocabulary
from megapipe.data.manifest import manifest_path
from megapipe.data.manifest import read_manifest as read_shard_manifest
from megapipe.data.preprocess.run import Journal, read_journal
from megapipe.data.shards import IndexedDataset
from megapipe.layout.hardware.description import load_hardware
from megapipe.planner.fitting import read_rows
from megapipe.schedules import ScheduleError, build, dumps, rank_costs
from megapipe.schedules.build import load_file
from megapipe.schedules.measured.traces import read_rank
from megapipe.training.observe.metrics import read_losses
from tests.checkpoint.toy import ALONE, alone, save_step
from tests.conversion.foreign.weights import MODELS, drawn, write
from tests.data.shards import numbered_documents, shard_manifest, write_shard
from tests.models.hugging_face import case_of
from tests.schedules.traces import write_trace

EXPECTED = (CheckpointError, ConfigError, DataError, ScheduleError, UnknownFormatError)
ROOT = Path(__file__).parent.parent


@dataclass(frozen=True)
class Reader:
    """make: writes a valid file into a folder, and returns it. read: reads all of it.

    parse, build: between the file's bytes and a JSON value, where there is one.
    """

    make: Callable[[Path], Path]
    read: Callable[[Path], object]
    parse: Callable[[bytes], Any] | None = json.loads
    build: Callable[[Any], bytes] = lambda value: json.dumps(value).encode()


def make_manifest(folder: Path) -> Path:
    save_step(alone(), ALONE, folder, 1)
    return folder / "step-00000001" / MANIFEST


def signed(value: Any) -> bytes:
    """A manifest's own checksum, right again."""
    with suppress(AttributeError, TypeError, KeyError):
        value = {name: each for name, each in value.items() if name != "manifest_checksum"}
        value["manifest_checksum"] = _checksum(value)
    return json.dumps(value).encode()


def read_checkpoint(path: Path) -> None:
    read_manifest(path.parent)
    newest_whole(path.parent.parent)
    steps(path.parent.parent)


def make_shard(folder: Path) -> Path:
    write_shard(folder / "shard", numbered_documents([3, 0, 5, 2]))
    more = {"special_tokens": {"<eod>": 256}, "sources": {"files": 1}, "bin_checksum": "xxh128:0"}
    manifest = shard_manifest(num_documents=4, num_tokens=10, **more)
    manifest_path(folder / "shard").write_text(manifest.to_json())
    return folder / "shard.idx"


def read_shard(path: Path) -> None:
    IndexedDataset(path.parent / "shard")


def read_described_shard(path: Path) -> None:
    prefix = path.parent / "shard"
    manifest = read_shard_manifest(prefix)
    assert manifest is not None
    manifest.check_vocabulary(300)
    manifest.check_shard(IndexedDataset(prefix))


def text_file(content: str, name: str = "file", **others: str) -> Callable[[Path], Path]:
    """others: files that it names, by their names without .yaml."""

    def make(folder: Path) -> Path:
        for other, text in others.items():
            (folder / f"{other}.yaml").write_text(text)
        (folder / name).write_text(content)
        return folder / name

    return make


def example(name: str) -> Callable[[Path], Path]:
    return text_file((ROOT / "examples" / name).read_text(), "run.yaml")


def parsed(flag: str) -> Callable[[Path], PretrainConfig]:
    return lambda path: parse([flag, str(path)])


def make_trace(folder: Path) -> Path:
    schedule = build("1f1b", 2, 4)
    write_trace(folder, schedule, rank_costs(schedule.header, forward=10, backward=20))
    return folder / "rank-0.json"


def make_hugging_face(folder: Path) -> Path:
    case_of("gpt2").theirs.save_pretrained(folder)
    return folder / "config.json"


def make_indexed(folder: Path) -> Path:
    make_hugging_face(folder)
    names = safetensors.torch.load_file(folder / "model.safetensors")
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": dict.fromkeys(names, "model.safetensors")}))
    return index


def read_source(path: Path, kind: str = "hf") -> None:
    source = FORMATS[kind].open_source(path.parent, True)
    try:
        for tensor in source.contents.tensors[:3]:
            source.read(tensor)
    finally:
        source.close()


def header_of(content: bytes) -> Any:
    return json.loads(content[8 : 8 + struct.unpack("<Q", content[:8])[0]])


def make_folder(kind: str, name: str) -> Callable[[Path], Path]:
    def make(folder: Path) -> Path:
        contents, values = drawn(MODELS["llama"])
        write(kind, folder / "made", contents, values)
        (file,) = (folder / "made").rglob(name)
        return file

    return make


def read_archive(path: Path) -> None:
    sandbox = Sandbox(True, path)
    try:
        archive = Archive(path, sandbox)
        with suppress(AttributeError):
            for place in archive.value["model"].values():
                archive.tensor(place)
                archive.verify(place)
        archive.close()
    finally:
        sandbox.close()


def make_archive(folder: Path) -> Path:
    torch.save({"model": {"weight": torch.arange(12.0).reshape(3, 4).t(), "bias": torch.ones(3)}}, folder / "w.pt")
    return folder / "w.pt"


METRICS = '{"event": "start", "step": 0}\n{"step": 1, "loss": 2.5}\n{"event": "evaluation", "step": 1, "loss": 2.0}\n'
ROWS = "rows:\n- {name: a, config: run.yaml, devices: 2, step_seconds: 0.5, overrides: {batch.micro_size: 4}}\n"
HARDWARE = (ROOT / "megapipe/layout/hardware/presets/h100.yaml").read_text()
VOCABULARY = json.dumps(
    {
        "model": {"type": "WordPiece", "vocab": {"[PAD]": 0, "[CLS]": 1, "[SEP]": 2, "[MASK]": 3, "##a": 4}},
        "added_tokens": [{"content": "[PAD]", "id": 0}],
    }
)
JOURNAL = json.dumps({"format_version": 1, **vars(Journal(job="job", writers=[])), "writers": [[1, 2, 3, ["a"] * 3]]})
KINDS = "num_layers: 2\nlayer_kinds: {a: {sliding_window: 3, rope_scaling: {kind: linear}}}\nlayer_pattern: [a]\n"
READERS = {
    "checkpoint manifest": Reader(make_manifest, read_checkpoint, build=signed),
    "shard index": Reader(make_shard, read_shard, None),
    "shard manifest": Reader(lambda folder: manifest_path(make_shard(folder).with_suffix("")), read_described_shard),
    "schedule": Reader(text_file(dumps(build("interleaved_1f1b", 2, 4, chunks=2))), load_file, None),
    "trace": Reader(make_trace, read_rank),
    "hardware": Reader(text_file(HARDWARE, "machine.yaml"), lambda path: load_hardware(str(path)), None),
    "configuration": Reader(example("gpt_tiny.yaml"), parsed("--config"), None),
    "model": Reader(example("models/llama3_8b.yaml"), parsed("--model"), None),
    "layer kinds": Reader(text_file(KINDS, "m.yaml"), lambda path: parsed("--model")(path).model.problems(), None),
    "measured rows": Reader(
        text_file(ROWS, "rows.yaml", run="model: {num_layers: 2}\n"), lambda path: read_rows(str(path)), None
    ),
    "metrics": Reader(text_file(METRICS), read_losses, None),
    "journal": Reader(text_file(JOURNAL), lambda path: read_journal(path, "job")),
    "vocabulary": Reader(text_file(VOCABULARY, "tokenizer.json"), BertVocabulary.read),
    "config.json": Reader(make_hugging_face, read_source),
    "safetensors": Reader(
        lambda folder: make_hugging_face(folder).with_name("model.safetensors"),
        read_source,
        header_of,
        lambda value: struct.pack("<Q", len(text := json.dumps(value).encode())) + text + bytes(200_000),
    ),
    "safetensors index": Reader(make_indexed, read_source),
    "torch archive": Reader(make_archive, read_archive, None),
    "DCP metadata": Reader(make_folder("dcp", ".metadata"), lambda path: read_source(path, "dcp"), None),
    "DCP model": Reader(make_folder("dcp", "megapipe.json"), lambda path: read_source(path, "dcp")),
    "DCP data": Reader(make_folder("dcp", "*.distcp"), lambda path: read_source(path, "dcp"), None),
    "torch_dist": Reader(
        make_folder("megatron-dist", "metadata.json"), lambda path: read_source(path, "megatron-dist")
    ),
    "Megatron": Reader(
        make_folder("megatron", "model_optim_rng.pt"), lambda path: read_source(path.parent, "megatron"), None
    ),
}
PIECES = (
    b"\x00", b"\xff", b"[", b"]", b"{", b"}", b'"', b":", b",", b"-", b"0", b"9" * 30, b"1e999", b"NaN", b"Infinity",
    b"null", b"true", b"&a ", b"*a", b"!!int ", b"\n", b"  ", b"- ", b"\\ud800", b"/../", b"\xed\xa0\x80",
)  # fmt: skip
VALUES: tuple[Any, ...] = (
    None, True, False, 0, -1, 1.5, 2**31, 2**63, 10**30, 10**60, 1e300, float("inf"), float("nan"), "", "x",
    "..", "\0", "9" * 5000, [], {}, [[]], [None], {"a": None}, [1, "a"], ["x"] * 3, [[0]] * 2,
)  # fmt: skip


def with_changed_bytes(content: bytes, chance: random.Random) -> bytes:
    changed = bytearray(content)
    for _ in range(chance.choice((1, 1, 2, 8))):
        at = chance.randrange(len(changed) + 1)
        stop = at + chance.choice((0, 1, 1, 4, 30))
        kind = chance.randrange(4)
        if kind == 0 and at < len(changed):
            changed[at] ^= 1 << chance.randrange(8)
        elif kind == 1:
            changed[at:stop] = chance.choice(PIECES)
        elif kind == 2:
            changed[at:stop] = changed[at:stop] * 2
        else:
            del changed[at : chance.choice((stop, stop, len(changed)))]
    return bytes(changed)


def with_changed_value(value: Any, chance: random.Random) -> Any:
    """A copy with one value, at any level, replaced, removed, or under another name."""
    if not isinstance(value, (dict, list)) or not value or chance.random() < 0.15:
        return chance.choice(VALUES)
    copied = value.copy()
    place = chance.choice(list(copied) if isinstance(copied, dict) else range(len(copied)))
    if chance.random() < 0.1:
        del copied[place]
    else:
        copied[place] = with_changed_value(copied[place], chance)
    return copied


def mutated(reader: Reader, content: bytes, chance: random.Random) -> bytes:
    if reader.parse is None or chance.random() < 0.4:
        return with_changed_bytes(content, chance)
    return reader.build(with_changed_value(reader.parse(content), chance))


@pytest.mark.parametrize(
    ("examples", "seconds"),
    [
        pytest.param(range(2), 1.0, id="two"),
        pytest.param(range(2, 1_000_000), 0.6, marks=pytest.mark.slow, id="many"),
    ],
)
@pytest.mark.parametrize("name", READERS)
def test_a_mutated_file_gives_a_value_or_one_line(name: str, examples: range, seconds: float, tmp_path: Path) -> None:
    """Read mutated files until the examples or the time are used up. The seed of a failure is in the message."""
    reader = READERS[name]
    path = reader.make(tmp_path)
    content = path.read_bytes()
    reader.read(path)
    end = time.monotonic() + seconds
    for seed in examples:
        path.write_bytes(mutated(reader, content, random.Random(f"{name} {seed}")))
        start = time.process_time()
        try:
            reader.read(path)
        except EXPECTED as error:
            lines = error.problems if isinstance(error, ConfigError) else [str(error)]
            assert all(line.strip() and "\n" not in line for line in lines), f"{name}, seed {seed}: {lines}"
        except Exception as error:
            raise AssertionError(f"{name}, seed {seed}: {error!r}") from error
        assert time.process_time() - start < 5, f"{name}, seed {seed}"
        if time.monotonic() > end:
            break


def test_a_key_twice_among_many_is_refused_at_once() -> None:
    keys = ",".join(f'"{number}":0' for number in range(20_000))
    start = time.process_time()
    with pytest.raises(CheckpointError, match="the key '19999' twice"):
        decode_json(f'{{{keys},"19999":1}}'.encode(), "hostile", CheckpointError)
    assert time.process_time() - start < 2
