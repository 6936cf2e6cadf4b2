"""Hardware files: the values of the presets, measurements that are read back, and the errors of wrong files."""

from pathlib import Path
from typing import Any, get_args

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from megapipe.config import ConfigError
from megapipe.layout.hardware.description import (
    LARGEST_FILE,
    LAYER_KINDS,
    PRESETS,
    Contention,
    Efficiency,
    LayerRow,
    MeasuredCollective,
    MeasuredLayer,
    Transport,
    load_hardware,
    read_hardware,
    written,
)
from megapipe.layout.hardware.roofline import peak_flops
from megapipe.spec.ops import Operation
from tests.planner.measured.machines import machine

FILE = """\
name: two kinds
groups:
- name: old
  num_nodes: 2
  price_per_hour: 10
  device: {name: slow, peak_flops: {fp16: 125e12}, memory_bytes: 16e9, memory_bandwidth: 900e9}
  devices_per_node: 4
  inside: {latency: 1e-6, bandwidth: 150e9, pair_bandwidth: 25e9}
  outside: {latency: 1e-5, bandwidth: 3e9}
- name: new
  num_nodes: 1
  price_per_hour: 30.5
  device:
    name: fast
    peak_flops: {bf16: 312e12}
    memory_bytes: 80e9
    memory_bandwidth: 2e12
    efficiency: {ceiling: 0.8, half_size: 200, launch: 4e-6}
  devices_per_node: 8
  inside: {latency: 1e-6, bandwidth: 300e9}
  outside: {latency: 1e-5, bandwidth: 200e9, adapters: 8}
link_matrix:
- [0, 2e9, 3e9]
- [2e9, 0, 1e9]
- [3e9, 1e9, 0]
"""


def problems(text: str) -> str:
    with pytest.raises(ConfigError) as caught:
        read_hardware(text, "machine.yaml")
    return str(caught.value)


def test_a_file_gives_every_field() -> None:
    hardware = read_hardware(FILE)
    old, new = hardware.groups
    assert (old.device.peak("fp16"), old.device.memory_bytes, old.inside.pair_bandwidth) == (125e12, 16e9, 25e9)
    assert (old.outside.adapters, new.outside.adapters, new.inside.pair_bandwidth) == (1, 8, 300e9)
    assert (old.device.efficiency, new.device.efficiency) == (Efficiency(), Efficiency(0.8, 200, 4e-6))
    assert hardware.link_matrix is not None
    assert hardware.link_matrix[0][2] == 3e9


