"""What a user can get wrong, told in one line."""

from __future__ import annotations


class BadInput(ValueError):
    """Files, options or checkpoints that cannot be used; the message says which and what to do.

    The command line prints the message alone, without a traceback, and ends with exit code 2.
    """


def first_line(error: Exception) -> str:
    """What an error says in one line: its first, or its kind where it says nothing."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]
