"""Pickles from untrusted sources: each fixture would do harm if it were read in the usual way, and is refused."""

import builtins
import os
import pickle
import resource
import socket
import struct
import subprocess
import tempfile
import time
import zipfile
from argparse import Namespace
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megapipe.checkpoint.storage import CheckpointError, DamagedCheckpointError
from megapipe.config.files import DECODING_ERRORS
from megapipe.conversion import archive as archive_module
from megapipe.conversion import confined
from megapipe.conversion.archive import Archive, InertObject, Sandbox


class Harm:
    """Pickles to a call of `function` with `arguments`."""

    def __init__(self, function: object, *arguments: object) -> None:
        self._call = (function, arguments)

    def __reduce__(self) -> tuple[object, tuple[object, ...]]:
        return self._call


@pytest.fixture(scope="module")
def sandbox() -> Iterator[Sandbox]:
    process = Sandbox(True, Path("folder"))
    yield process
    process.close()


def hostile(mark: Path) -> dict[str, tuple[object, str]]:
    """Return values with the name that the refusal contains. Unpickling one would create the file `mark`."""
    command = f"touch {mark}"
    system = Harm(os.system, command)
    return {
        "system": (system, "posix.system"),
        "eval": (Harm(builtins.eval, f"open({str(mark)!r}, 'w')"), "builtins.eval"),
        "nested": ({"model": [OrderedDict(weight=(1, {2: system}))]}, "posix.system"),
        "within a listed class": (Namespace(hidden=Harm(subprocess.call, command)), r"(subprocess|commands)\.call"),
        "hub": (Harm(torch.hub.load, "someone/something", "model"), "torch.hub.load"),
        "open": (Harm(open, str(mark), "w"), "open"),
        "getattr": (Harm(getattr, Path, "unlink"), "builtins.getattr"),
        "torch.load": (Harm(torch.load, str(mark)), "torch.serialization.load"),
        "numpy": (Harm(np.load, str(mark), None, True), "numpy.load"),
    }


def bare(content: bytes, sandbox: Sandbox) -> Any:
    """Return what the confined process reads from a bare pickle, like `.metadata`."""
    with tempfile.TemporaryFile() as file:
        file.write(content)
        file.flush()
        return sandbox.load(file.fileno(), 0, len(content), "folder/.metadata", archive=False)


def archived(content: bytes, path: Path, storages: Sequence[bytes] = ()) -> Path:
    """Write an archive like torch.save, with any pickle in it."""
    writer = torch._C.PyTorchFileWriter(str(path))
    writer.write_record("data.pkl", content, len(content))
    writer.write_record("byteorder", b"little", 6)
    for number, storage in enumerate(storages):
        writer.write_record(f"data/{number}", storage, len(storage))
    writer.write_end_of_file()
    return path


