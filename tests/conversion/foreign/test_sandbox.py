"""Pickles of strangers: each fixture would do harm if it were read the usual way, and is refused by name."""

import argparse
import builtins
import os
import pickle
import struct
import subprocess
import sys
import textwrap
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from megapipe.checkpoint.errors import CheckpointError, DamagedCheckpointError
from megapipe.conversion.foreign import unpickler
from megapipe.conversion.foreign.archive import Archive
from megapipe.conversion.foreign.sandbox import Record, Sandbox


class Harm:
    """Pickles to a call of `function` with `arguments`."""

    def __init__(self, function: object, *arguments: object) -> None:
        self._call = (function, arguments)

    def __reduce__(self) -> tuple[object, tuple[object, ...]]:
        return self._call


@pytest.fixture(scope="module")
def sandbox() -> Iterator[Sandbox]:
    found = Sandbox(True, Path("folder"))
    yield found
    found.close()


def hostile(mark: Path) -> dict[str, tuple[object, str]]:
    """Value -> what the refusal names. Reading one the usual way would make the file `mark`."""
    command = f"touch {mark}"
    return {
        "system": (Harm(os.system, command), "posix.system"),
        "eval": (Harm(builtins.eval, f"open({str(mark)!r}, 'w')"), "builtins.eval"),
        "nested": ({"model": [OrderedDict(weight=(1, {2: Harm(os.system, command)}))]}, "posix.system"),
        "within a listed class": (
            argparse.Namespace(hidden=Harm(subprocess.call, command)),
            "subprocess.call",
        ),
        "hub": (Harm(torch.hub.load, "someone/something", "model"), "torch.hub.load"),
        "open": (Harm(open, str(mark), "w"), "open"),
        "getattr": (Harm(getattr, Path, "unlink"), "builtins.getattr"),
        "torch.load": (Harm(torch.load, str(mark)), "torch.serialization.load"),
        "numpy": (Harm(np.load, str(mark), None, True), "numpy.load"),
        "a large array": (Harm(bytearray, 1 << 40), "builtins.bytearray"),
    }


@pytest.mark.parametrize("kind", hostile(Path("mark")))
def test_harmful_pickles_are_refused_by_name_and_nothing_runs(kind: str, sandbox: Sandbox, tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    value, named = hostile(mark)[kind]
    with pytest.raises(CheckpointError, match=rf"weights\.pt is not read: it names \S*{named}"):
        sandbox.load(pickle.dumps(value), "weights.pt")
    assert not mark.exists()
    assert sandbox.load(pickle.dumps([1]), "the next one") == [1]


def test_the_fixtures_do_harm_to_who_unpickles_them(tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    pickle.loads(pickle.dumps(hostile(mark)["nested"][0]))
    assert mark.exists()


def bomb(depth: int) -> bytes:
    value: list[object] = []
    for _ in range(depth):
        value = [value] * 100
    return pickle.dumps(value)


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (b"\x80\x02" + b"N" + b"r" + struct.pack("<I", 2**32 - 1) + b".", "more memory"),
        (b"\x80\x04\x8d" + struct.pack("<Q", 1 << 40) + b"short", "not a readable pickle"),
        (pickle.dumps({"a": 1})[:-4], "not a readable pickle"),
        (b"", "not a readable pickle"),
        (b"\x80\x02" + b"(" * 5 + b"l" * 200 + b".", "not a readable pickle"),
        (b"\x80\x04" + b"]" + b"\x94" + b"h\x00" + b"a.", "nested deeper"),
        (b"\x80\x02" + b"]" * 200 + b"a" * 199 + b".", "nested deeper"),
        (b"\x80\x02cos\nsystem\n.", "os.system"),
        (b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\n(NK\x00))tR.", "without a place"),
        (b"\x80\x02X\x01\x00\x00\x00aQ.", "no storage"),
    ],
    ids=["memo", "text", "cut", "empty", "marks", "cycle", "deep", "bare name", "no storage", "persistent id"],
)
def test_damaged_and_oversized_pickles_are_refused(content: bytes, told: str, sandbox: Sandbox) -> None:
    with pytest.raises(CheckpointError, match=told):
        sandbox.load(content, "weights.pt")


