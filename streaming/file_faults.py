"""What the system says of a file, in words. [no-torch]"""

from __future__ import annotations

import errno
import os
import resource


def system_fault(file: object, code: int | None) -> str:
    """A line that names the file; where a limit is in the way, the limit and how to raise it."""
    if code == errno.EMFILE:
        return f"{file}: {descriptor_limit()}"
    return f"{file}: {os.strerror(code) if code else 'cannot be read'}"


def changed_fault(file: object) -> str:
    """A line that names a file which is not what it was when the load was planned."""
    return f"{file} was changed, or replaced, during the load (its size or time is another)"


def descriptor_limit() -> str:
    """How many files may be open, and how to raise that."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return (
        f"too many open files: this process may have {soft:,} open at once; raise the limit with `ulimit -n` "
        f"(up to {hard:,} here)"
    )
