"""The Reader of plans with remote files: a process that fetches ranges into shared memory. [no-torch]"""

from __future__ import annotations

import contextlib
import json
import logging
import mmap
import os
import select
import sys
import time
import uuid
from dataclasses import asdict, replace
from pathlib import Path

from streaming.checkpoint.remote_file import RemoteFile
from streaming.errors import OptionError
from streaming.read_plan import ReadPlan, Region
from streaming.reader import Completion, ProcessReader
from streaming.remote import reading
from streaming.remote.copies import partial_path
from streaming.remote.ranges import RetryPolicy

CONNECTIONS = 8
FINISH_S = 10.0  # how long the end of a load waits for its copies to be on the disk
_ROOT = Path(__file__).parents[2]
_PROGRAM = "import sys; sys.path.extend(sys.argv[1:]); from streaming.remote.reading import main; main()"
_DEFAULT_POLICY = RetryPolicy()

logger = logging.getLogger(__name__)


class RemoteReader:
    """A ProcessReader whose program knows addresses; its faults come in words. Local files of the plan are read too."""

    def __init__(
        self, read_plan: ReadPlan, *, connections: int = CONNECTIONS, policy: RetryPolicy = _DEFAULT_POLICY
    ) -> None:
        if not hasattr(os, "memfd_create"):
            raise OptionError("remote models need memory that processes can share by a descriptor, as Linux has it")
        self._token = uuid.uuid4().hex
        self._words: dict[int, str] = {}
        self._rest, self._finished, self._left = b"", False, len(read_plan.pieces)
        self._pipe, inherited = os.pipe()
        os.set_blocking(self._pipe, False)
        try:
            self._process = ProcessReader(
                read_plan,
                threads=connections,
                program=("-I", "-S", "-c", _PROGRAM, str(_ROOT), *(path for path in sys.path if os.path.isabs(path))),
                job={
                    "files": [_entry(file) for file in read_plan.files], "policy": asdict(policy),
                    "words": inherited, "token": self._token,
                },
                inherited=(inherited,),
            )  # fmt: skip
        except BaseException:
            os.close(self._pipe)
            raise
        finally:
            os.close(inherited)

    @property
    def read_plan(self) -> ReadPlan:
        """What is read."""
        return self._process.read_plan

    @property
    def pid(self) -> int | None:
        """The process that reads."""
        return self._process.pid

    @property
    def shared_nbytes(self) -> int:
        """Bytes of shared memory that hold data now."""
        return self._process.shared_nbytes

    def memory(self, region: Region) -> mmap.mmap | None:
        """The region's memory."""
        return self._process.memory(region)

    def fileno(self) -> int:
        """A descriptor that is readable when completions are waiting."""
        return self._process.fileno()

    def completions(self) -> list[Completion]:
        """The completions that have arrived since."""
        found = self._process.completions()
        self._left -= len(found)
        if found:
            self._listen()
        return [
            replace(done, error=self._words.get(done.piece, done.error)) if done.error == reading.IN_WORDS else done
            for done in found
        ]

    def release(self, count: int) -> None:
        """Say that `count` items of the window have been released in all."""
        self._process.release(count)

    def close(self) -> None:
        """Stop; where all has been read, copies may still be finished."""
        if self._pipe < 0:
            return
        copies = [file.copy_to for file in self.read_plan.files if isinstance(file, RemoteFile) and file.copy_to]
        if copies and not self._left:
            self._wait_for_copies()
        self._process.close()
        for path in copies:
            with contextlib.suppress(OSError):
                partial_path(path, self._token).unlink()
                logger.warning("%s: the copy was not finished when the model was closed; it is removed", path)
        os.close(self._pipe)
        self._pipe = -1

    def _wait_for_copies(self) -> None:
        end_s = time.monotonic() + FINISH_S
        while not self._finished and (left_s := end_s - time.monotonic()) > 0:
            readable, _, _ = select.select([self._pipe], [], [], left_s)
            if not readable or not self._listen():
                return

    def _listen(self) -> bool:
        """Take what was said since; False when the other end is closed."""
        while True:
            try:
                chunk = os.read(self._pipe, 1 << 16)
            except BlockingIOError:
                return True
            if not chunk:
                return False
            *lines, self._rest = (self._rest + chunk).split(b"\n")
            for line in lines:
                self._hear(json.loads(line))

    def _hear(self, said: dict[str, object]) -> None:
        if "warning" in said:
            logger.warning("%s", said["warning"])
        if isinstance(piece := said.get("piece"), int):
            self._words[piece] = str(said["words"])
        self._finished = self._finished or "finished" in said


def _entry(file: object) -> dict[str, object] | None:
    """A remote file as JSON; None for a local one, whose descriptor the process inherits."""
    if not isinstance(file, RemoteFile):
        return None
    return {**asdict(file), "copy_to": None if file.copy_to is None else str(file.copy_to)}
