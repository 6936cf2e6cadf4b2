"""Small programs with one mistake each, which a GPU might forgive. Only forks of the fake server run them."""

import torch

from megapipe.kernels.apex_backend.kernels import WEIGHT_GRADIENT
from megapipe.kernels.cuda_backend import library
from tests.fake_cuda import kernels
from tests.fake_cuda.runs import FakeRank, on_fake_device


def _both() -> tuple[torch.Tensor, torch.cuda.Stream]:
    return torch.ones(1000, device="cuda"), torch.cuda.Stream()


@on_fake_device
def reads_early(fake: FakeRank, waits: bool) -> None:
    x, side = _both()
    if waits:
        side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        y = x + 1
    torch.cuda.current_stream().wait_stream(side)
    del y


@on_fake_device
def overwrites_early(fake: FakeRank, waits: bool) -> None:
    x, side = _both()
    side.wait_stream(torch.cuda.current_stream())
    y = torch.empty_like(x)
    with torch.cuda.stream(side):
        y.copy_(x)
    if waits:
        torch.cuda.current_stream().wait_event(side.record_event())
    x.zero_()
    torch.cuda.synchronize()


@on_fake_device
def frees_early(fake: FakeRank, way: str) -> None:
    x, side = _both()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        y = x + 1
    if way == "record_stream":
        x.record_stream(side)
    elif way == "wait":
        torch.cuda.current_stream().wait_stream(side)
    elif way == "synchronize":
        side.synchronize()
    del x
    torch.cuda.synchronize()
    del y


@on_fake_device
def uses_released_memory(fake: FakeRank, way: str, restores: bool) -> None:
    """A view of a storage that has no bytes, as gathered weights have between their uses, keeps its shape."""
    x = (torch.ones(1000) if way.startswith("host") else torch.ones(1000, device="cuda")).view(10, 100)
    storage = x.untyped_storage()
    num_bytes = storage.nbytes()
    storage.resize_(0)
    if restores:
        storage.resize_(num_bytes)
    if "read" in way:
        _ = x[1:] + 1
    elif way.endswith("write"):
        x.zero_()
    else:
        torch.ones(10, 100, pin_memory=True).copy_(x, non_blocking=True)


@on_fake_device
def uses_new_memory_early(fake: FakeRank, waits: bool) -> None:
    """The block may be what an earlier kernel of the allocation stream still reads."""
    x, side = _both()
    x.zero_()
    y = torch.empty(1000, device="cuda")
    if waits:
        side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        y.fill_(1)
    torch.cuda.synchronize()


@on_fake_device
def reads_pinned_memory_early(fake: FakeRank, waits: bool) -> None:
    x = torch.ones(1000, device="cuda")
    there = torch.empty(1000, pin_memory=True)
    there.copy_(x, non_blocking=True)
    if waits:
        torch.cuda.current_stream().record_event().synchronize()
    fake.report.results.append(there.sum())
    fake.report.results.clear()


@on_fake_device
def overwrites_pinned_memory_early(fake: FakeRank, waits: bool) -> None:
    here = torch.ones(1000).pin_memory()
    x = here.to("cuda", non_blocking=True)
    if waits:
        torch.cuda.synchronize()
    here.zero_()
    del x


@on_fake_device
def crosses_autograd_streams(fake: FakeRank) -> None:
    """Autograd runs a backward on its forward's stream, and waits where a gradient crosses streams: no fault."""
    x = torch.ones(1000, device="cuda", requires_grad=True)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        y = x * 2
    torch.cuda.current_stream().wait_stream(side)
    y.record_stream(torch.cuda.current_stream())
    (y * 3).sum().backward()
    fake.report.results.append(sorted(fake.timeline.live))


@on_fake_device
def waits_for_the_device(fake: FakeRank) -> None:
    """Every way in which a line of Python waits for a GPU."""
    x = torch.ones(8, device="cuda")
    pageable, pinned = torch.ones(8), torch.ones(8).pin_memory()
    for name, run in {
        "item": lambda: x[0].item(),
        "float": lambda: float(x[0]),
        "bool": lambda: bool(x[0] > 0),
        "tolist": x.tolist,
        "cpu": x.cpu,
        "tensor": lambda: torch.tensor([1.0], device="cuda"),
        "pageable": lambda: pageable.to("cuda", non_blocking=True),
        "pinned": lambda: pinned.to("cuda", non_blocking=True),
        "blocking": lambda: pinned.to("cuda"),
        "synchronize": torch.cuda.synchronize,
        "event": lambda: torch.cuda.current_stream().record_event().synchronize(),
        "add": lambda: x + 1,
    }.items():
        with fake.phase(name):
            run()


@on_fake_device
def calls_extensions(fake: FakeRank, mistake: str) -> None:
    """A function of csrc/ and one of apex, called as their sources demand but for one mistake."""
    kernels.install_csrc(fake.watch)
    kernels.install_apex(fake.watch)
    dtype = torch.float16 if mistake == "dtype" else torch.bfloat16
    x, dy = torch.ones(2, 8, 32, device="cuda", dtype=torch.bfloat16), torch.ones(2, 8, 32, device="cuda", dtype=dtype)
    if mistake == "gaps":
        dy = dy.transpose(1, 2)
    arguments = [dy, x, torch.empty_like(x), 16, 32, 1.0, library.DTYPES[x.dtype]]
    if mistake == "order":
        arguments[3:6] = [1.0, 16, 32]
    if mistake == "device":
        arguments[0] = dy.cpu()
    if mistake != "apex":
        library.current().launch("softmax_input_gradient", *arguments[: -1 if mistake == "count" else None])
    total = torch.zeros(32, 32, device="cuda", dtype=torch.bfloat16 if mistake == "apex" else torch.float32)
    WEIGHT_GRADIENT(x.view(16, 32), x.view(16, 32), total)
    with fake.phase("reads"):
        side = torch.cuda.Stream()
        with torch.cuda.stream(side):
            WEIGHT_GRADIENT(x.view(16, 32), x.view(16, 32), total)
        torch.cuda.synchronize()
