"""`firstlayer` and `python -m streaming`."""

from __future__ import annotations

import sys


def main() -> int:
    """Run the command line; the exit status."""
    from streaming.cli import run

    return run(sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main())
