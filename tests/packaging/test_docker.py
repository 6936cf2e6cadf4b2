"""The Dockerfile is well formed, and builds an image that runs the quickstart."""

import json
import os
import re
import shutil
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.packaging.environment import ROOT

DOCKERFILE = ROOT / "examples/docker/Dockerfile"
IGNORED = DOCKERFILE.with_name("Dockerfile.dockerignore")
MIRROR = "http://deb.debian.org/debian"


def instructions() -> list[tuple[str, str]]:
    """Return each instruction of the Dockerfile with its argument, whose lines are joined."""
    lines = [line for line in DOCKERFILE.read_text().splitlines() if line and not line.startswith("#")]
    joined = "\n".join(lines).replace("\\\n", "")
    return [(line.split(" ", 1)[0], line.split(" ", 1)[1].strip()) for line in joined.splitlines()]


def test_dockerfile_instructions_are_valid_and_their_files_exist() -> None:
    steps = instructions()
    assert {name for name, _ in steps} == {"ARG", "FROM", "RUN", "COPY", "ENV", "WORKDIR", "CMD"}
    assert steps[:2] == [("ARG", "BASE"), ("FROM", "${BASE}")]
    copied = []
    for name, argument in steps:
        if name == "COPY":
            *sources, target = argument.split()
            copied += sources
            assert target == ("/opt/source/" if len(sources) > 1 else f"/opt/source/{sources[0]}")
        if name == "RUN":
            subprocess.run(["sh", "-n", "-c", argument], check=True)
    assert all((ROOT / source).exists() for source in copied), copied
    allowed = re.findall(r"^!(.*)$", IGNORED.read_text(), re.MULTILINE)
    assert sorted(allowed) == sorted(copied)
    links = {str(path.readlink()) for path in (ROOT / "megapipe").iterdir() if path.is_symlink()}
    assert {f"../{source}" for source in copied} >= links
    command = json.loads(steps[-1][1])
    assert command == ["bash", "/opt/examples/quickstart.sh"]
    assert (ROOT / "examples/quickstart.sh").is_file()


def missing() -> str | None:
    """Return the reason why this machine cannot build an image, if there is one."""
    if os.getuid() != 0 or any(shutil.which(tool) is None for tool in ("buildah", "debootstrap")):
        return "needs root, buildah and debootstrap"
    try:
        urllib.request.urlopen(f"{MIRROR}/dists/bookworm/InRelease", timeout=20).close()
    except (urllib.error.URLError, TimeoutError) as error:
        return f"no Debian mirror: {error}"
    return None


def pip_settings() -> Iterator[tuple[str, str]]:
    """Yield this machine's settings of pip: an image sees the same indexes."""
    listed = subprocess.run(
        [sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True, check=True
    )
    settings = (re.fullmatch(r"(?:global|:env:)\.([\w-]+)='(.*)'", line) for line in listed.stdout.splitlines())
    yield from {setting[1]: setting[2] for setting in settings if setting}.items()


@pytest.mark.exhaustive
@pytest.mark.longest
def test_buildah_builds_an_image_that_runs_the_quickstart(tmp_path: Path) -> None:
    """On a minimal Debian with this machine's settings of pip. A docker client without a daemon is of no use here."""
    reason = missing()
    if reason is not None:
        pytest.skip(reason)
    base = tmp_path / "base"
    subprocess.run(
        ["debootstrap", "--variant=minbase", "bookworm", str(base), MIRROR],
        check=True,
        capture_output=True,
        timeout=600,
    )
    volumes, lines = set(), ["[global]"]
    for name, value in pip_settings():
        words = value.split()
        paths = [Path(word) for word in words if word.startswith("/")]
        # The pages of an index on disk link to files in the folder above it.
        paths += [Path(word.removeprefix("file://")).parent for word in words if word.startswith("file://")]
        if name == "cert":
            shutil.copy(value, base / "etc/pip-certificates.crt")
            value = "/etc/pip-certificates.crt"
        else:
            volumes |= {str(path.resolve()) for path in paths if path.exists()}
        lines.append(f"{name} = {value}")
    (base / "etc/pip.conf").write_text("\n".join(lines) + "\n")
    archive = tmp_path / "base.tar"
    subprocess.run(["tar", "-C", str(base), "-cf", str(archive), "."], check=True)

    store = ["--root", str(tmp_path / "storage"), "--runroot", str(tmp_path / "run"), "--storage-driver", "vfs"]

    def buildah(*arguments: str) -> str:
        """Run buildah with a store of its own, and return what it prints."""
        done = subprocess.run(["buildah", *store, *arguments], cwd=ROOT, capture_output=True, text=True, timeout=1200)
        assert done.returncode == 0, f"{arguments}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
        return done.stdout

    container = buildah("from", "scratch").strip()
    buildah("add", container, str(archive), "/")
    buildah("commit", container, "base")
    mounts = [word for folder in sorted(volumes) for word in ("--volume", f"{folder}:{folder}:ro")]
    buildah(
        *("bud", "--isolation", "chroot", "--file", str(DOCKERFILE), "--ignorefile", str(IGNORED), *mounts),
        *("--build-arg", "BASE=localhost/base", "--tag", "megapipe", str(ROOT)),
    )
    image = json.loads(buildah("inspect", "--type", "image", "localhost/megapipe"))
    command = image["OCIv1"]["config"]["Cmd"]
    container = buildah("from", "localhost/megapipe").strip()
    shown = buildah("run", "--isolation", "chroot", container, "--", "env", "QUICKSTART_STEPS=6", *command)
    assert "exported     runs/quickstart/exported" in shown
