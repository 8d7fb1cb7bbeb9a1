"""Ranks meet before the model is built: one that never comes is named."""

from __future__ import annotations

import os
from contextlib import closing
from types import SimpleNamespace

import pytest
import torch

from layers.topology import Topology
from streaming.errors import RankError
from streaming.ranks import spoke
from streaming.ranks.channel import Progress
from streaming.ranks.hub import open_hub
from streaming.ranks.lead import Lead
from tests.streaming.ranks.threaded import _end_thread


# Its listener ends as its process would, if it gets to it before the channel is closed.
@pytest.mark.filterwarnings("ignore:Exception in thread rank listen:pytest.PytestUnhandledThreadExceptionWarning")
def test_a_rank_that_lives_and_does_not_come_to_meet_the_others_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spoke, "os", SimpleNamespace(_exit=_end_thread, write=os.write))
    with open_hub(2, token="word", rank_timeout_s=0.5) as hub:
        channel = spoke.connect("127.0.0.1", hub.port, rank=1, token="word", timeout_s=30)
        channel.tell_progress(Progress(stage="plan"))
        lead = Lead(hub, Topology(tensor=2))
        with closing(lead), closing(channel), pytest.raises(RankError) as caught:
            lead.join(torch.device("cpu"))
    assert str(caught.value) == "rank 1, stage plan: does not come to meet the others (--rank-timeout 0.5)"