def test_ranks_fill_node_after_node_and_pay_whole_nodes() -> None:
    hardware = read_hardware(FILE)
    assert [node.name for node in hardware.nodes(9)] == ["old", "old", "new"]
    assert [hardware.price_per_hour(devices) for devices in (1, 4, 5, 8, 9, 16)] == [10, 10, 20, 20, 50.5, 50.5]
    with pytest.raises(ConfigError, match="17 devices are requested, but hardware 'two kinds' has 16; request fewer"):
        hardware.nodes(17)
    with pytest.raises(ConfigError, match="number of devices is 0"):
        hardware.nodes(0)
    assert load_hardware("h100").price_per_hour(8) is None


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("memory_bytes: 80e9", "memory_byte: 80e9", "memory_byte is an unknown key; did you mean 'memory_bytes'"),
        ("  num_nodes: 1\n", "  num_nodes: 1.5\n", "machine.yaml:11: groups[1].num_nodes is 1.5, but must be a whole"),
        ("ceiling: 0.8", "ceiling: 1.2", "efficiency.ceiling is 1.2, but must be above 0 and at most 1"),
        ("ceiling: 0.8", "memory: 0", "efficiency.memory is 0, but must be above 0 and at most 1"),
        ("ceiling: 0.8", "links: 2", "efficiency.links is 2, but must be above 0 and at most 1"),
        ("half_size: 200", "half_size: -1", "efficiency.half_size is -1, but must be from 0 to 1000000000"),
        ("half_size: 200", "half_size: 1e300", "efficiency.half_size is 1e+300, but must be from 0 to 1000000000"),
        ("half_size: 200", "half_size: 200, launch: 3", "efficiency.launch is 3, but must be from 0 to 1, in seconds"),
        ("bandwidth: 3e9", "bandwidth: 25 GbE", "outside.bandwidth is 25 GbE, but must be a number from 1e3 to"),
        ("bandwidth: 3e9", "bandwidth: 0", "groups[0].outside.bandwidth is 0, but must be from 1e3"),
        ("bandwidth: 3e9", "bandwidth: .inf", "outside.bandwidth is inf, but must be from 1e3 to 1e24"),
        ("bandwidth: 3e9", "bandwidth: [3e9]", "bandwidth is a list or mapping, but must be a number from 1e3"),
        ("{fp16: 125e12}", "{fp61: 125e12}", "peak_flops.fp61 is an unknown key; did you mean 'fp16'"),
        ("{fp16: 125e12}", "{}", "peak_flops is empty: write the FLOP/s of at least one of fp32, tf32"),
        ("pair_bandwidth: 25e9", "pair_bandwidth: 250e9", "2.5e+11; it must be at most bandwidth 1.5e+11"),
        ("  num_nodes: 2\n", "", "do not set num_nodes of 'old', but with several groups each needs its own"),
        ("- [3e9, 1e9, 0]\n", "", "link_matrix has 2 rows of 3 numbers, but the groups have 3 nodes"),
        ("- [3e9, 1e9, 0]", "- [3e9, 1e9]", "link_matrix has 3 rows of 2, 3 numbers"),
        ("- [3e9, 1e9, 0]", "- [3e9, 0, 0]", "link_matrix has a 0 off its diagonal"),
        ("- [3e9, 1e9, 0]", "- [3, 1e9, 0]", "link_matrix[2][0] is 3, but must be from 1e3 to 1e24, in bytes"),
        ("- [3e9, 1e9, 0]", "- [3e9, 1e9, 2e9]", "link_matrix has a value above 0 on its diagonal"),
        ("latency: 1e-5, bandwidth: 3e9", "latency: 14, bandwidth: 3e9", "latency is 14, but must be from 0 to 1, in"),
        ("memory_bytes: 80e9", "memory_bytes: 80", "memory_bytes is 80, but must be from 1e3 to 1e24, in bytes (80e9"),
        ("  num_nodes: 2\n", "  num_nodes: two\n", "num_nodes is two, but must be a whole number from 1"),
        ("  num_nodes: 1\n", "  num_nodes: 1\n  host: {bandwidth: 12}\n", "host.bandwidth is 12, but must be"),
        ("name: two kinds\n", "", "machine.yaml:1: name is missing; add it"),
        ("name: two kinds\n", "name: one\nname: two\n", "machine.yaml:2: name appears twice in one mapping"),
        ("name: two kinds\n", "name: [\n", "machine.yaml is not readable YAML"),
        ("  devices_per_node: 4\n", "  devices_per_node: 0\n", "devices_per_node is 0, but must be from 1 to"),
    ],
)  # fmt: skip
def test_errors_have_value_rule_and_fix(old: str, new: str, message: str) -> None:
    assert FILE.count(old) == 1
    assert message in problems(FILE.replace(old, new))


def test_all_problems_are_reported_at_once() -> None:
    wrong = FILE.replace("memory_bytes: 80e9", "memory: 80e9").replace("bandwidth: 3e9", "bandwidth: 0")
    lines = problems(wrong).splitlines()
    assert [line.split(" ")[1] for line in lines] == [
        "groups[0].outside.bandwidth", "groups[1].device.memory", "groups[1].device.memory_bytes"
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("3e9", "-3e9", "outside.bandwidth is -3e+09, but must be"),
        ("300e9", "x", "inside.bandwidth is x, but must be"),
    ],
)
def test_a_bandwidth_that_cannot_be_read_is_one_problem(old: str, new: str, message: str) -> None:
    (line,) = problems(FILE.replace(f" bandwidth: {old}", f" bandwidth: {new}", 1)).splitlines()
    assert message in line
    assert "from 1e3 to 1e24, in bytes per second" in line


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (f"name: x\ngroups: {'[' * 3000}{']' * 3000}\n", "nested deeper than 100 levels"),
        ("[1, 2]: box\n", "the file has a list or mapping as a key"),
        (f"name: x # {'x' * LARGEST_FILE}\n", "at most 16,000,000 are read"),
        ("name: x\ngroups: &g\n- *g\n", "line 3: aliases (*g) are not read"),
        (FILE.replace("num_nodes: 1", "num_nodes: 1e300", 1), "num_nodes is 1e300, but must be a whole number from 1"),
    ],
)
def test_a_nonsensical_file_is_reported_in_one_line(text: str, words: str) -> None:
    assert text != FILE
    assert any(words in line and len(line) < 300 for line in problems(text).splitlines())


