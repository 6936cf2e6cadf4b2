"""The layout table: one strategy for each layer, and a YAML form that describes the same layout."""

from dataclasses import replace

import pytest
from hypothesis import given, reject, settings
from hypothesis import strategies as st

from megapipe.config import ConfigError
from megapipe.config.load import parse
from megapipe.config.memory import OffloadConfig, RecomputeConfig
from megapipe.config.model import ModelConfig
from megapipe.config.parallel import LayerStrategy, ParallelConfig, ScheduleConfig, ZeroConfig, strategy_problems
from megapipe.config.run import PretrainConfig, TrainingConfig
from megapipe.layout.table import LayoutTable

BLOCKS = 8
MODEL = ModelConfig(
    num_layers=BLOCKS, hidden_size=64, num_heads=4, vocabulary_size=128, max_positions=64, positions="rotary"
)


@st.composite
def configs(draw: st.DrawFn) -> PretrainConfig:
    """Return a run whose layers differ in any way that the rules allow."""
    method = draw(st.sampled_from(["none", "selective", "full"]))
    moves = method != "selective" and draw(st.booleans())
    zero = draw(st.integers(0, 3))
    training = TrainingConfig(precision="bf16", fp8=draw(st.sampled_from(["none", "tensorwise"])))
    if training.fp8 != "none":
        training.fp8_first_kept = draw(st.integers(0, 2))
        training.fp8_last_kept = draw(st.integers(0, 2))
    layers = {}
    for key in draw(st.sets(st.sampled_from(["embedding", "head", "blocks", "blocks.1", "blocks.2-5", "blocks.6-7"]))):
        own = LayerStrategy(zero=draw(st.sampled_from([None, *range(1, zero + 1)])))
        if key.startswith("blocks"):
            recompute = [None, "none", "full", *(["selective"] if not moves else [])]
            own.recompute = draw(st.sampled_from(recompute))
            own.offload = draw(st.sampled_from([None, *([True, False] if moves and own.recompute == "none" else [])]))
            own.fp8 = draw(st.sampled_from([None, *([True, False] if training.fp8 != "none" else [])]))
        layers[key] = own
    schedule = draw(st.sampled_from([ScheduleConfig(), ScheduleConfig(name="interleaved_1f1b", chunks=2)]))
    config = PretrainConfig(
        model=replace(MODEL, mtp_layers=draw(st.integers(0, 1))),
        training=training,
        schedule=schedule,
        zero=ZeroConfig(stage=zero),
        parallel=ParallelConfig(data=2, pipeline=draw(st.sampled_from([1, 2])), layers=layers),
        recompute=RecomputeConfig(method=method),
        offload=OffloadConfig(activations="blocks" if moves else "none"),
    )
    config.data.sequence_length = 64
    if method == "full":
        config.recompute.every = draw(st.integers(1, 3))
        config.recompute.num_blocks = draw(st.sampled_from([None, 1, 2]))
    if moves:
        config.offload.every = draw(st.integers(1, 2))
        config.offload.num_blocks = draw(st.sampled_from([None, 1]))
    return config


@settings(max_examples=100)
@given(config=configs())
def test_yaml_form_describes_the_same_layout(config: PretrainConfig, tmp_path_factory: pytest.TempPathFactory) -> None:
    assert not strategy_problems(config)
    try:
        table = LayoutTable.of(config)
    except ConfigError:  # no block is left to move
        reject()
    file = tmp_path_factory.mktemp("table") / "table.yaml"
    file.write_text(table.as_yaml())
    flags = ["--model.num_layers", str(BLOCKS), "--data.sequence_length", "64", "--model.max_positions", "64"]
    read = LayoutTable.of(replace(parse(["--config", str(file), *flags]), model=config.model))
    assert read.strategies == table.strategies
    assert (read.stages.ranges, read.ranks, read.offload) == (table.stages.ranges, table.ranks, table.offload)
    assert list(map(list, read.recomputed)) == list(map(list, table.recomputed))


def test_own_name_has_precedence_over_range_and_all_blocks() -> None:
    layers = {
        "blocks.3": LayerStrategy(zero=3),
        "blocks": LayerStrategy(zero=1, recompute="full"),
        "blocks.2-4": LayerStrategy(zero=2, recompute="none"),
    }
    parallel = ParallelConfig(data=2, layers=layers)
    table = LayoutTable.of(PretrainConfig(model=MODEL, zero=ZeroConfig(stage=3), parallel=parallel))
    assert [(each.zero, each.recompute) for each in table.strategies] == [
        (3, "none"), (1, "full"), (1, "full"), (2, "none"), (3, "none"), (2, "none"),
        (1, "full"), (1, "full"), (1, "full"), (3, "none"),
    ]  # fmt: skip
    assert table.recomputed == [[range(1, 2), range(2, 3), range(6, 7), range(7, 8), range(8, 9)]]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            "{block: {zero: 1}}",
            "parallel.layers names 'block', which is not a layer; use embedding, head, blocks, one",
        ),
        ("{blocks.8: {zero: 1}}", "parallel.layers names blocks.8, but model.num_layers is 8: blocks are numbered"),
        ("{blocks.3-2: {zero: 1}}", "parallel.layers names blocks.3-2, but"),
        ("{blocks.1-3: {zero: 1}, blocks.3-4: {zero: 1}}", "parallel.layers blocks.1-3 and blocks.3-4 overlap"),
        ("{blocks: {zero: 3}}", "parallel.layers blocks: zero 3 must be from 1 to zero.stage, which is 2"),
        ("{blocks: {zero: 0}}", "parallel.layers blocks: zero 0 must be from 1 to zero.stage, which is 2"),
        ("{head: {recompute: full}}", "parallel.layers head: recompute is only for transformer blocks; leave it out"),
        ("{blocks.0: {offload: true}}", "parallel.layers blocks.0: offload needs offload.activations blocks"),
        ("{blocks.0: {fp8: true}}", "parallel.layers blocks.0: fp8 needs training.fp8 tensorwise or rowwise"),
    ],
)
def test_wrong_strategies_get_one_line(flags: str, message: str) -> None:
    config = replace(parse(["--zero.stage", "2", "--parallel.layers", flags]), model=MODEL)
    (problem,) = strategy_problems(config)
    assert problem.startswith(message)
