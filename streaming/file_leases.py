"""Read leases: while a file's map is used, the system lets nobody write to it or cut it short. [no-torch]

Behind a new end of a file an access through its map ends the process (SIGBUS). Who opens a leased file for writing, or
cuts it, waits in the system until the lease is given back: `LOOK_S` here, or until nobody uses the file's bytes (after
45 s the system goes on by itself). Leases are Linux's (fcntl(2), F_SETLEASE): for a file's owner or who has CAP_LEASE,
on file systems of this machine, while nobody has the file open for writing.
"""

from __future__ import annotations

import fcntl
import os
import signal
import sys
import threading
from contextlib import suppress
from dataclasses import dataclass

from streaming.open_files import FileState, state_of

LOOK_S = 0.1
_SET_SIGNAL = 10  # F_SETSIG, which `fcntl` does not name in every version


@dataclass(eq=False)
class _Lease:
    descriptor: int
    users: int = 0
    is_wanted_back: bool = False


class FileLeases:
    """Leases of numbered files. All methods may be called from any thread."""

    def __init__(self) -> None:
        self._leases: dict[int, _Lease] = {}
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._watch: threading.Thread | None = None

    def take(self, file: int, descriptor: int, state: FileState) -> bool:
        """Lease the file behind a descriptor, unless it is leased: whether it is now, and nobody wants to write. Not
        where its state is another one than this: a file that is leased is what it was."""
        with self._lock:
            if self._ended.is_set():
                return False
            lease = self._leases.get(file)
            if lease is None:
                own = _leased(descriptor, state)
                if own is None:
                    return False
                lease = self._leases[file] = _Lease(own)
                if self._watch is None:
                    self._watch = threading.Thread(target=self._look, name="firstlayer-leases", daemon=True)
                    self._watch.start()
            return not lease.is_wanted_back

    def enter(self, file: int) -> bool:
        """Begin to use the file's bytes, which stay as they are until `leave`; False where somebody is to write."""
        with self._lock:
            lease = self._leases.get(file)
            if lease is None or lease.is_wanted_back:
                return False
            lease.users += 1
            return True

    def descriptor(self, file: int) -> int | None:
        """Of the leased file, until the lease is given back; None where nobody is to rely on it any more."""
        lease = self._leases.get(file)
        return None if lease is None or lease.is_wanted_back else lease.descriptor

    def leave(self, file: int) -> None:
        """The bytes are not used any more; once for each `enter`."""
        with self._lock:
            lease = self._leases.get(file)
            if lease is not None:
                lease.users -= 1
                self._give_back(file, lease)

    @property
    def is_closed(self) -> bool:
        """Whether nobody uses any file any more."""
        return self._ended.is_set()

    def close(self) -> None:
        """Give all leases back; nobody uses any file."""
        with self._lock:
            self._ended.set()
            watch, self._watch = self._watch, None
            for lease in self._leases.values():
                _end(lease.descriptor)
            self._leases.clear()
        if watch is not None:
            watch.join()

    def _look(self) -> None:
        while not self._ended.wait(LOOK_S):
            with self._lock:
                for file, lease in list(self._leases.items()):
                    lease.is_wanted_back = fcntl.fcntl(lease.descriptor, fcntl.F_GETLEASE) != fcntl.F_RDLCK
                    self._give_back(file, lease)

    def _give_back(self, file: int, lease: _Lease) -> None:
        if lease.is_wanted_back and not lease.users:
            del self._leases[file]
            _end(lease.descriptor)


def _end(descriptor: int) -> None:
    """Of a lease: said by itself, since a forked process may have the descriptor too."""
    with suppress(OSError):
        fcntl.fcntl(descriptor, fcntl.F_SETLEASE, fcntl.F_UNLCK)
    os.close(descriptor)


def _leased(descriptor: int, state: FileState) -> int | None:
    """A descriptor of its own of the same file, which is leased and in this state; None where that cannot be."""
    if sys.platform != "linux":
        return None
    own: int | None = None
    try:
        own = os.open(f"/proc/self/fd/{descriptor}", os.O_RDONLY | os.O_CLOEXEC)
        fcntl.fcntl(own, _SET_SIGNAL, signal.SIGURG)  # which is ignored; the one that is sent else ends the process
        fcntl.fcntl(own, fcntl.F_SETLEASE, fcntl.F_RDLCK)
        if state_of(os.fstat(own)) == state:
            return own
    except OSError:
        pass
    if own is not None:
        _end(own)
    return None
