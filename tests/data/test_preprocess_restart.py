"""A run that is killed or interrupted continues when it is repeated, and ends with the bytes of an undisturbed run."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from megapipe.data import DataError
from megapipe.data.preprocess import command as program
from megapipe.data.preprocess import run as preprocess_run
from megapipe.data.preprocess.inputs import find_inputs
from megapipe.data.preprocess.run import interrupts_delayed, map_in_order
from megapipe.data.preprocess.run import preprocess as preprocess_files
from megapipe.data.preprocess.tokenize_part import TokenizedPart, TokenizeSettings
from tests.checkpoint.disks import Killed
from tests.data.commands import ROOT, TOOL, preprocess, run_command, texts_of, write_json_lines
from tests.faults.jobs import children_of, wait_for_the_end
from tests.support.patience import wait_until

SETTINGS = TokenizeSettings(tokenizer="bytes", append_end_of_document=True, json_keys=("a", "b"), drop_duplicates=True)
KINDS = [f"{key}_document.{kind}" for key in "ab" for kind in ("bin", "idx", "manifest.json")]


def write_input(folder: Path, megabytes: int) -> Path:
    """Write documents; every seventh is equal to an earlier one, in another part."""
    records = [{"a": str(n % 7 and n), "b": f"{n % 7 and n} " * 20_000} for n in range(megabytes * 9)]
    return write_json_lines(folder / "in.jsonl", records)


def run(folder: Path, prefix: Path, **how: Any) -> int:
    """Preprocess a folder's documents; return the part that the run started from."""
    started: list[int] = []
    how = {"on_start": lambda journal: started.append(journal.next_part), **how}
    preprocess_files(find_inputs([str(folder / "in.jsonl")]), str(prefix), SETTINGS, **how)
    return started[0]


def stopped_after(folder: Path, prefix: Path, parts: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(preprocess_run, "JOURNAL_SECONDS", 0.0)
        with pytest.raises(Killed):
            run(folder, prefix, on_part=Mock(side_effect=[*[None] * parts, Killed]))


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("undisturbed")
    write_input(folder, 24)
    run(folder, folder / "out")
    return folder


def same_as_undisturbed(prefix: Path, undisturbed: Path) -> None:
    for kind in KINDS:
        assert Path(f"{prefix}_{kind}").read_bytes() == (undisturbed / f"out_{kind}").read_bytes()
    assert not list(prefix.parent.glob("*.part*"))


@pytest.mark.parametrize("damage", [None, "flip", "cut", "remove", "journal", "parts", "other job"])
def test_a_run_continues_after_its_journal_unless_damaged(
    tmp_path: Path, undisturbed: Path, damage: str | None
) -> None:
    stopped_after(undisturbed, tmp_path / "out", 2)
    assert not list(tmp_path.glob("*.idx"))
    tokens, journal = tmp_path / "out_b_document.bin.partial", tmp_path / "out.parts" / "journal.json"
    content = tokens.read_bytes()
    if damage == "flip":
        tokens.write_bytes(b"\x00" + content[1:])
    elif damage == "cut":
        tokens.write_bytes(content[:1000])
    elif damage == "remove":
        (tmp_path / "out_a_document.lengths.partial").unlink()
    elif damage == "journal":
        journal.write_text("{")
    elif damage == "parts":
        (tmp_path / "out.parts" / "00000002_0.bin").write_bytes(b"left over")
        tokens.write_bytes(content + b"more than the journal knows")
    elif damage == "other job":
        journal.write_text(json.dumps({**json.loads(journal.read_text()), "job": "sha256:0"}))
    assert run(undisturbed, tmp_path / "out") == (2 if damage in (None, "parts") else 0)
    same_as_undisturbed(tmp_path / "out", undisturbed)


def test_two_runs_cannot_write_one_output(tmp_path: Path, undisturbed: Path) -> None:
    refused = []

    def again(part: TokenizedPart) -> None:
        with pytest.raises(ValueError, match="another run is writing"):
            run(undisturbed, tmp_path / "out")
        refused.append(part)

    run(undisturbed, tmp_path / "out", on_part=again)
    assert refused
    same_as_undisturbed(tmp_path / "out", undisturbed)


# The tool with a journal after every part: the parts of a killed run do not depend on the clock.
JOURNALS_ALWAYS = """
import sys
from megapipe.data.preprocess import command, run
run.JOURNAL_SECONDS = 0.0
sys.exit(command.main(sys.argv[1:]))
"""


def wait_for_another_part(process: subprocess.Popen, journal: Path) -> None:
    """Return when `journal` has changed, or `process` has ended."""
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
        if process.wait() == 0:  # it is complete: start over
            same_as_undisturbed(prefix, tmp_path)
            for kind in KINDS:
                Path(f"{prefix}_{kind}").unlink()
    subprocess.run([*command, str(prefix)], check=True, capture_output=True, timeout=300)
    same_as_undisturbed(prefix, tmp_path)
    assert expected >= 5  # half of the kills came after a finished part
    assert continued >= expected // 2  # the others were killed before they printed it


def blocked_tool(folder: Path, copies: int, **how: Any) -> tuple[subprocess.Popen, list[object]]:
    """Start a tool that waits after the first part that it has joined, and never ends; return its arguments, too."""
    write_json_lines(folder / "in.jsonl", [{"text": "x" * 100_000}] * copies)
    program = folder / "blocked.py"
    program.write_text(
        "import runpy, time\n"
        "from megapipe.data.preprocess import command\n"
        "command.ProgressLine.show = lambda *_: time.sleep(1000)\n"
        f"if __name__ == '__main__': runpy.run_path({TOOL[1]!r}, run_name='__main__')\n"
    )
    arguments = ["--input", folder / "in.jsonl", "--tokenizer", "bytes", "--output-prefix", folder / "out"]
    command = [sys.executable, program, *arguments, "--workers", "2"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment, **how), arguments


def assert_interrupted(process: subprocess.Popen) -> None:
    assert process.communicate(timeout=60)[1] == "interrupted; the same command continues where it stopped\n"
    assert process.returncode == 130


def test_an_interrupted_run_can_be_repeated(tmp_path: Path) -> None:
    process, arguments = blocked_tool(tmp_path, 90)
    wait_until(lambda: list(tmp_path.glob("out.parts/0*")) != [])
    process.send_signal(signal.SIGINT)
    assert_interrupted(process)
    assert not list(tmp_path.glob("*.idx"))
    preprocess(*arguments)
    assert texts_of(tmp_path / "out_text_document") == ["x" * 100_000] * 90
    assert len(list(tmp_path.iterdir())) == 5


@pytest.mark.exhaustive
def test_ctrl_c_while_workers_start_is_one_line(tmp_path: Path) -> None:
    """A terminal sends it to every process of the command; a worker that imports would print a traceback."""
    process, _ = blocked_tool(tmp_path, 800, start_new_session=True)
    wait_until(lambda: len(children_of(process.pid)) >= 2)  # the first one tracks the others
    os.killpg(process.pid, signal.SIGINT)
    assert_interrupted(process)


def ctrl_c_is_blocked() -> bool:
    return signal.SIGINT in signal.pthread_sigmask(signal.SIG_BLOCK, [])


def test_workers_block_ctrl_c_and_delay_it_while_starting() -> None:
    assert list(map_in_order(ctrl_c_is_blocked, [(), ()], workers=2)) == [True, True]
    assert not ctrl_c_is_blocked()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    reached = []

    def start() -> None:
        with interrupts_delayed():
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.01)
            reached.append(True)

    with pytest.raises(KeyboardInterrupt):
        start()
    assert reached
    assert not ctrl_c_is_blocked()


