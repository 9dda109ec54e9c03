"""What a user can get wrong, told in one line."""

from __future__ import annotations


class BadInput(ValueError):
    """Files, options or checkpoints that cannot be used; the message says which and what to do.

    The command line prints the message alone, without a traceback, and ends with exit code 2.
    """
