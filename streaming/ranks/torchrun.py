"""What torchrun (or anything that does as it does) says of this process in its environment. [no-torch]

Ranks that torchrun has started meet at MASTER_ADDR, where `torch.distributed` uses MASTER_PORT; the control channel
takes the next port, or FIRSTLAYER_CONTROL_PORT. Its token comes from TORCHELASTIC_RUN_ID (or is a fixed word): it tells
runs apart and keeps nobody out who knows the id. Several machines trust their network, as `torch.distributed` does.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass

from streaming.errors import OptionError

CONTROL_PORT = "FIRSTLAYER_CONTROL_PORT"
_NEEDED = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True)
class Launched:
    """This process's place in a run that was started from outside; `port` is the control channel's, at rank 0."""

    rank: int
    world: int
    local_rank: int
    local_world: int
    host: str
    port: int
    token: str


def launched_by(environ: Mapping[str, str]) -> Launched | None:
    """What the environment says; None where it does not say all of it. Raises OptionError for what is no number."""
    if not all(environ.get(name) for name in _NEEDED):
        return None
    rank, world = _number(environ, "RANK"), _number(environ, "WORLD_SIZE")
    if not 0 <= rank < world:
        raise OptionError(f"RANK {rank} in the environment is none of the {world} ranks of WORLD_SIZE")
    port = _number(environ, CONTROL_PORT) if environ.get(CONTROL_PORT) else _number(environ, "MASTER_PORT") + 1
    if not 0 < port < 1 << 16:
        raise OptionError(f"port {port} for the ranks' control channel is none; set {CONTROL_PORT} to a free one")
    return Launched(
        rank=rank,
        world=world,
        local_rank=_number(environ, "LOCAL_RANK"),
        local_world=_number(environ, "LOCAL_WORLD_SIZE") if environ.get("LOCAL_WORLD_SIZE") else world,
        host=environ["MASTER_ADDR"],
        port=port,
        token=_token(environ.get("TORCHELASTIC_RUN_ID", "")),
    )


def check_world(launched: Launched, world: int) -> None:
    """Raises OptionError where another number of processes was started than the options need."""
    if launched.world != world:
        raise OptionError(
            f"WORLD_SIZE is {launched.world}, but the options make {world} rank{'s' if world != 1 else ''}: "
            "start as many processes as --tensor-parallel-size, --expert-parallel-size and --pipeline-parallel-size "
            "need"
        )


def _number(environ: Mapping[str, str], name: str) -> int:
    text = environ[name]
    if not text.isascii() or not text.isdecimal() or len(text) > 9:
        raise OptionError(f"{name}={text!r:.40} in the environment: a whole number is needed, as torchrun sets it")
    return int(text)


def _token(run_id: str) -> str:
    return hashlib.sha256(f"firstlayer {run_id or 'torchrun'}".encode()).hexdigest()
