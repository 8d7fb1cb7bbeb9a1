"""Embedding and head that the configuration ties and that are both on disk: compared once both have arrived."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from streaming.device import Device

if TYPE_CHECKING:
    from streaming.model import StreamedModel


def compare_tied(streamed: StreamedModel, device: Device, warn: Callable[[str], None]) -> None:
    """The config ties embedding and head, but both are on disk: equal ones become one again, different ones both stay.

    A step that is running may still read the head's own copy, so its memory is given back between two steps. Raises
    CheckpointError where a file in which one of them lies has changed.
    """
    for layer in ("embed", "head"):
        device.check(layer)  # before its bytes are touched, where they lie in a map
    table, head = device.stored["model.embed_tokens.weight"]["weight"], device.stored["lm_head.weight"]
    if set(head) != {"weight"}:
        return
    with device.working():
        pairs = zip(table.split(8192), head["weight"].split(8192), strict=True)
        equal = all(torch.equal(one, other) for one, other in pairs)
    if equal:
        streamed.runner.model.assign("lm_head.weight", table)
        streamed.submit_call(lambda runner, stop: device.discard("lm_head.weight"))
        return
    warn("the config ties embedding and head, but lm_head.weight on disk differs from it: the one on disk is used")
