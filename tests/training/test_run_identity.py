"""Ranks that do not run the same job are refused with one line, for every field; and folders that are not writable."""

import shutil
from collections.abc import Iterator
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import pytest
import torch

from megapipe.config import ConfigError
from megapipe.config.bert import BertPretrainConfig
from megapipe.config.run import PretrainConfig
from megapipe.parallel.launch import LaunchEnvironment
from megapipe.training.resilience import run_identity as module
from megapipe.training.resilience.run_identity import (
    Fact,
    Identity,
    difference,
    make_folders,
    run_identity,
)
from tests.support.gpt_runs import write_shard

CPU = torch.device("cpu")


def other(hint: Any, value: Any) -> Any:
    """Return another value for a field of that type."""
    if get_origin(hint) in (Union, UnionType):
        kinds = [kind for kind in get_args(hint) if kind is not NoneType]
        return other(kinds[0], 1 if value is None and kinds[0] in (int, float) else value)
    if get_origin(hint) is Literal:
        return next(each for each in get_args(hint) if each != value)
    if hint is bool:
        return not value
    if hint in (int, float):
        return value + 1
    if hint is str:
        return f"{value or ''}x"
    if get_origin(hint) is dict:
        kind = get_args(hint)[1]
        if get_origin(kind) is dict:
            return {**value, "x": {}}
        return {**value, "x": other(kind, {str: "", int: 1, float: 1}.get(kind))}
    return [*(value or []), 7]


def changed(config: Any, above: str = "") -> Iterator[tuple[str, Any]]:
    """Yield every field by its dotted name, with a configuration in which only this field differs."""
    hints = get_type_hints(type(config))
    for each in fields(config):
        value = getattr(config, each.name)
        if is_dataclass(value):
            for name, inner in changed(value, f"{above}{each.name}."):
                yield name, replace(config, **{each.name: inner})
        else:
            yield f"{above}{each.name}", replace(config, **{each.name: other(hints[each.name], value)})


def start_config(kind: type[PretrainConfig], folder: Path) -> PretrainConfig:
    config = kind()
    config.data = replace(config.data, prefix=str(folder / "corpus"))
    config.training = replace(config.training, directory=str(folder / "run"))
    return config


@pytest.mark.parametrize("kind", [PretrainConfig, BertPretrainConfig])
def test_every_field_that_differs_is_refused_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: type[PretrainConfig]
) -> None:
    """But for the folder, whose lock shows whether all ranks use the same one (tests/faults/test_start_up.py)."""
    monkeypatch.setattr(module, "_sources", dict)  # 600 files, which would take most of the time
    write_shard(tmp_path)
    config = start_config(kind, tmp_path)
    ours = run_identity(config, 2, CPU)
    others = {name: run_identity(another, 2, CPU) for name, another in changed(config)}
    assert len(others) > 150
    assert {name for name, theirs in others.items() if theirs == ours} == {"training.directory"}
    del others["training.directory"]
    for name, theirs in others.items():
        line = difference([([0], ours), ([1], theirs)])
        assert "\n" not in line
        assert line.startswith("the ranks do not run the same job: ")
        assert all(words in line for words in (name, "rank 0 has ", "rank 1 has ")), (name, line)


def test_paths_may_differ_where_their_content_does_not(tmp_path: Path) -> None:
    config = start_config(BertPretrainConfig, tmp_path / "a")
    (tmp_path / "a").mkdir()
    corpus = write_shard(tmp_path / "a")
    for name in ("vocab.txt", "schedule.txt", "hardware.yaml"):
        (tmp_path / "a" / name).write_text(name)
    (tmp_path / "a/weights").mkdir()
    (tmp_path / "a/weights/config.json").write_text("{}")
    (tmp_path / "a/weights/model.safetensors").write_bytes(bytes(1 << 21))
    shutil.copytree(tmp_path / "a", tmp_path / "b")

    def named(folder: Path, blend: bool) -> PretrainConfig:
        shard = {"prefix": "", "blend": {str(folder / "corpus"): 2.0}} if blend else {"prefix": str(folder / "corpus")}
        return replace(
            config,
            data=replace(config.data, tokenizer=f"bert-uncased:{folder / 'vocab.txt'}", **shard),
            schedule=replace(config.schedule, name=str(folder / "schedule.txt")),
            recompute=replace(config.recompute, hardware=str(folder / "hardware.yaml")),
            training=replace(config.training, directory=str(folder / "run")),
            init_from=str(folder / "weights"),
        )

    def compared(folder: Path, blend: bool = False) -> dict[str, str]:
        return {name: fact.compared for name, fact in run_identity(named(folder, blend), 2, CPU).items()}

    assert compared(tmp_path / "a") == compared(tmp_path / "b")
    assert compared(tmp_path / "a", blend=True) == compared(tmp_path / "b", blend=True)
    here = compared(tmp_path / "b")
    cased = named(tmp_path / "b", blend=False)
    cased.data = replace(cased.data, tokenizer=cased.data.tokenizer.replace("uncased", "cased"))
    assert run_identity(cased, 2, CPU)["data.tokenizer"].compared != here["data.tokenizer"]
    (tmp_path / "b/vocab.txt").write_text("another")
    (tmp_path / "b/schedule.txt").write_text("another")
    (tmp_path / "b/hardware.yaml").write_text("another")
    with (tmp_path / "b/weights/model.safetensors").open("r+b") as file:
        file.seek(-1, 2)
        file.write(b"1")
    shard = Path(corpus).with_name("corpus.bin")
    (tmp_path / "b/corpus.bin").write_bytes(shard.read_bytes()[:-1] + b"\7")
    there = compared(tmp_path / "b")
    differing = {name for name in here if here[name] != there[name]}
    assert differing == {"data.prefix", "data.tokenizer", "schedule.file", "recompute.hardware", "init_from"}


