"""Rank 0 brings the ranks together: starts its followers, or waits for those that torchrun started. [no-torch]"""

from __future__ import annotations

import os
import resource
import secrets
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from streaming.cores import core_count
from streaming.errors import OptionError, WorkerError
from streaming.options import LoadOptions
from streaming.ranks.hub import Hub, open_hub
from streaming.ranks.torchrun import CONTROL_PORT, Launched, check_world, launched_by

TOKEN = "FIRSTLAYER_RANK_TOKEN"
"""The environment variable in which a follower finds the token: the command line would show it to everybody."""

FOLLOWER = (sys.executable, "-P", "-m", "streaming.ranks.follower")
_ROOT = Path(__file__).parents[2]
_FILES, _FILES_A_RANK = 40, 6  # that rank 0 has open at most: 42 were seen of 2 ranks, 53 of 4, 60 of 6
_LOOPBACK = ("127.0.0.1", "::1", "localhost")


def open_ranks(
    options: LoadOptions, *, environ: Mapping[str, str] = os.environ, program: Sequence[str] = FOLLOWER
) -> Hub | None:
    """The hub of a run of several ranks, whose followers are on their way; None for a run of one.

    Followers that this process starts have a session of their own (the terminal's Ctrl-C reaches rank 0 only), write to
    its stderr and read nothing. Returns at once: what is sent to a follower waits for it. Raises OptionError where
    torchrun started another number of ranks, WorkerError where no process can be started or connections would run out.
    """
    world, launched = options.topology().world, launched_by(environ)
    if launched is not None:
        check_world(launched, world)
        if launched.rank:
            raise OptionError(
                f"RANK is {launched.rank}: a model is opened by rank 0; under torchrun the command line (firstlayer, "
                "python -m streaming) makes the other ranks its followers"
            )
    if world == 1:
        return None
    if options.device.startswith("cuda:"):
        raise OptionError(f"--device {options.device} does not go with several ranks: with cuda, each takes its own")
    _check_files(world)
    return _start(options, environ, program) if launched is None else _await(options, launched)


def rank_options(options: LoadOptions, *, rank: int, environ: Mapping[str, str] = os.environ) -> LoadOptions:
    """The options as one rank of several carries them out: its own CUDA device, and its share of its machine's cores.

    Both sides get the user's options and apply this themselves.
    """
    world, launched = options.topology().world, launched_by(environ)
    if world == 1:
        return options
    local_rank, local_world = (rank, world) if launched is None else (launched.local_rank, launched.local_world)
    cores = core_count()
    return replace(
        options,
        device=f"cuda:{local_rank}" if options.device == "cuda" else options.device,
        threads=options.threads or max(1, cores // local_world),
    )


def _check_files(world: int) -> None:
    """Where sockets run out, torch's process groups break in ways that name no cause, or end the process."""
    needed, (allowed, _) = _FILES + _FILES_A_RANK * world, resource.getrlimit(resource.RLIMIT_NOFILE)
    if allowed != resource.RLIM_INFINITY and allowed < needed:
        raise WorkerError(
            f"{world} ranks may need {needed} open files and connections, this process may have {allowed}: raise the "
            "limit with `ulimit -n`"
        )


def _start(options: LoadOptions, environ: Mapping[str, str], program: Sequence[str]) -> Hub:
    token = secrets.token_hex(16)
    world = options.topology().world
    hub = open_hub(world, token=token, rank_timeout_s=options.rank_timeout)
    try:
        for rank in range(1, world):
            hub.adopt(rank, _start_one(hub.port, rank, token, environ, program))
    except OSError as error:
        hub.close()
        raise WorkerError(f"rank {rank} of {world} cannot be started: {error}") from None
    except BaseException:
        hub.close()
        raise
    return hub


def _start_one(
    port: int, rank: int, token: str, environ: Mapping[str, str], program: Sequence[str]
) -> subprocess.Popen[bytes]:
    paths = [str(_ROOT), *filter(None, [environ.get("PYTHONPATH")])]
    return subprocess.Popen(
        [*program, "127.0.0.1", str(port), str(rank)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        env={**environ, "PYTHONPATH": os.pathsep.join(paths), TOKEN: token},
        start_new_session=True,
    )


def _await(options: LoadOptions, launched: Launched) -> Hub:
    host = launched.host if launched.host in _LOOPBACK else ""
    try:
        return open_hub(
            launched.world, token=launched.token, rank_timeout_s=options.rank_timeout, host=host, port=launched.port
        )
    except OSError as error:
        raise OptionError(
            f"port {launched.port} for the ranks' control channel: {error.strerror or error}; set {CONTROL_PORT} to a "
            "free one, the same for all ranks"
        ) from None
