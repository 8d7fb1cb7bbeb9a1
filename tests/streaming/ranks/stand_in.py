"""Ranks that share no model: a hub and followers that answer each step with a message, to see how they end.

    python -m tests.streaming.ranks.stand_in lead WORLD RANK_TIMEOUT [FAULT]

steps for ever; FAULT is what rank 1 does at its third step: raise, exit, or stuck (its main thread waits for ever, as
in a collective that never returns).
"""

from __future__ import annotations

import os
import queue
import sys
import threading

from streaming.errors import LayerLoadError, RankError, StreamingError
from streaming.options import LoadOptions
from streaming.ranks.channel import Message, Progress
from streaming.ranks.follower import follow
from streaming.ranks.hub import Hub
from streaming.ranks.launch import TOKEN, open_ranks
from streaming.ranks.open_message import open_message
from streaming.ranks.spoke import Spoke, connect, say


def main() -> int:
    """Be rank 0, or one of its followers."""
    if sys.argv[1] == "lead":
        return lead(int(sys.argv[2]), float(sys.argv[3]), sys.argv[4:])
    *fault, _, host, port, rank = sys.argv[2:]

    def join() -> Spoke:
        return connect(host, int(port), rank=int(rank), token=os.environ.pop(TOKEN), timeout_s=30.0)

    return follow(int(rank), join, work=lambda spoke, message: work(spoke, fault[0] if fault else ""))


def lead(world: int, rank_timeout: float, fault: list[str]) -> int:
    options = LoadOptions(tensor_parallel_size=world, rank_timeout=rank_timeout)
    program = (sys.executable, "-m", "tests.streaming.ranks.stand_in", "follow", *fault, "follow")
    try:
        hub = open_ranks(options, program=program)
        assert hub is not None
        with hub:
            hub.broadcast(open_message("no model", options))
            step_for_ever(hub)
    except KeyboardInterrupt:
        say(0, "interrupted")
    except StreamingError as error:
        say(0, str(error))
    return 1


def step_for_ever(hub: Hub) -> None:
    done: queue.SimpleQueue[RankError | None] = queue.SimpleQueue()
    hub.on("done", lambda rank, message: done.put(None))
    hub.on_failure(done.put)
    step = 0
    while True:
        hub.broadcast({"kind": "step", "number": step})
        for _ in range(hub.world - 1):
            if (error := done.get()) is not None:
                raise error
        step += 1
        if step == 3:
            sys.stdout.write("stepping\n")
            sys.stdout.flush()


def work(spoke: Spoke, fault: str) -> None:
    steps: queue.SimpleQueue[Message | None] = queue.SimpleQueue()
    spoke.on("step", steps.put)
    spoke.on("close", lambda message: steps.put(None))
    while (message := steps.get()) is not None:
        spoke.tell_progress(Progress("layers.3", "quantize", f"model.layers.3.t{message['number']}"))
        if spoke.rank == 1 and message["number"] == 2 and fault:
            commit(fault)
        spoke.send({"kind": "done"})


def commit(fault: str) -> None:
    if fault == "raise":
        raise LayerLoadError("layers.3", "read", "q_proj.weight", "the file has shrunk")
    if fault == "exit":
        os._exit(7)
    threading.Event().wait()  # stuck: forever


if __name__ == "__main__":
    sys.exit(main())
