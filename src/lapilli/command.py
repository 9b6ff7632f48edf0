"""The script `lapilli`: the command line, or what to install for it."""

from __future__ import annotations

import atexit
import gc
import sys

from lapilli.errors import MissingExtraError


def main() -> None:
    """Runs the command line in its own process. Exit code 1 with the pip command on stderr where its packages are missing."""
    try:
        from lapilli.cli import main as run
    except MissingExtraError as error:
        print(f"Error: {error}", file=sys.stderr)
        raise SystemExit(1) from None
    atexit.register(gc.freeze)  # or the interpreter's last collection looks for seconds at all that torch has made
    run()
