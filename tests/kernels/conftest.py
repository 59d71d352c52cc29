"""Buffers that betray a value nobody wrote."""

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def nan_filled_buffers() -> Iterator[None]:
    """`torch.empty` gives NaN, so a row that no kernel wrote reaches the result."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    yield
    torch.use_deterministic_algorithms(False)