@pytest.mark.parametrize("kind", hostile(Path("mark")))
def test_harmful_pickles_are_refused_and_nothing_runs(kind: str, sandbox: Sandbox, tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    value, named = hostile(mark)[kind]
    with pytest.raises(CheckpointError, match=rf"metadata is not read: it names \S*({named}|argparse.Namespace)"):
        bare(pickle.dumps(value), sandbox)
    torch.save(value, tmp_path / "weights.pt")
    with pytest.raises(CheckpointError, match=rf"weights\.pt is not read: it names \S*{named}"):
        Archive(tmp_path / "weights.pt", sandbox)
    assert not mark.exists()
    assert bare(pickle.dumps([1]), sandbox) == [1]
    if kind == "nested":
        pickle.loads(pickle.dumps(value))
        assert mark.exists(), "the fixture would do harm"


def bomb(depth: int) -> bytes:
    value: list[object] = []
    for _ in range(depth):
        value = [value] * 100
    return pickle.dumps(value)


BARE = {
    "memo": (b"\x80\x02" + b"N" + b"r" + struct.pack("<I", 2**32 - 1) + b".", "more memory"),
    "text": (b"\x80\x04\x8d" + struct.pack("<Q", 1 << 40) + b"short", "damaged"),
    "cut": (pickle.dumps({"a": 1})[:-4], "damaged"),
    "empty": (b"", "damaged"),
    "marks": (b"\x80\x02" + b"(" * 5 + b"l" * 200 + b".", "damaged"),
    "cycle": (b"\x80\x04" + b"]" + b"\x94" + b"h\x00" + b"a.", "nested deeper"),
    "deep": (b"\x80\x02" + b"]" * 200 + b"a" * 199 + b".", "nested deeper"),
    "bare name": (b"\x80\x02cos\nsystem\n.", "os.system"),
    "persistent id": (b"\x80\x02X\x01\x00\x00\x00aQ.", "damaged"),
    "bomb": (bomb(6), "far more values"),
    "characters": (pickle.dumps([text := "x" * 2000] + [text] * 5000), "far more values"),
}


@pytest.mark.parametrize("kind", BARE)
def test_damaged_and_oversized_pickles_are_refused(kind: str, sandbox: Sandbox, tmp_path: Path) -> None:
    content, message = BARE[kind]
    with pytest.raises(CheckpointError, match=message):
        bare(content, sandbox)
    with suppress(CheckpointError):  # torch's loader does without a memo of that size
        assert Archive(archived(content, tmp_path / "weights.pt"), sandbox).value is None


def body(value: object) -> bytes:
    """Return the pickle of a value as a part of another one: without a head and an end."""
    return pickle.dumps(value, 2)[2:-1]


def late_state(name: str) -> bytes:
    """Return a pickle that makes an object of a class and sets its state twice."""
    made = f"c{name.rpartition('.')[0]}\n{name.rpartition('.')[2]}\n".encode() + b")\x81"
    return b"\x80\x02" + made + body({"a": 1}) + b"b" + body({"a": 2}) + b"b."


def test_no_field_is_set_after_it_was_checked(sandbox: Sandbox, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"state of a torch.distributed.checkpoint.metadata.Metadata twice"):
        bare(late_state("torch.distributed.checkpoint.metadata.Metadata"), sandbox)
    with pytest.raises(CheckpointError, match=r"state of a argparse.Namespace twice"):
        Archive(archived(late_state("argparse.Namespace"), tmp_path / "weights.pt"), sandbox)


STORAGE = b"(X\x07\x00\x00\x00storagectorch\nFloatStorage\nX\x01\x00\x00\x000X\x03\x00\x00\x00cpuK\x04tQ"
"""Keys and location of a storage with four floats, as a pickle has them."""


def tensor_at(offset: int, shape: tuple[int, ...], stride: tuple[int, ...], state: bytes = b"") -> bytes:
    """Return a pickle of one tensor of a storage of four floats. state: set on it afterwards."""
    parts = b"".join(map(body, (offset, shape, stride, False)))
    rebuilt = b"ctorch._utils\n_rebuild_tensor_v2\n(" + STORAGE + parts + b"ccollections\nOrderedDict\n)RtR"
    return b"\x80\x02" + rebuilt + state + b"b" * bool(state) + b"."


OUTSIDE = {
    "before it": (-1000, (4,), (1,)),
    "after it": (1, (4,), (1,)),
    "negative size": (0, (-4,), (1,)),
    "negative stride": (3, (4,), (-1,)),
    "overflow": (0, (2, 4), (1 << 62, 1)),
    "too large": (0, (1 << 40,), (1,)),
    "beyond 64 bits": (0, (1 << 70,), (1,)),
}


@pytest.mark.parametrize("place", OUTSIDE)
@pytest.mark.parametrize("form", ["tensor", "arguments", "fields"])
def test_a_tensor_outside_its_storage_is_refused(place: str, form: str, sandbox: Sandbox, tmp_path: Path) -> None:
    """Also if a pickle sets the state of a tensor that it has built."""
    names, values = ("offset", "shape", "stride"), OUTSIDE[place]
    content = {
        "tensor": tensor_at(*values),
        "arguments": tensor_at(0, (4,), (1,), b"(" + STORAGE + b"".join(map(body, values)) + b"t"),
        "fields": tensor_at(0, (4,), (1,), body(dict(zip(names, values, strict=True)))),
    }[form]
    elements = [np.arange(4, dtype="<f4").tobytes()]
    path = archived(content, tmp_path / "weights.pt", elements)
    start = time.process_time()
    with pytest.raises(CheckpointError, match=r"weights\.pt is not read"):
        Archive(path, sandbox)
    assert time.process_time() - start < 5
    archive = Archive(archived(tensor_at(1, (3,), (1,)), tmp_path / "whole.pt", elements), sandbox)
    assert archive.tensor(archive.value).tolist() == [1.0, 2.0, 3.0]
    archive.close()


GOOD = {"dtype": "float32", "start": 64, "num_bytes": 16, "crc32": 0, "offset": 0, "shape": [4], "stride": [1]}


@pytest.mark.parametrize(
    "change",
    [
        *({"offset": wrong} for wrong in (-1, 1)),
        *({"start": wrong} for wrong in (-64, 100)),
        *({"num_bytes": wrong} for wrong in (18, 1 << 70)),
        *({"shape": wrong} for wrong in ([-4], [4.0], 4)),
        {"shape": [True, 4], "stride": [1, 1]},
        {"shape": [2, 4], "stride": [1]},
        {"stride": [-1]},
        *({"dtype": wrong} for wrong in ("load", 3)),
        {"more": 1},
    ],
    ids=str,
)
def test_the_parent_checks_every_place(change: dict[str, Any]) -> None:
    assert archive_module._decoded({"tensor": dict(GOOD)}, 100).shape == (4,)
    with pytest.raises(DECODING_ERRORS):
        archive_module._decoded({"tensor": GOOD | change}, 100)


def framed(text: bytes) -> bytes:
    return struct.pack("<Q", len(text)) + text


@pytest.mark.parametrize(
    ("reply", "message"),
    [
        (b"", "ended, or was stopped"),
        (struct.pack("<Q", 1 << 62), "gave an answer of 4,611,686,018,427,387,904 bytes"),
        (struct.pack("<Q", 100) + b"short", "took longer than 0.2 s"),
        (framed(b"[" * 100_000), "not readable JSON"),
        (framed(b"{}"), "gave no answer"),
        (framed(b'{"value": {"record": [1]}}'), "is not read"),
    ],
    ids=["closed", "long", "slow", "deep", "empty", "wrong"],
)
def test_a_wrong_reply_is_one_error(
    reply: bytes, message: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Replies of a confined process that hostile code controls."""

    def serve(channel: socket.socket) -> None:
        socket.recv_fds(channel, 100, 1)
        channel.sendall(reply)
        time.sleep(60 if message.startswith("took") else 0)
        os._exit(0)

    monkeypatch.setattr(archive_module, "REPLY_SECONDS", 0.2 if message.startswith("took") else 20.0)
    monkeypatch.setattr(confined, "serve", serve)
    with closing(Sandbox(True, tmp_path)) as taken, pytest.raises(CheckpointError, match=message):
        bare(b"", taken)


@pytest.mark.slow
def test_a_pickle_that_never_ends_is_stopped(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    confined.warm_up()
    monkeypatch.setattr(confined, "CPU_SECONDS", 0)
    monkeypatch.setattr(confined, "unpickled", lambda content: content and all(iter(lambda: True, False)))
    message = "stopped at one of its limits"
    with closing(Sandbox(True, tmp_path)) as stopped, pytest.raises(CheckpointError, match=message):
        bare(pickle.dumps([1]), stopped)


def test_listed_classes_become_records(sandbox: Sandbox, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"--allow-pickle"):
        Sandbox(False, tmp_path)
    with torch.serialization.safe_globals([Namespace]):  # classes that the program allows stay records too
        before = torch.serialization.get_safe_globals()
        confined.warm_up.__wrapped__()
        assert set(torch.serialization.get_safe_globals()) == set(before)
        check_records(sandbox, tmp_path)
        with closing(Sandbox(True, tmp_path)) as other:
            check_records(other, tmp_path)


def check_records(sandbox: Sandbox, tmp_path: Path) -> None:
    lists = defaultdict(list, a=[1])
    torch.save({"args": Namespace(layers=2, dtype=torch.bfloat16), 3: (1.5, None, b"abc"), "d": lists}, tmp_path / "w")
    args = InertObject("argparse.Namespace", {"layers": 2, "dtype": "torch.bfloat16"})
    with closing(Archive(tmp_path / "w", sandbox)) as archive:
        assert archive.value == {"args": args, 3: (1.5, None, InertObject("bytes")), "d": {"a": [1]}}


def test_the_confined_process_cannot_open_write_or_fork(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mark, existing = tmp_path / "mark", tmp_path / "existing"
    existing.write_text("")
    tmp_path.chmod(0o777)
    existing.chmod(0o666)
    attempts: dict[str, Callable[[], object]] = {
        "create": lambda: mark.open("w"),
        "open": existing.open,
        "connect": socket.socket,
        "raise the limit of files": lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64)),
        "raise the limit of sizes": lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (64, 64)),
        "fork": lambda: os.fork() or os._exit(0),
    }

    def escapes(content: bytes) -> list[str]:
        done = []
        for name, attempt in attempts.items():
            with suppress(OSError, ValueError):
                attempt()
                done.append(name)
        return done

    confined.warm_up()
    monkeypatch.setattr(confined, "unpickled", escapes)
    with closing(Sandbox(True, tmp_path)) as confined_now:
        assert bare(b"x", confined_now) == []
    assert not mark.exists()


def test_good_archives_are_read_under_a_low_memory_limit(tmp_path: Path) -> None:
    torch.save({"weight": torch.arange(4.0)}, tmp_path / "weights.pt")
    child = os.fork()
    if child == 0:
        try:
            size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize() + (256 << 20)
            resource.setrlimit(resource.RLIMIT_AS, (size, size))
            archive = Archive(tmp_path / "weights.pt", Sandbox(True, tmp_path))
            os._exit(archive.tensor(archive.value["weight"]).tolist() == [0.0, 1.0, 2.0, 3.0])
        finally:
            os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 1


def test_legacy_and_compressed_archives_are_refused(sandbox: Sandbox, tmp_path: Path) -> None:
    torch.save({"weight": torch.ones(2)}, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    with pytest.raises(CheckpointError, match=r"torch 1\.6"):
        Archive(tmp_path / "old.pt", sandbox)
    torch.save({"weight": torch.ones(2)}, tmp_path / "new.pt")
    with zipfile.ZipFile(tmp_path / "new.pt") as new, zipfile.ZipFile(tmp_path / "small.pt", "w") as small:
        for entry in new.infolist():
            small.writestr(entry.filename, new.read(entry), zipfile.ZIP_DEFLATED)
    with pytest.raises(CheckpointError, match="compressed"):
        Archive(tmp_path / "small.pt", sandbox)


@pytest.mark.parametrize("kept", [0, 1, 300, -1])
def test_a_cut_archive_is_damage(kept: int, sandbox: Sandbox, tmp_path: Path) -> None:
    path = tmp_path / "weights.pt"
    torch.save({"weight": torch.ones(100)}, path)
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(DamagedCheckpointError, match=r"weights\.pt"):
        Archive(path, sandbox)


def test_what_torch_saves_is_read(sandbox: Sandbox, tmp_path: Path) -> None:
    whole = torch.randn(6, 4)
    saved = {
        "whole": whole,
        "transposed": whole.t(),
        "part": whole[1:3, ::2],
        "scalar": torch.tensor(3, dtype=torch.int64),
        "empty": torch.zeros(0, 3),
        "bf16": torch.nn.Parameter(whole.bfloat16()),
    }
    others = {"random": np.random.RandomState(0).get_state(), "expanded": torch.zeros(1).expand(1 << 40)}
    torch.save({**saved, **others}, tmp_path / "weights.pt")
    with closing(Archive(tmp_path / "weights.pt", sandbox)) as archive:
        with pytest.raises(DamagedCheckpointError, match="repeats elements"):
            archive.tensor(archive.value["expanded"])
        for name, tensor in saved.items():
            read = archive.tensor(archive.value[name])
            assert read.is_contiguous()
            assert read.dtype == tensor.dtype
            assert torch.equal(read, tensor)
            assert not archive.verify(archive.value[name])
