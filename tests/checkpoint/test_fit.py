"""Changes that a resume refuses and allows: fields of the configuration by the guide's table, and data."""

import json
import re
import shutil
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from megapipe.checkpoint import CheckpointError, read_manifest
from megapipe.checkpoint.fit import BY_CONTENT, RULES, Rule, RunFit, check_run
from megapipe.checkpoint.manifest import Manifest, RunState
from megapipe.config.bert import BertPretrainConfig
from megapipe.config.run import PretrainConfig
from megapipe.data.identity import DataIdentity, data_identity
from tests.support.bert_runs import make_bert_config, write_corpus
from tests.support.gpt_runs import GPT2_SHAPE, make_config, train_alone, write_shard
from tests.training.records import events
from tests.training.test_run_identity import changed

GUIDE = Path(__file__).parents[2] / "docs/checkpoints.md"
KINDS = (PretrainConfig, BertPretrainConfig)
NO_DATA = DataIdentity(prefixes=(), shards=())


FIELDS = sorted({name for kind in KINDS for name, _ in changed(kind())})


def saved_by(config: PretrainConfig, data: DataIdentity | None) -> Manifest:
    """Return the manifest of a checkpoint, as it is read from a file."""
    stored = json.loads(json.dumps(asdict(config)))
    return Manifest("0", RunState(1, 8, {}, "fp32", (), stored, data=data), {}, {}, ())


def outcome(before: PretrainConfig, after: PretrainConfig) -> Rule:
    """Return the rule that the check applies to a change of the configuration."""
    manifest = saved_by(before, NO_DATA)
    accepting = replace(after, checkpoint=replace(after.checkpoint, accept_other_data=True))
    try:
        fit = check_run(Path("step"), manifest, accepting, NO_DATA)
    except CheckpointError:
        return Rule.REFUSED
    if not fit.other_data:
        return Rule.REPORTED if fit.reported else Rule.ALLOWED
    with pytest.raises(CheckpointError, match=re.escape(fit.other_data[0])):
        check_run(Path("step"), manifest, after, NO_DATA)
    return Rule.ASKED


def table() -> dict[str, Rule]:
    """Return field -> rule from the guide's rows of group, rule and names of fields."""
    rules: dict[str, Rule] = {}
    for group, rule, names in re.findall(r"^\| (`[a-z_]+\.`)? *\| ([a-z ]+) \| (`.*`) \|$", GUIDE.read_text(), re.M):
        for name in re.findall(r"`([^`]+)`", names):
            full = group.strip("`") + name
            assert full not in rules, f"{full} is in the table twice"
            rules[full] = Rule(rule)
    return rules


def test_the_guide_has_a_rule_for_every_field() -> None:
    assert sorted(table()) == FIELDS
    listed = [f"{group}.{name}" for groups in RULES.values() for group, names in groups.items() for name in names]
    assert sorted(listed) == sorted(set(listed))
    assert set(listed) <= set(FIELDS)


def test_a_resume_follows_the_guide_for_every_field() -> None:
    rules = table()
    for kind in KINDS:
        for name, another in changed(kind()):
            if name in BY_CONTENT and name != "data.blend":
                continue
            rule = outcome(kind(), another)
            assert rule is rules[name], f"{kind.__name__} {name}: {rule}"
    megatron = PretrainConfig()
    megatron.data.order = "megatron"
    assert outcome(megatron, dict(changed(megatron))["training.steps"]) is Rule.ASKED
    spelled_out = replace(GPT2_SHAPE, num_kv_heads=4, ffn_hidden_size=128)
    null = replace(GPT2_SHAPE, num_kv_heads=None, ffn_hidden_size=None)
    assert outcome(PretrainConfig(model=null), PretrainConfig(model=spelled_out)) is Rule.ALLOWED


def fit_of(before: PretrainConfig, data: DataIdentity | None, after: PretrainConfig) -> RunFit:
    return check_run(Path("step"), saved_by(before, data), after, data_identity(after.data))


def copied(prefix: str, folder: Path) -> str:
    """Copy a shard to another folder."""
    folder.mkdir()
    for path in Path(prefix).parent.glob(f"{Path(prefix).name}.*"):
        shutil.copy(path, folder)
    return str(folder / Path(prefix).name)


def shard_in(folder: Path, **options: int) -> str:
    folder.mkdir()
    return write_shard(folder, **options)


def other_token(prefix: str) -> str:
    """Change the last token of a shard."""
    path = Path(f"{prefix}.bin")
    content = bytearray(path.read_bytes())
    content[-2] ^= 1
    path.write_bytes(content)
    return prefix