def test_a_small_pickle_cannot_spell_out_a_large_reply(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unpickler, "MAX_NODES", 10_000)
    assert "more than 10000 values" in unpickler.described(bomb(6))["refused"]
    monkeypatch.setattr(unpickler, "MAX_CHARACTERS", 1000)
    assert "1000 characters" in unpickler.described(pickle.dumps(["x" * 600] * 2))["refused"]


def test_without_consent_nothing_is_read(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"--allow-pickle"):
        Sandbox(False, tmp_path)


def test_listed_classes_become_records(sandbox: Sandbox) -> None:
    found = sandbox.load(pickle.dumps({"args": argparse.Namespace(layers=2), 3: (1.5, None, b"abc")}), "weights.pt")
    assert found == {"args": Record("argparse.Namespace", (), {"layers": 2}), 3: (1.5, None, "<3 bytes>")}


def test_the_confined_process_can_neither_open_nor_write_nor_fork(tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    existing = tmp_path / "existing"
    existing.write_text("")
    tmp_path.chmod(0o777)
    existing.chmod(0o666)
    program = f"""
        import os, resource, runpy, socket
        confine = runpy.run_path({unpickler.__file__!r})["confine"]
        confine()
        def attempt(what):
            try:
                what()
            except (OSError, ValueError):
                return
            os.write(1, b"escaped")
        attempt(lambda: open({str(mark)!r}, "w"))
        attempt(lambda: open({str(existing)!r}))
        attempt(lambda: socket.socket())
        attempt(lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64)))
        attempt(lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (64, 64)))
        attempt(lambda: os.fork() or os._exit(0))
        os.write(1, b"confined")
    """
    done = subprocess.run([sys.executable, "-I", "-c", textwrap.dedent(program)], capture_output=True, text=True)
    assert done.stdout == "confined", done.stderr
    assert not mark.exists()


def test_a_tensor_outside_its_storage_is_damage(sandbox: Sandbox, tmp_path: Path) -> None:
    path = tmp_path / "weights.pt"
    torch.save({"expanded": torch.zeros(1).expand(1 << 40)}, path)
    archive = Archive(path, sandbox)
    with pytest.raises(DamagedCheckpointError, match="leaves its storage"):
        archive.tensor(archive.value["expanded"])
    archive.close()


@pytest.mark.parametrize("kept", [0, 1, 300, -1])
def test_a_cut_archive_is_damage(kept: int, sandbox: Sandbox, tmp_path: Path) -> None:
    path = tmp_path / "weights.pt"
    torch.save({"weight": torch.ones(100)}, path)
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(DamagedCheckpointError, match=r"weights\.pt"):
        Archive(path, sandbox)


def test_what_torch_saves_is_read_as_it_was(sandbox: Sandbox, tmp_path: Path) -> None:
    path = tmp_path / "weights.pt"
    whole = torch.randn(6, 4)
    saved = {
        "whole": whole,
        "transposed": whole.t(),
        "part": whole[1:3, ::2],
        "scalar": torch.tensor(3, dtype=torch.int64),
        "empty": torch.zeros(0, 3),
        "bf16": torch.nn.Parameter(whole.bfloat16()),
    }
    torch.save({**saved, "random": np.random.RandomState(0).get_state()}, path)
    archive = Archive(path, sandbox)
    for name, tensor in saved.items():
        read = archive.tensor(archive.value[name])
        assert read.is_contiguous()
        assert read.dtype == tensor.dtype
        assert torch.equal(read, tensor)
        assert not archive.verify(archive.value[name])
    archive.close()
