"""Errors of the user or the machine that are reported in one line."""

from __future__ import annotations

import io
import signal
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path


class BadInput(ValueError):
    """Files, options or checkpoints that cannot be used; the message says which and what to do.

    The command line prints the message alone, without a traceback, and ends with exit code 2.
    """


class NotFinite(BadInput):
    """Raised for a loss or weights that are infinite or NaN: the run cannot continue or save them."""


def first_line(error: Exception) -> str:
    """The first line of an error's message, or its class if the message is empty."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def exit_code(work: Callable[[], object]) -> int:
    """Runs a command and returns its exit code; on failure 2, after Ctrl-C 130, with one line on stderr.

    What failed is what the user got wrong (BadInput) or what the system refused (OSError: a full disk, a
    directory that cannot be written in). Characters that a terminal cannot show become question marks.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")
    try:
        code = work()
    except (BadInput, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 128 + signal.SIGINT
    return code if isinstance(code, int) else 0


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
        if directory.is_symlink() and not directory.exists():
            reason = f"it is a link to {str(directory.readlink())!r}, which does not exist"
        raise BadInput(
            f"{option} must be a directory that can be written in, got {str(path)!r}: {reason}"
        ) from error
    return directory
