"""What tests of several packages share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture
def same_threads_afterwards() -> Iterator[None]:
    """For tests that change the number of torch's own threads."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)
