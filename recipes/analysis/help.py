"""How the recipes of this directory show and check their options."""

from __future__ import annotations

import argparse
from pathlib import Path

from recipes.output import usable_directory
from training.errors import BadInput


class Help(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """The description line by line, and the default of every option that does not tell it itself."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        if "(default" in (action.help or ""):
            return action.help
        return super()._get_help_string(action)


def claim_directory(parser: argparse.ArgumentParser, out: Path) -> None:
    """Makes the directory of the output before hours of measuring, or ends with one line."""
    try:
        usable_directory(out)
    except BadInput as error:
        parser.error(str(error))


def positive(parser: argparse.ArgumentParser, options: argparse.Namespace, *names: str) -> None:
    """Ends with one line for options that are not positive and finite."""
    for name in names:
        given = getattr(options, name)
        if not all(
            0 < number < float("inf") for number in (given if isinstance(given, list) else [given])
        ):
            parser.error(f"--{name} must be positive and finite, got {given}")
