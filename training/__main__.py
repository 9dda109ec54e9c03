"""Train, evaluate and use language models made of certified layers.

    python -m training fit --config recipes/quickstart.yaml     train; logs, checkpoints and a report
    python -m training fit --config ... --ckpt_path CKPT        go on where a run ended or was killed
    python -m training validate --config ... --ckpt_path CKPT   nats and bits on the validation text
    python -m training test --config ... --ckpt_path CKPT       nats and bits on the test text
    python -m training certify CKPT                             certificate table and attack
    python -m training sample CKPT --prompt "The "              let it write
    python -m training export CKPT DIRECTORY                    safetensors and JSON

Each command has its own --help. Every setting of a YAML file is an option too, such as
--trainer.max_steps 100 or --model.lr 1e-3.
"""

from __future__ import annotations

import os
import sys

# Threads that wait do not spin, as in the Makefile: on a busy machine spinning makes commands several
# times slower. To be set before torch is loaded.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


def main(arguments: list[str] | None = None) -> int:
    """Runs a command; returns the exit code."""
    given = sys.argv[1:] if arguments is None else arguments
    command, rest = (given[0], given[1:]) if given else ("--help", [])
    if command in ("-h", "--help"):
        print(__doc__)
        return 0
    # Imports take seconds: --help needs none of them, and certify not all.
    from training.errors import BadInput, exit_code

    def work() -> object:
        if command in ("certify", "sample", "export"):
            from training import commands

            return getattr(commands, command)(rest)
        if command in ("fit", "validate", "test"):
            from training import cli

            return cli.run(given)
        raise BadInput(
            f"unknown command {command!r}; commands are fit, validate, test, certify, sample, export"
        )

    return exit_code(work)


if __name__ == "__main__":
    sys.exit(main())