def test_a_difference_names_fields_values_and_ranks() -> None:
    def identity(**values: str) -> dict[str, Fact]:
        return {name: Fact(value, value) for name, value in values.items()}

    groups = [
        ([0, 2, 3, 4], identity(a="1", b="2", c="3", d="4", e="5", same="6")),
        ([1], identity(a="7", b="8", c="9", d="0", e="0", same="6")),
        ([5], identity(a="1", b="8", c="3", d="4", e="5", same="6")),
    ]
    assert difference(groups).startswith(
        "the ranks do not run the same job: a: ranks 0, 2-5 have 1, rank 1 has 7; b: ranks 0, 2-4 have 2, ranks 1, 5 "
        "have 8; c: ranks 0, 2-5 have 3, rank 1 has 9; and 2 more differences; "
    )


def test_sources_of_all_packages_are_compared() -> None:
    names = set(module._sources())
    for name in ("training/pretrain.py", "kernels/registry.py"):
        assert f"source megapipe/{name}" in names


def test_code_torch_device_and_world_size_are_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is the only fact that differs where nothing else does."""
    write_shard(tmp_path)
    config = start_config(PretrainConfig, tmp_path)
    sources = {"source megapipe/a.py": "1", "source megapipe/b.py": "2"}
    monkeypatch.setattr(module, "_sources", lambda: sources)
    here = run_identity(config, 2, CPU)

    def differing(there: Identity) -> set[str]:
        absent = Fact("", "")
        return {name for name in {*here, *there} if here.get(name, absent) != there.get(name, absent)}

    assert differing(run_identity(config, 2, CPU)) == set()
    assert differing(run_identity(config, 3, CPU)) == {"WORLD_SIZE"}
    assert differing(run_identity(config, 2, torch.device("meta"))) == {"the kind of device"}
    sources |= {"source megapipe/b.py": "3"}
    assert differing(run_identity(config, 2, CPU)) == {"source megapipe/b.py"}
    sources |= {"source megapipe/b.py": "2"}
    for number in (1, 2):
        (tmp_path / f"{number}.yaml").write_text(f"version: {number}")
    preferences = {}
    for value in ("none", str(tmp_path / "1.yaml"), str(tmp_path / "2.yaml")):
        monkeypatch.setenv("MEGAPIPE_KERNEL_PREFERENCES", value)
        preferences[value] = run_identity(config, 2, CPU)
        assert differing(preferences[value]) == {"MEGAPIPE_KERNEL_PREFERENCES"}
    assert len({identity["MEGAPIPE_KERNEL_PREFERENCES"].compared for identity in preferences.values()}) == 3
    monkeypatch.delenv("MEGAPIPE_KERNEL_PREFERENCES")
    monkeypatch.setattr(torch, "__version__", "0.1")
    assert differing(run_identity(config, 2, CPU)) == {"the version of torch"}


def writing(directory: Path, trace: Path) -> PretrainConfig:
    config = PretrainConfig()
    config.training = replace(config.training, directory=str(directory))
    return replace(config, profile=replace(config.profile, trace=str(trace)))


def test_every_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("not a folder")
    make_folders(writing(tmp_path / "a" / "b", tmp_path / "c"), LaunchEnvironment())
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["a", "b", "c", "file"]
    with pytest.raises(ConfigError) as raised:
        make_folders(writing(file, file / "below"), LaunchEnvironment())
    assert [problem.split(" cannot")[0] for problem in raised.value.problems] == [
        f"training.directory {file}",
        f"profile.trace {file / 'below'}",
    ]
    assert file.read_text() == "not a folder"


def test_a_rank_makes_what_it_writes(tmp_path: Path) -> None:
    config = writing(tmp_path / "run", tmp_path / "trace")
    make_folders(config, LaunchEnvironment(rank=3, world_size=4, local_rank=1))
    assert not list(tmp_path.iterdir())
    make_folders(config, LaunchEnvironment(rank=2, world_size=4, local_rank=0))
    assert [path.name for path in tmp_path.iterdir()] == ["trace"]
