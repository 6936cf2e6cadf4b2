"""The device receives the values and dtypes that were read, in memory of its own on a GPU."""

import numpy as np
import pytest
import torch

from megapipe.engine.step import tensor_on

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.mark.parametrize("device", DEVICES)
def test_ids_and_masks_arrive_contiguous_in_their_dtype(device: str) -> None:
    windows = np.array([[0, 5, 2**31 - 1], [7, 8, 9]])
    tokens = tensor_on(windows[:, 1:], torch.device(device))
    assert tokens.dtype == torch.int64
    assert tokens.is_contiguous()
    assert tokens.device.type == device
    assert tokens.tolist() == [[5, 2**31 - 1], [8, 9]]
    mask = tensor_on(np.array([[1.0, 0.0]], dtype=np.float32), torch.device(device))
    assert mask.dtype == torch.float32
    assert mask.tolist() == [[1.0, 0.0]]


@pytest.mark.parametrize(
    ("array", "crosses"), [(np.array([[0, 5, 2**31 - 1]]), torch.int32), (np.ones((1, 2), np.float32), torch.float32)]
)
def test_gpus_read_narrow_integers_from_pinned_memory_asynchronously(
    monkeypatch: pytest.MonkeyPatch, array: np.ndarray, crosses: torch.dtype
) -> None:
    """Calls of torch on a machine without a GPU: in this order, with no other call in between."""
    asked: list[tuple[object, ...]] = []

    def pinned(tensor: torch.Tensor) -> torch.Tensor:
        asked.append(("pin", tensor.dtype))
        return tensor

    def moved(tensor: torch.Tensor, device: torch.device, non_blocking: bool = False) -> torch.Tensor:
        asked.append(("copy", tensor.dtype, device, non_blocking))
        return tensor

    monkeypatch.setattr(torch.Tensor, "pin_memory", pinned)
    monkeypatch.setattr(torch.Tensor, "to", moved)
    received = tensor_on(array, torch.device("cuda"))
    assert asked == [("pin", crosses), ("copy", crosses, torch.device("cuda"), True)]
    assert received.dtype == torch.from_numpy(array).dtype
    assert received.tolist() == array.tolist()


@pytest.mark.gpu
def test_pinned_memory_may_be_used_again_at_once() -> None:
    """Copies that are still under way keep their source: many in a row arrive whole."""
    arrays = [np.full((64, 4097), number) for number in range(50)]
    moved = [tensor_on(array, torch.device("cuda")) for array in arrays]
    assert all(bool((tensor == number).all()) for number, tensor in enumerate(moved))
