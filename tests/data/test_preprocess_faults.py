"""Preprocessing whose processes are killed, stopped or die: what is left behind, and what is said."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from megapipe.data.errors import DataError
from megapipe.data.preprocess import command as program
from megapipe.data.preprocess.workers import interrupts_put_off, map_in_order
from tests.data.preprocess_runs import ROOT, TOOL, preprocess, texts_of, write_json_lines
from tests.support.patience import wait_until


def test_what_a_killed_run_left_is_not_trusted(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("good")
    (tmp_path / "out.parts").mkdir()
    (tmp_path / "out.parts" / "000000_0.bin").write_bytes(b"bad")
    (tmp_path / "out_text_document.bin.partial").write_bytes(b"bad")
    assert preprocess("--input", tmp_path / "a.txt", "--output-prefix", tmp_path / "out") == 0
    assert texts_of(tmp_path / "out_text_document") == ["good"]
    assert len(list(tmp_path.iterdir())) == 4


def held_tool(folder: Path) -> list[str]:
    """The tool, but that it stands still behind the first part that it has joined: it never comes to its end."""
    program = folder / "held.py"
    program.write_text(
        "import runpy, time\n"
        "from megapipe.data.preprocess import command\n"
        "command.ProgressLine.show = lambda *_: time.sleep(1000)\n"
        f"if __name__ == '__main__': runpy.run_path({TOOL[1]!r}, run_name='__main__')\n"
    )
    return [sys.executable, str(program)]


def test_an_interrupted_run_stops_its_workers_and_can_be_repeated(tmp_path: Path) -> None:
    write_json_lines(tmp_path / "in.jsonl", [{"text": "x" * 100_000}] * 200)
    arguments = [
        "--input",
        str(tmp_path / "in.jsonl"),
        "--tokenizer",
        "bytes",
        "--output-prefix",
        str(tmp_path / "out"),
    ]
    process = subprocess.Popen(
        [*held_tool(tmp_path), *arguments, "--workers", "2"],
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    wait_until(lambda: list(tmp_path.glob("out.parts/0*")) != [])
    process.send_signal(signal.SIGINT)
    assert process.communicate(timeout=60)[1] == "interrupted; the same command continues where it stopped\n"
    assert process.returncode == 130
    assert not list(tmp_path.glob("*.idx"))
    assert preprocess(*arguments) == 0
    assert texts_of(tmp_path / "out_text_document") == ["x" * 100_000] * 200
    (tmp_path / "held.py").unlink()
    assert len(list(tmp_path.iterdir())) == 4


def test_ctrl_c_while_workers_start_is_one_line(tmp_path: Path) -> None:
    """A terminal sends it to every process of the command; a worker then imports, and would print where."""
    write_json_lines(tmp_path / "in.jsonl", [{"text": "x" * 100_000}] * 800)
    options = ["--input", str(tmp_path / "in.jsonl"), "--tokenizer", "bytes", "--workers", "2"]
    command = [*held_tool(tmp_path), *options, "--output-prefix", str(tmp_path / "out")]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, start_new_session=True, env=environment)
    wait_until(lambda: num_children(process.pid) >= 2)  # the first one keeps track of the others
    os.killpg(process.pid, signal.SIGINT)
    assert process.communicate(timeout=60)[1] == "interrupted; the same command continues where it stopped\n"
    assert process.returncode == 130


def ctrl_c_is_blocked() -> bool:
    return signal.SIGINT in signal.pthread_sigmask(signal.SIG_BLOCK, [])


def test_workers_have_ctrl_c_blocked_from_their_beginning() -> None:
    assert list(map_in_order(ctrl_c_is_blocked, [(), ()], workers=2)) == [True, True]
    assert not ctrl_c_is_blocked()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_ctrl_c_waits_until_a_worker_is_started() -> None:
    reached = []

    def start() -> None:
        with interrupts_put_off():
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.01)
            reached.append(True)

    with pytest.raises(KeyboardInterrupt):
        start()
    assert reached
    assert not ctrl_c_is_blocked()


def test_ctrl_c_while_a_tokenizer_is_learned_promises_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(arguments: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(program, "train_tokenizer", interrupted)
    options = ["--input", str(tmp_path), "--type", "byte-level-bpe", "--vocabulary-size", "300"]
    assert program.main(["train-tokenizer", *options, "--output", str(tmp_path / "t.json")]) == 130
    assert capsys.readouterr().err == "interrupted; nothing was written\n"


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


def num_children(process: int) -> int:
    return len(Path(f"/proc/{process}/task/{process}/children").read_text().split())


def die(number: int) -> int:
    if number == 3:
        os._exit(1)
    return number


def test_a_worker_that_dies_ends_the_run_with_the_way_out() -> None:
    with pytest.raises(DataError, match="--workers"):
        list(map_in_order(die, ((number,) for number in range(8)), workers=2))


def stand_still(path: str) -> None:
    Path(path).write_text(str(os.getpid()))
    time.sleep(120)


def test_workers_end_with_a_killed_parent(tmp_path: Path) -> None:
    code = "from tests.data.test_preprocess_faults import stand_still, map_in_order\n"
    code += f"if __name__ == '__main__': list(map_in_order(stand_still, [({str(tmp_path / 'pid')!r},)], 2))"
    (tmp_path / "parent.py").write_text(code)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, str(tmp_path / "parent.py")]
    parent = subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL)
    wait_until(lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text() != "")
    worker = int((tmp_path / "pid").read_text())
    os.kill(parent.pid, signal.SIGKILL)
    parent.wait()
    wait_until(lambda: not alive(worker))


def alive(process: int) -> bool:
    """Zombies, which nobody may be there to reap, do not count."""
    status = Path(f"/proc/{process}/stat")
    try:
        return status.read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False
