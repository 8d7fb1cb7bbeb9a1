"""What several ranks mean for the command line: which commands know them, and who is a follower. [no-torch]"""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping

from streaming.cli import load_options
from streaming.errors import OptionError
from streaming.ranks.torchrun import check_world, launched_by

STREAMED = ("generate", "chat", "logits", "bench")  # commands that run a model on all ranks
PLANNED = ("plan", "inspect", "save-shards")  # and those that do what is to be done for each rank in one process


def follower_status(options: argparse.Namespace, *, environ: Mapping[str, str] = os.environ) -> int | None:
    """The exit status of a process that torchrun started to be a follower, when it has been one; None where the command
    is to be run here. Raises OptionError for a command that knows no ranks, and for a wrong number of them."""
    given, launched = load_options(options), launched_by(environ)
    world = given.topology().world
    if world > 1 and options.command not in STREAMED + PLANNED:
        *names, last = STREAMED + PLANNED
        raise OptionError(
            f"{options.command} runs on one rank, the options make {world}: several go with {', '.join(names)} and "
            f"{last}"
        )
    if launched is None:
        return None
    if options.command in PLANNED:
        return 0 if launched.rank else None
    check_world(launched, world)
    if launched.world > 1 and options.command == "bench":
        raise OptionError("bench starts the ranks of each run itself: leave torchrun out")
    if not launched.rank:
        return None
    from streaming.ranks.follower import follow_launched

    return follow_launched(launched, timeout_s=given.rank_timeout)
