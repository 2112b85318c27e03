"""Fixtures of the kernels' tests."""

import pytest
import torch


@pytest.fixture
def poisoned_memory():
    """Fresh tensors are full of NaN, or of the largest integer, until something writes them."""
    assert torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)