def test_ctrl_c_while_a_tokenizer_is_trained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(program, "train_tokenizer", Mock(side_effect=KeyboardInterrupt))
    options = ["--input", tmp_path, "--type", "byte-level-bpe", "--vocabulary-size", "300"]
    printed = run_command(program.main, "train-tokenizer", *options, "--output", tmp_path / "t.json", status=130)
    assert printed.err == "interrupted; nothing was written\n"


def test_ctrl_c_while_the_program_starts_is_one_line() -> None:
    code = (
        "import runpy, signal, sys\n"
        "class Finder:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name == 'numpy': signal.raise_signal(signal.SIGINT)\n"
        "sys.meta_path.insert(0, Finder())\n"
        f"runpy.run_path({TOOL[1]!r}, run_name='__main__')\n"
    )
    finished = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, cwd=ROOT)
    assert (finished.returncode, finished.stderr) == (130, "interrupted\n")


def die(number: int) -> int:
    if number == 3:
        os._exit(1)
    return number


def test_a_worker_that_dies_ends_the_run() -> None:
    with pytest.raises(DataError, match="--workers"):
        list(map_in_order(die, ((number,) for number in range(8)), workers=2))


def wait_long(path: str) -> None:
    Path(path).write_text(str(os.getpid()))
    time.sleep(120)


def test_workers_end_with_a_killed_parent(tmp_path: Path) -> None:
    code = "from tests.data.test_preprocess_restart import wait_long, map_in_order\n"
    code += f"if __name__ == '__main__': list(map_in_order(wait_long, [({str(tmp_path / 'pid')!r},)], 2))"
    (tmp_path / "parent.py").write_text(code)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, str(tmp_path / "parent.py")]
    parent = subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL)
    wait_until(lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text() != "")
    worker = int((tmp_path / "pid").read_text())
    os.kill(parent.pid, signal.SIGKILL)
    parent.wait()
    wait_for_the_end([worker])