def test_other_data_is_refused_by_name(tmp_path: Path) -> None:
    prefix = shard_in(tmp_path / "web")
    before = make_config(prefix, GPT2_SHAPE)
    data = data_identity(before.data)
    others = {
        "number of documents is 80 and was 40": shard_in(tmp_path / "grown", documents=80),
        "number of documents is 20 and was 40": shard_in(tmp_path / "halved", documents=20),
        "checksum of pieces of its .bin": other_token(copied(prefix, tmp_path / "same_size")),
    }
    for message, other in others.items():
        with pytest.raises(CheckpointError, match=rf"shard {other} \(then {prefix}\).*{message}.*accept_other_data"):
            fit_of(before, data, make_config(other, GPT2_SHAPE))
    moved = make_config(copied(prefix, tmp_path / "moved"), GPT2_SHAPE)
    assert fit_of(before, data, moved) == RunFit((), (), unknown_data=False)


def test_a_blend_is_identified_by_shards_and_order(tmp_path: Path) -> None:
    one, two, three = (shard_in(tmp_path / str(seed), seed=seed) for seed in (1, 2, 3))

    def blend(**weights: float) -> PretrainConfig:
        paths = {"one": one, "two": two, "three": three}
        return make_config("", GPT2_SHAPE, data={"blend": {paths[name]: each for name, each in weights.items()}})

    before = blend(one=3.0, two=1.0)
    data = data_identity(before.data)
    assert fit_of(before, data, blend(one=3.0, two=1.0)).other_data == ()
    refused = {
        f"shard {two}": blend(two=3.0, one=1.0),
        f"shard {three}": blend(one=3.0, three=1.0),
        "weights is": blend(one=1.0, two=3.0),
        "reads 3 shards": blend(one=3.0, two=1.0, three=1.0),
    }
    for message, after in refused.items():
        with pytest.raises(CheckpointError, match=message):
            fit_of(before, data, after)


def test_a_tokenizer_is_identified_by_its_fingerprint(tmp_path: Path) -> None:
    fixtures = Path(__file__).parents[1] / "fixtures/v0_1/data/web_text_document"
    prefix = copied(str(fixtures), tmp_path / "web")
    before = make_config(prefix, GPT2_SHAPE)
    data = data_identity(before.data)
    manifest = Path(f"{prefix}.manifest.json")
    manifest.write_text(manifest.read_text().replace("sha256:3f13", "sha256:0000"))
    with pytest.raises(CheckpointError, match=r"tokenizer's fingerprint is 'sha256:0000.* and was 'sha256:3f13"):
        fit_of(before, data, before)
    manifest.unlink()
    assert fit_of(before, data, before).other_data == ()
    before.data = replace(before.data, fim_rate=0.5, fim_tokens=[1, 2, 3])
    data = replace(data, end_of_document=256)
    with pytest.raises(CheckpointError, match=r"end-of-document token.* is None in .* and was 256"):
        fit_of(before, data, before)
    before.data = replace(before.data, prefix="", blend={prefix: 1.0, copied(str(fixtures), tmp_path / "second"): 1.0})
    assert data_identity(before.data).end_of_document == 256  # of the first shard that says it, as samples take it


def test_a_bert_vocabulary_is_identified_by_its_content(tmp_path: Path) -> None:
    before = make_bert_config(write_corpus(tmp_path))
    data = data_identity(before.data)
    after = replace(before, data=replace(before.data, tokenizer=str(tmp_path / "moved.txt")))
    vocabulary = Path(before.data.tokenizer).read_text()
    Path(after.data.tokenizer).write_text(vocabulary)
    assert fit_of(before, data, after).other_data == ()
    Path(after.data.tokenizer).write_text(vocabulary.replace("##", "", 1))
    with pytest.raises(CheckpointError, match=r"data.tokenizer has changed"):
        fit_of(before, data, after)


@pytest.mark.usefixtures("without_pictures")
def test_accepted_other_data_are_recorded(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = make_config(
        shard_in(tmp_path / "one"),
        GPT2_SHAPE,
        batch={"global_size": 2},
        checkpoint={"every": 10, "keep_last": None},
        training={"steps": 3, "stop_at": 1, "directory": str(tmp_path / "run")},
    )
    train_alone(config)
    other = shard_in(tmp_path / "two", seed=9)
    config.data = replace(config.data, prefix=other, fim_rate=0.5, fim_tokens=[58, 59, 60])
    config.training = replace(config.training, stop_at=2)
    config.checkpoint = replace(config.checkpoint, accept_other_data=True)
    train_alone(config)
    assert "from step 2, the run uses other samples, which checkpoint.accept_other_data" in capsys.readouterr().out
    manifest = read_manifest(tmp_path / "run/checkpoints/step-00000002")
    config.checkpoint = replace(config.checkpoint, accept_other_data=False)
    assert check_run(Path("step"), manifest, config, data_identity(config.data)) == RunFit((), (), unknown_data=False)
    saved = manifest.run
    (change,) = saved.data_changes
    assert change.step == 1
    assert any(line.startswith("data.fim_rate is 0.5") for line in change.differences)
    assert saved.data is not None
    assert saved.data.prefixes == (other,)
    (event,) = events(tmp_path / "run", "other_data")
    assert (event["step"], tuple(event["differences"])) == (1, change.differences)
