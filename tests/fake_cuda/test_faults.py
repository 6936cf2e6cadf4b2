"""The checker finds what it is for: one mistake each, and none where the mistake is put right."""

import pytest

from megapipe.kernels.cuda_backend import library
from tests.fake_cuda import faulty
from tests.fake_cuda.kernels import declared
from tests.fake_cuda.server import FakeCudaError, run_fake

EARLY = {
    "reads_early": "reads what another stream writes",
    "overwrites_early": "overwrites what another stream still reads",
    "uses_new_memory_early": "overwrites what another stream writes",
    "reads_pinned_memory_early": "the host reads what a copy still fills",
    "overwrites_pinned_memory_early": "the host overwrites what a copy still reads",
}


@pytest.mark.parametrize("name", EARLY)
def test_an_order_that_nothing_guarantees_is_found(name: str) -> None:
    program = getattr(faulty, name)
    (wrong,), (right,) = run_fake(program, False), run_fake(program, True)
    assert len(wrong.faults) == 1
    assert EARLY[name] in wrong.faults[0]
    assert wrong.faults[0].startswith("tests/fake_cuda/faulty.py:")
    assert right.faults == []


def test_memory_freed_while_another_stream_reads_it_is_found() -> None:
    (wrong,) = run_fake(faulty.frees_early, "")
    assert len(wrong.faults) == 1
    assert "memory is freed while another stream may still use it" in wrong.faults[0]
    for way in ("record_stream", "wait", "synchronize"):
        assert run_fake(faulty.frees_early, way)[0].faults == []


@pytest.mark.parametrize("way", ["read", "write", "copy", "host read", "host write"])
def test_use_of_released_memory_is_found(way: str) -> None:
    """torch's fake tensors say nothing: they have shapes only."""
    (wrong,), (right,) = (run_fake(faulty.uses_released_memory, way, restores) for restores in (False, True))
    assert len(wrong.faults) == 1
    verb = "the host uses" if way.startswith("host") else "writes" if way == "write" else "reads"
    assert f"{verb} memory that was released (released at tests/fake_cuda/faulty.py:" in wrong.faults[0]
    assert wrong.faults[0].startswith("tests/fake_cuda/faulty.py:")
    assert right.faults == []


def test_autograd_waits_where_a_gradient_crosses_streams() -> None:
    (report,) = run_fake(faulty.crosses_autograd_streams)
    assert report.faults == []
    assert report.results == [[0, 1]]


def test_every_way_to_wait_for_the_device_is_counted() -> None:
    (report,) = run_fake(faulty.waits_for_the_device)
    waits = {name: phase.waits for name, phase in report.phases.items()}
    assert waits == {**dict.fromkeys(waits, 1), "pinned": 0, "add": 0}


@pytest.mark.parametrize(
    ("mistake", "words"),
    [
        ("count", "takes 7 arguments"),
        ("order", "rows is 1.0, not a int64_t"),
        ("dtype", "dy is torch.float16, not torch.bfloat16"),
        ("gaps", "dy has gaps"),
        ("device", "dy is on cpu, not on cuda"),
        ("apex", "d_weight.dtype == torch.float32"),
    ],
)
def test_calls_that_extensions_would_misread_end_the_run(mistake: str, words: str) -> None:
    with pytest.raises(FakeCudaError) as failure:
        run_fake(faulty.calls_extensions, mistake)
    assert words in str(failure.value)


def test_what_extensions_read_and_write_is_on_the_timeline() -> None:
    (report,) = run_fake(faulty.calls_extensions, "")
    assert len(report.faults) == 2
    assert "reads what another stream writes" in str(report.faults)
    assert "overwrites what another stream writes" in str(report.faults)
    assert report.phases["reads"].launches == {"apex wgrad_gemm_accum_fp32": 1}


def test_arguments_of_csrc_are_those_of_its_sources() -> None:
    """A function that takes an argument more, or of another kind, would be called with the wrong registers."""
    kinds = {"int64_t": "n", "int32_t": "c", "float": "f"}
    functions = {
        name: "".join("p" if each.is_pointer else kinds[each.type] for each in parameters[:-1])
        for name, parameters in declared().items()
    }
    del functions["norm_slabs"]
    assert functions == library._SIGNATURES
