"""Every kind of damage to every file of a checkpoint, seen by a run that resumes: it goes on from whole bits alone.

The oracle is what undamaged checkpoints give: a resumed run has the weights, moments and losses of the newest step,
or, where the damage was noticed and reported with the file, those of the step before it.
"""

import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch

from megapipe.checkpoint.manifest import MANIFEST
from megapipe.config.run import PretrainConfig
from megapipe.parallel.mesh import Mesh
from megapipe.training.loop.checkpoints import Checkpointer, checkpoint_directory
from megapipe.training.loop.replica import Replica
from tests.checkpoint.runs import config_in, kept, train
from tests.support.gpt_runs import GPT2_SHAPE, Shard, write_shard
from tests.support.meshes import run_threads

SIZES = {"pipeline": 2}
FILES = ("rank-00000.safetensors", "rank-00001.safetensors", MANIFEST)
FLIPS = 20


Apply = Callable[[Path, Path, Path], object]
"""A damage to the newest checkpoint's folder, given also the folder before it and the one of another run."""


@dataclass(frozen=True)
class Damage:
    """message: a pattern of the run's warning. harmless: whether it may change nothing that is read."""

    name: str
    apply: Apply
    message: str
    harmless: bool = False


def edited(file: str, edit: Callable[[bytes], bytes]) -> Apply:
    def apply(newest: Path, before: Path, other: Path) -> None:
        (newest / file).write_bytes(edit((newest / file).read_bytes()))

    return apply


def flipped(share: float, bit: int) -> Callable[[bytes], bytes]:
    def edit(content: bytes) -> bytes:
        position = int(share * (len(content) - 1))
        return content[:position] + bytes([content[position] ^ 1 << bit]) + content[position + 1 :]

    return edit


def swapped(newest: Path, same_sizes: bool) -> None:
    first, second = (newest / file for file in FILES[:2])
    contents = first.read_bytes(), second.read_bytes()
    sizes = [len(content) for content in contents]
    for path, content, size in zip((first, second), reversed(contents), sizes, strict=True):
        path.write_bytes(content[:size].ljust(size, b"\0") if same_sizes else content)


def replayed(file: str, of_another_run: bool) -> Apply:
    def apply(newest: Path, before: Path, other: Path) -> None:
        source = other if of_another_run else before
        assert (source / file).read_bytes() != (newest / file).read_bytes()
        if file != MANIFEST:
            assert (source / file).stat().st_size == (newest / file).stat().st_size, "sizes alone would reveal it"
        shutil.copyfile(source / file, newest / file)

    return apply


def replaced(newest: Path, before: Path, other: Path) -> None:
    shutil.rmtree(newest)
    shutil.copytree(before, newest)


