"""A run that is killed and given again ends with the bytes of one that nobody disturbed, and does not start over."""

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from megapipe.data.preprocess import run as preprocess_run
from megapipe.data.preprocess.inputs import find_inputs
from megapipe.data.preprocess.journal import read_journal
from megapipe.data.preprocess.run import preprocess
from megapipe.data.preprocess.tokenize_part import TokenizedPart, TokenizeSettings
from tests.data.preprocess_runs import write_json_lines

SETTINGS = TokenizeSettings(tokenizer="bytes", append_end_of_document=True, json_keys=("a", "b"), drop_duplicates=True)
KINDS = [f"{key}_document.{kind}" for key in "ab" for kind in ("bin", "idx", "manifest.json")]


def write_input(folder: Path, megabytes: int) -> Path:
    """Every seventh document is an earlier one, in another part."""
    records = [{"a": str(n % 7 and n), "b": f"{n % 7 and n} " * 20_000} for n in range(megabytes * 9)]
    return write_json_lines(folder / "in.jsonl", records)


class Stop(BaseException):
    """Ends a run as SIGKILL would, as far as files are concerned: nothing is cleaned up on the way."""


def stopped_after(files: list, prefix: Path, parts: int, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = 0

    def stop(part: TokenizedPart, writer: object) -> None:
        nonlocal seen
        seen += 1
        if seen > parts:
            raise Stop

    with monkeypatch.context() as patch:
        patch.setattr(preprocess_run, "JOURNAL_SECONDS", 0.0)
        with pytest.raises(Stop):
            preprocess(files, str(prefix), SETTINGS, on_part=stop)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("undisturbed")
    write_input(folder, 24)
    preprocess(find_inputs([str(folder / "in.jsonl")]), str(folder / "out"), SETTINGS)
    return folder


def same_as_undisturbed(prefix: Path, undisturbed: Path) -> None:
    for kind in KINDS:
        assert Path(f"{prefix}_{kind}").read_bytes() == (undisturbed / f"out_{kind}").read_bytes()
    assert not list(prefix.parent.glob("*.part*"))


def test_a_run_continues_behind_its_journal(
    tmp_path: Path, undisturbed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files, prefix = find_inputs([str(undisturbed / "in.jsonl")]), tmp_path / "out"
    stopped_after(files, prefix, 3, monkeypatch)
    assert not list(tmp_path.glob("*.idx"))
    begun: list[int] = []
    preprocess(files, str(prefix), SETTINGS, on_start=lambda journal: begun.append(journal.next_part))
    assert begun == [3]
    same_as_undisturbed(prefix, undisturbed)


@pytest.mark.parametrize("damage", ["flip", "cut", "remove", "journal", "parts", "other job"])
def test_what_was_damaged_is_not_trusted(
    tmp_path: Path, undisturbed: Path, monkeypatch: pytest.MonkeyPatch, damage: str
) -> None:
    files, prefix = find_inputs([str(undisturbed / "in.jsonl")]), tmp_path / "out"
    stopped_after(files, prefix, 2, monkeypatch)
    tokens = tmp_path / "out_b_document.bin.partial"
    content = tokens.read_bytes()
    if damage == "flip":
        tokens.write_bytes(b"\x00" + content[1:])
    elif damage == "cut":
        tokens.write_bytes(content[:1000])
    elif damage == "remove":
        (tmp_path / "out_a_document.lengths.partial").unlink()
    elif damage == "journal":
        (tmp_path / "out.parts" / "journal.json").write_text("{")
    elif damage == "parts":
        (tmp_path / "out.parts" / "00000002_0.bin").write_bytes(b"left behind")
        tokens.write_bytes(content + b"more than the journal knows")
    else:
        path = tmp_path / "out.parts" / "journal.json"
        journal = read_journal(path, path.read_text().split('"job": "')[1].split('"')[0])
        assert journal is not None
        journal.job = "sha256:0"
        journal.save(path)
    begun: list[int] = []
    preprocess(files, str(prefix), SETTINGS, on_start=lambda journal: begun.append(journal.next_part))
    assert begun == [2 if damage == "parts" else 0]
    same_as_undisturbed(prefix, undisturbed)


def test_two_runs_with_one_output_do_not_meet(tmp_path: Path, undisturbed: Path) -> None:
    files = find_inputs([str(undisturbed / "in.jsonl")])
    refused = []

    def again(part: TokenizedPart, writer: object) -> None:
        try:
            preprocess(files, str(tmp_path / "out"), SETTINGS)
        except ValueError as error:
            refused.append(str(error))

    preprocess(files, str(tmp_path / "out"), SETTINGS, on_part=again)
    assert refused
    assert all("another run is writing" in message for message in refused)
    same_as_undisturbed(tmp_path / "out", undisturbed)


# The tool with a journal behind every part: how many parts a killed run finished then depends on no clock.
JOURNALS_ALWAYS = """
import sys
from megapipe.data.preprocess import command, run
run.JOURNAL_SECONDS = 0.0
sys.exit(command.main(sys.argv[1:]))
"""


def wait_for_another_part(process: subprocess.Popen, journal: Path) -> None:
    """Returns when `journal` has changed, or `process` has ended."""
    before = journal.read_bytes() if journal.exists() else b""
    while process.poll() is None and (not journal.exists() or journal.read_bytes() == before):
        time.sleep(0.005)


@pytest.mark.slow
def test_killed_at_twenty_random_moments(tmp_path: Path) -> None:
    write_input(tmp_path, 150)
    command = [sys.executable, "-c", JOURNALS_ALWAYS, "--input", str(tmp_path / "in.jsonl"), "--json-keys", "a", "b"]
    command += ["--tokenizer", "bytes", "--append-eod", "--drop-duplicates", "--workers", "2", "--output-prefix"]
    start = time.monotonic()
    subprocess.run([*command, str(tmp_path / "out")], check=True, capture_output=True, timeout=300)
    whole = time.monotonic() - start
    chance = random.Random(0)
    kills = continued = expected = 0
    (tmp_path / "killed").mkdir()
    prefix = tmp_path / "killed" / "out"
    journal = tmp_path / "killed" / "out.parts" / "journal.json"
    while kills < 20:
        expected += journal.exists()
        process = subprocess.Popen(
            [*command, str(prefix)], stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True, process_group=0
        )
        if kills % 2:  # somewhere inside the part after the next one, however fast the machine
            wait_for_another_part(process, journal)
        try:
            process.wait(chance.uniform(0.0, whole * 0.2) if kills % 2 else chance.uniform(0.1, whole * 0.6))
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            kills += 1
        assert process.stderr is not None
        continued += "continuing a run" in process.stderr.read()
        if process.wait() == 0:  # it came to the end: begin anew
            same_as_undisturbed(prefix, tmp_path)
            for kind in KINDS:
                Path(f"{prefix}_{kind}").unlink()
    subprocess.run([*command, str(prefix)], check=True, capture_output=True, timeout=300)
    same_as_undisturbed(prefix, tmp_path)
    assert expected >= 5  # half of the kills found a part finished, unless the run came to its end first
    assert continued >= expected // 2  # the others were killed again before they had come to say it