@pytest.mark.parametrize("text", ["", "- 1", "groups: 3\nname: x", "name: x\ngroups: []"])
def test_a_file_of_another_shape_is_refused(text: str) -> None:
    assert "write" in problems(text)


@settings(max_examples=20, deadline=None)
@given(start=st.integers(0, len(FILE)), length=st.integers(0, 40), written=st.text(max_size=12))
def test_a_damaged_file_is_read_or_refused(start: int, length: int, written: str) -> None:
    groups, problems = [], []
    try:
        groups = list(read_hardware(FILE[:start] + written + FILE[start + length :]).groups)
    except ConfigError as error:
        problems = error.problems
    assert bool(groups) != bool(problems)
    assert all(problem.startswith("hardware") for problem in problems)
    assert all(group.devices_per_node >= 1 and group.inside.bandwidth > 0 for group in groups)


def test_unknown_presets_and_missing_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="unknown hardware 'a100-8'; did you mean 'a100-80'"):
        load_hardware("a100-8")
    with pytest.raises(ConfigError, match="did you mean 'a100-40' or 'a100-80' or 'a100-80-25gbe'"):
        load_hardware("a100")
    with pytest.raises(
        ConfigError, match=r"cannot read .*absent.yaml: No such file or directory; choose a YAML file with hardware"
    ):
        load_hardware(str(tmp_path / "absent.yaml"))
    (tmp_path / "mine.yaml").write_text(FILE)
    assert load_hardware(str(tmp_path / "mine.yaml")) == read_hardware(FILE)


def test_a_device_without_a_format_names_those_it_has() -> None:
    device = load_hardware("v100-16").groups[0].device
    with pytest.raises(ConfigError, match=r"no peak for 'bf16'.* \(it has fp32, fp16\); choose another precision"):
        device.peak("bf16")


def test_presets_agree_with_the_peaks_that_runs_report_against() -> None:
    for preset, driver in (
        ("a100-40", "A100-SXM4-40GB"), ("a100-80", "A100-SXM4-80GB"), ("h100", "H100 80GB HBM3"), ("h200", "H200"),
        ("b200", "B200"),
    ):  # fmt: skip
        device = load_hardware(preset).groups[0].device
        for dtype in ("bf16", "fp32"):
            assert device.peak(dtype) == pytest.approx(peak_flops(f"NVIDIA {driver}", dtype))


def test_presets_are_the_machines_of_the_papers() -> None:
    """Link rates by lanes, not by the files' own numbers: NVLink of 6, 12, 18 and 18 links, adapters by their Gb/s."""
    expected = {
        "v100-16": (6 * 25e9, 25e9 / 8, 1, 16e9),
        "v100-32": (6 * 25e9, 100e9 / 8, 1, 32e9),
        "v100-32-25gbe": (6 * 25e9, 25e9 / 8, 1, 32e9),
        "a100-40": (12 * 25e9, 8 * 200e9 / 8, 8, 40e9),
        "a100-80": (12 * 25e9, 8 * 200e9 / 8, 8, 80e9),
        "a100-80-25gbe": (12 * 25e9, 25e9 / 8, 1, 80e9),
        "h100": (18 * 25e9, 8 * 400e9 / 8, 8, 80e9),
        "h100-25gbe": (18 * 25e9, 25e9 / 8, 1, 80e9),
        "h200": (18 * 25e9, 8 * 400e9 / 8, 8, 141e9),
        "b200": (18 * 50e9, 8 * 400e9 / 8, 8, 180e9),
    }
    machines = {}
    for name in set(PRESETS) - {"cpu"}:
        (group,) = load_hardware(name).groups
        assert group.devices_per_node == 8
        assert (group.device.efficiency == Efficiency()) == (name in ("v100-16", "v100-32", "v100-32-25gbe", "b200"))
        network = group.outside
        machines[name] = (group.inside.bandwidth, network.bandwidth, network.adapters, group.device.memory_bytes)
    assert machines == expected
    assert load_hardware("cpu").nodes(2)[0].device.peak("fp32") == 32 * 2.5e9


