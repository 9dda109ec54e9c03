"""What recipes tell a user: where they can write, found out before the work, and errors in one line."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from training.errors import BadInput


def usable_directory(path: str | Path, option: str = "--out") -> Path:
    """The directory, made if need be.

    Args:
        path: given by the user.
        option: how it was given, for the message.

    Raises:
        BadInput: it cannot be made or written in.
    """
    directory = Path(path)
    try:
        directory.mkdir(parents=True, exist_ok=True)
        # Permissions alone do not say whether a file system takes files.
        with tempfile.TemporaryFile(dir=directory):
            pass
    except OSError as error:
        reason = error.strerror or type(error).__name__
        raise BadInput(
            f"{option} must be a directory that can be written in, got {str(path)!r}: {reason}"
        ) from error
    return directory


def exit_code(work: Callable[[], object]) -> int:
    """Does the work of a command: 0, or 2 and one line on stderr for what the user got wrong."""
    try:
        work()
    except BadInput as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0
