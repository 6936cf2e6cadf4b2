"""`megapipe doctor`: a line for every topic, a line for every problem, and the exit status."""

import importlib.metadata
import shutil
import socket
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from megapipe import __version__
from megapipe.cli.doctor import main


def test_a_healthy_host_has_a_line_for_every_topic(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    status = main([])
    output, errors = capsys.readouterr()
    assert (status, errors) == (0, "")
    assert output.endswith("no problems found\n")
    topics = ["versions", "devices", "links", "apex", "kernels", "compiler", "disk", "shared memory"]
    assert sorted({line.partition("  ")[0] for line in output.splitlines()[:-1]} - {"package"}) == sorted(topics)
    assert f"megapipe {__version__}, torch {torch.__version__}" in output
    assert "gloo on CPUs" in output
    assert "rms_norm" in output


def problems(capsys: pytest.CaptureFixture[str]) -> list[str]:
    assert main([]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert "no problems found" not in lines
    return [line for line in lines if line.startswith("problem: ")]


def test_full_disks_and_unknown_host_names_are_problems(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def unknown(*_: object) -> None:
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=5e8))
    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    reported = problems(capsys)
    for problem, words in zip(reported, ((socket.gethostname(), "/etc/hosts"), ("500.0 MB", "disk")), strict=True):
        assert all(word in problem for word in words)


def test_a_missing_package_is_the_only_check(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others import the packages."""
    needed = ["torch>=2", "not-a-package>=3.1", 'not-asked-for>=1; extra == "test"']
    monkeypatch.setattr(importlib.metadata, "requires", lambda _: needed)
    (problem,) = problems(capsys)
    assert "not-a-package>=3.1 is not installed" in problem