def damages() -> Iterator[Damage]:
    """All of them."""
    cuts: dict[str, Callable[[bytes], bytes]] = {
        "0": lambda content: b"",
        "1": lambda content: content[:1],
        "half": lambda content: content[: len(content) // 2],
        "size-1": lambda content: content[:-1],
    }
    for file in FILES:
        yield Damage(f"{file} deleted", lambda newest, _, __, file=file: (newest / file).unlink(), file)
        for name, cut in cuts.items():
            yield Damage(f"{file} cut to {name}", edited(file, cut), file)
        for number in range(FLIPS):
            apply = edited(file, flipped(number / (FLIPS - 1), number % 8))
            # The header of these files ends before a quarter of them.
            message = rf"{file}: tensor '\w+/.*checksum" if file != MANIFEST and number > FLIPS // 4 else file
            yield Damage(f"{file}, bit flipped at {number} of {FLIPS}", apply, message, harmless=message == file)
    yield Damage("files swapped", lambda newest, _, __: swapped(newest, same_sizes=False), FILES[0])
    yield Damage("files swapped, sizes kept", lambda newest, _, __: swapped(newest, same_sizes=True), FILES[0])
    for file in FILES[:2]:
        for of_another_run in (False, True):
            origin = "another run" if of_another_run else "the step before"
            message = rf"{file}: tensor 'weights/.*checksum"
            yield Damage(f"{file} of {origin}", replayed(file, of_another_run), message)
    yield Damage(f"{MANIFEST} of the step before", replayed(MANIFEST, False), "contains the checkpoint of step 1")
    yield Damage("the checkpoint of the step before", replaced, "contains the checkpoint of step 1")


@dataclass(frozen=True)
class Seen:
    """The reaction of a run to a damage. same_bits: whether its whole state equals the saved one."""

    step: int
    same_bits: bool
    said: str
    set_aside: tuple[str, ...]


def same(actual: dict[str, list[Shard]], expected: dict[str, list[Shard]]) -> bool:
    return actual.keys() == expected.keys() and all(
        torch.equal(one.values, other.values) and one.name == other.name
        for kind, shards in expected.items()
        for one, other in zip(actual[kind], shards, strict=True)
    )


def resumed_from_each(mesh: Mesh, config: PretrainConfig, template: Path, other: Path) -> list[Seen]:
    """One rank of a run that finds each damaged directory in turn."""
    directory = checkpoint_directory(config)
    replica = Replica(config, mesh)
    expected, losses = {}, {}

    def prepared(damage: Damage | None, upto: int) -> None:
        shutil.rmtree(directory, ignore_errors=True)
        shutil.copytree(template, directory)
        for step in (1, 2):
            if step > upto:
                shutil.rmtree(directory / f"step-{step:08d}")
        if damage is not None:
            damage.apply(directory / "step-00000002", directory / "step-00000001", other)

    def resumed(damage: Damage | None, upto: int = 2) -> tuple[int, list[str]]:
        if mesh.rank == 0:
            prepared(damage, upto)
        mesh.world.all_gather_object(None)
        said: list[str] = []
        with Checkpointer(config, mesh, said.append) as checkpointer:
            run = checkpointer.restore(replica)
        assert run is not None
        losses[run.step] = losses.get(run.step, run.losses)
        assert run.losses == losses[run.step]
        return run.step, said

    for step in (1, 2):
        assert resumed(None, step)[0] == step
        expected[step] = kept(replica)
    assert not same(expected[1], expected[2])
    seen = []
    for damage in damages():
        step, said = resumed(damage)
        aside = tuple(sorted(path.name for path in directory.glob("*.bad-*")))
        seen.append(Seen(step, same(kept(replica), expected[step]), "\n".join(said), aside))
        mesh.world.all_gather_object(None)
    return seen


@pytest.mark.slow
def test_a_run_resumes_from_whole_bits_alone(tmp_path: Path) -> None:
    corpus = write_shard(tmp_path)
    config = config_in(
        tmp_path / "run", corpus, GPT2_SHAPE, checkpoint={"every": 1, "keep_last": None}, parallel=SIZES
    )
    another = replace(config, training=replace(config.training, directory=str(tmp_path / "other"), seed=5))
    for each in (config, another):
        run_threads(SIZES, train, each, 2)
    template = tmp_path / "template"
    shutil.copytree(checkpoint_directory(config), template)
    other = checkpoint_directory(another) / "step-00000002"
    first, second = run_threads(SIZES, resumed_from_each, config, template, other)
    harmless = 0
    for damage, seen, elsewhere in zip(damages(), first, second, strict=True):
        assert (seen.step, seen.same_bits) == (elsewhere.step, elsewhere.same_bits), f"{damage.name}: ranks disagree"
        assert seen.same_bits, f"{damage.name}: step {seen.step} was loaded with other bits"
        if damage.harmless and seen.step == 2:
            harmless += 1
            continue
        assert seen.step == 1, damage.name
        (aside,) = seen.set_aside
        assert aside.startswith("step-00000002.bad-"), damage.name
        assert re.search(damage.message, seen.said), f"{damage.name} was reported as: {seen.said}"
        assert aside in seen.said
    # White space and shapes in a header of safetensors, which nothing depends on.
    assert harmless <= 2