SECONDS = st.floats(0.0, 1e3).map(lambda value: float(f"{value:.6g}"))
RATES = st.floats(1.0, 1e12).map(lambda value: float(f"{value:.6g}"))
COUNTS = st.integers(1, 64)
LAYERS = st.builds(MeasuredLayer, st.sampled_from(LAYER_KINDS), *[COUNTS] * 3, *[SECONDS] * 5)
WAITS = st.builds(LayerRow, st.sampled_from(LAYER_KINDS), *[COUNTS] * 3, *[SECONDS] * 4)
CONTENTION = st.lists(st.integers(2, 64), unique=True, max_size=3).map(
    lambda ranks: tuple(Contention(each, 1.0 + each / 8) for each in sorted({1, *ranks}))
)


@given(
    layers=st.lists(LAYERS, min_size=1, max_size=4).map(tuple),
    contention=CONTENTION,
    seconds=SECONDS,
    waits=st.lists(WAITS, max_size=3).map(tuple),
)
@settings(deadline=None, max_examples=40)
def test_a_machine_is_read_back_as_it_was_written(layers, contention, seconds, waits) -> None:  # type: ignore[no-untyped-def]
    hardware = machine(layers=layers, contention=contention, update_seconds=seconds, waits=waits)
    assert read_hardware(written(hardware, "two lines\nof remarks")) == hardware


@given(
    row=st.builds(
        MeasuredCollective, st.sampled_from(get_args(Operation)), COUNTS, st.sampled_from(get_args(Transport)),
        SECONDS, RATES, SECONDS,
    )
)  # fmt: skip
@settings(deadline=None, max_examples=40)
def test_a_row_of_a_link_is_read_back(row: MeasuredCollective) -> None:
    text = yaml.safe_load(written(machine()))
    text["groups"][0]["inside"]["collectives"] = [vars(row)]
    assert read_hardware(yaml.safe_dump(text)).groups[0].inside.collectives == (row,)


@pytest.mark.parametrize("name", PRESETS)
def test_presets_are_written_as_they_were_read(name: str) -> None:
    hardware = load_hardware(name)
    assert read_hardware(written(hardware)) == hardware


LAYER: tuple[Any, ...] = ("measured", "layers", 0)
RANKS: tuple[Any, ...] = ("measured", "contention")
CALL: tuple[Any, ...] = ("groups", 0, "inside", "collectives", 0)


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (("measured", "date"), "noon", "measured.date is 'noon', which is not a date: write it as 2026-01-31"),
        (("measured", "layers"), [], "measured.layers is not a list: write one or more `- ` items"),
        ((*LAYER, "kind"), "blok", "is blok, but must be one of embedding, block, head; did you mean 'block'?"),
        ((*LAYER, "forward"), -1, "measured.layers[0].forward is -1, but must be at least 0"),
        ((*LAYER, "speed"), 1, "measured.layers[0].speed is an unknown key"),
        ((*RANKS, 0, "ranks"), 3, "is for 3, 2, 4 ranks: write each number once, in ascending order"),
        ((*RANKS, 1, "factor"), 0, "measured.contention[1].factor is 0, but must be above 0"),
        (("measured", "action_seconds"), "quick", "action_seconds is quick, but must be a number of at least 0"),
        ((*CALL, "over"), "tcp", "is tcp, but must be one of gloo, shared_memory, nccl"),
        ((*CALL, "bandwidth"), 0, "bandwidth is 0, but must be above 0"),
    ],
)
def test_a_wrong_measurement_is_refused(path: tuple[Any, ...], value: object, message: str) -> None:
    root = place = yaml.safe_load(written(machine()))
    for step in path[:-1]:
        place = place[step]
    place[path[-1]] = value
    with pytest.raises(ConfigError) as caught:
        read_hardware(yaml.safe_dump(root), "machine.yaml")
    assert message in str(caught.value)
