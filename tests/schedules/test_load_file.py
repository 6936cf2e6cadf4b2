"""Schedules from files: what training takes, and what it says of the rest."""

from dataclasses import replace
from itertools import product

import pytest

from megapipe.schedules import GENERATORS, ScheduleError, build, dumps, order
from megapipe.schedules.build import fit_for_training, read_file
from megapipe.schedules.states import StateTable
from tests.schedules.support import TRAINED
from tests.schedules.test_wrong_files import MINE


def written(tmp_path, text):
    path = tmp_path / "mine.txt"
    path.write_text(text)
    return path


SHARDED = {"data_parallel": True, "states": StateTable.uniform([2, 2], weight_pool=2, gradient_pool=1)}


@pytest.mark.parametrize("mode", ["train", "forward"])
@pytest.mark.parametrize(
    ("name", "how"), [*product(TRAINED, ({"data_parallel": False}, {"data_parallel": True})), ("1f1b", SHARDED)]
)
def test_a_saved_schedule_is_the_named_one(tmp_path, name, how, mode):
    run = {"units_per_stage": [2] * (2 * GENERATORS[name].chunks), "tied_groups": [[0]], **how}
    expected = build(name, 2, 4, mode=mode, receive_ahead=2, **run)
    for saved in (build(name, 2, 4, receive_ahead=2, **run), order(name, 2, 4)):
        schedule = read_file(written(tmp_path, dumps(saved)))
        assert fit_for_training(schedule, 2, 4, mode=mode, receive_ahead=2, **run) == expected


def test_one_file_of_compute_actions_serves_any_depth(tmp_path):
    schedule = read_file(written(tmp_path, MINE))
    for units in ([1, 1], [3, 5]):
        fitted = fit_for_training(schedule, 2, 4, units_per_stage=units, tied_groups=[[0, 1]], data_parallel=True)
        assert fitted.header.units_per_stage == tuple(units)
        assert fitted.header.tied_groups == ((0, 1),)
        assert fitted.header.lowered


@pytest.mark.parametrize(
    ("text", "change", "message"),
    [
        (MINE, {"num_ranks": 4}, "made for pipeline ranks 2, but this run has 4"),
        (MINE, {"num_microbatches": 8}, "made for micro-batches per step 4, but this run has 8"),
        (MINE, {"units_per_stage": [1, 1, 1, 1]}, "made for stages 2, but this run has 4"),
        (MINE.replace("rank 1\n", "rank 1 units 3\n", 1), {}, r"units \(layers\) by stage \[1, 3\], but .* \[2, 2\]"),
        (MINE.replace("body", "tied 0\nbody"), {}, r"tied groups \[\[0\]\], but this run has \[\]"),
        (MINE.replace("body", "data_parallel yes\nbody"), {}, "replicas yes, but this run has no"),
        (dumps(build("1f1b", 2, 4, units_per_stage=[2, 2])), {"data_parallel": True}, "replicas no, but this run"),
        (dumps(build("1f1b", 2, 4, mode="forward")), {}, "mode 'forward', but training needs mode 'train'"),
        (
            dumps(build("1f1b", 2, 4, units_per_stage=[2, 2], **SHARDED)),
            SHARDED | {"states": StateTable.uniform([2, 2], weight_pool=2, gradient_pool=2)},
            "made for gradient_pool 1, but this run has 2",
        ),
        (MINE.replace("body", "route 1 0\nbody"), {}, "leave out routes, parts and replicas"),
        (MINE.replace("rank 1\n", "rank 1 part 0\n", 1), {}, r"parts \[0, 0\]"),
        (MINE.replace("rank 1\n", "rank 1 part 0 replica 1\n", 1), {}, "does not sum the gradients of copies"),
        (
            dumps(build("1f1b", 2, 4, units_per_stage=[2, 2])).replace("RA1.1^1 ", ""),
            {},
            "RECV_ACTIVATION stage 1, micro-batch 1: it never happens",
        ),
    ],
)
def test_files_that_do_not_fit_are_refused(tmp_path, text, change, message):
    run = {"num_ranks": 2, "num_microbatches": 4, "units_per_stage": [2, 2], **change}
    with pytest.raises(ScheduleError, match=message):
        fit_for_training(read_file(written(tmp_path, text)), **run)


def test_versions_are_the_file_s_own(tmp_path):
    saved = order("2bw", 2, 4)
    eager = replace(saved, header=replace(saved.header, gradient_buffers=1))
    fitted = fit_for_training(read_file(written(tmp_path, dumps(eager))), 2, 4, units_per_stage=[1, 1])
    assert fitted == build("2bw", 2, 4, update="eager")
