"""The counter of live bytes against tensors whose sizes and lifetimes are known."""

import torch

from tests.support.live_bytes import LiveBytes

KILOBYTE = 256 * 4


def block() -> torch.Tensor:
    return torch.zeros(256)


def test_counts_until_the_last_view_is_gone() -> None:
    before = block()
    with LiveBytes() as live:
        first, second = block(), block()
        view = first[:10].view(2, 5)
        assert live.current == 2 * KILOBYTE
        del first
        assert live.current == 2 * KILOBYTE
        del view
        assert live.current == KILOBYTE
        before += second
        assert before[3:].view(-1).shape == (253,)
        assert (live.current, live.peak) == (KILOBYTE, 2 * KILOBYTE)
        live.reset_peak()
        assert live.peak == KILOBYTE
        del second
    assert live.current == 0


def test_counts_what_autograd_keeps_for_the_backward() -> None:
    x = block().requires_grad_()
    with LiveBytes() as live:
        y = x.exp().exp().exp()
        assert live.current == 3 * KILOBYTE  # each exp saves its result
        gradient = block()
        y.backward(gradient)
        del y, gradient
        assert live.current == KILOBYTE  # the gradient of x
    assert x.grad is not None


def test_meta_tensors_take_nothing() -> None:
    with LiveBytes() as live:
        kept = torch.empty(1 << 30, device="meta")
        assert live.peak == 0
    assert kept.is_meta


def test_counts_memory_that_comes_and_goes() -> None:
    before = block()
    with LiveBytes() as live:
        inside = block()
        inside.untyped_storage().resize_(0)
        assert live.current == 0
        inside.untyped_storage().resize_(2 * KILOBYTE)
        before.untyped_storage().resize_(0)
        assert live.current == KILOBYTE
        before.untyped_storage().resize_(KILOBYTE)
        assert (live.current, live.peak) == (2 * KILOBYTE, 2 * KILOBYTE)
        del inside
        assert live.current == 0
