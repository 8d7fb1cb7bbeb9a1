"""What tests of several packages share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from streaming.library_environment import prepare_libraries

prepare_libraries()  # as everything that the runtime starts does, before it imports torch


@pytest.fixture
def same_threads_afterwards() -> Iterator[None]:
    """For tests that change the number of torch's own threads."""
    import torch

    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)
