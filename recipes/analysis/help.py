"""How the recipes of this directory show their options."""

from __future__ import annotations

import argparse


class Help(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """The description line by line, and the default of every option that does not tell it itself."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        if "(default" in (action.help or ""):
            return action.help
        return super()._get_help_string(action)
