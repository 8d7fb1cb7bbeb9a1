"""`firstlayer` and `python -m streaming`."""

from __future__ import annotations

import sys


def main() -> int:
    """Run the command line; the exit status."""
    try:
        from streaming.cli import run

        return run(sys.argv[1:])
    except KeyboardInterrupt:  # while the command line itself was imported
        sys.stderr.write("firstlayer: error: interrupted\n")
        return 1


if __name__ == "__main__":
    sys.exit(main())
