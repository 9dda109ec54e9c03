"""Two steps of every GPU configuration of Penn Treebank at its own size and precision, on the CPU.

    ONEDNN_MAX_CPU_ISA=AVX512_CORE_BF16 python -m recipes.bench.full_size DIRECTORY [NAME ...]

DIRECTORY has ptb.train.txt, ptb.valid.txt and ptb.test.txt; NAME is that of a file in recipes/ptb, by
default all. Each runs in processes of its own (ddp and fsdp in two, by gloo), not compiled, with one
batch of validation, small monitors and no attack, which takes minutes. Prints a row for each as it ends:
its time, the peak memory of its largest process, and what failed. It shows that the recipes fit together
at full size; how fast they are on a GPU it does not show.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from recipes.output import parser

_ROOT = Path(__file__).resolve().parents[2]
_SMALL = {
    "trainer.accelerator": "cpu",
    "trainer.max_steps": 2,
    "trainer.val_check_interval": 2,
    "trainer.check_val_every_n_epoch": "null",
    "trainer.limit_val_batches": 1,
    "trainer.log_every_n_steps": 1,
    "trainer.enable_progress_bar": "false",
    "model.compile": "false",
    "data.source": "dir",
    "certificate.enabled": "false",
    "inversion.length": 16,
    "text.max_new": 8,
}


def run(name: str, text: str) -> tuple[float, float, str]:
    """Seconds, gigabytes of the largest process, and the last line of an error, empty without one."""
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryFile() as errors:
        options = {**_SMALL, "data.path": text, "trainer.default_root_dir": folder}
        command = [sys.executable, "-m", "training", "fit", "--config", f"recipes/ptb/{name}.yaml"]
        command += [part for option, value in options.items() for part in (f"--{option}", str(value))]
        start = time.perf_counter()
        process = subprocess.Popen(command, cwd=_ROOT, stdout=subprocess.DEVNULL, stderr=errors)
        _, status, used = os.wait4(process.pid, 0)  # the peak of this process and its children alone
        seconds = time.perf_counter() - start
        process.returncode = os.waitstatus_to_exitcode(status)
        errors.seek(0)
        last = errors.read().decode(errors="replace").strip().splitlines()[-1:]
    failure = f"exit code {process.returncode}: {''.join(last)}" if process.returncode else ""
    return seconds, used.ru_maxrss / 2**20, failure


def main(argv: list[str] | None = None) -> int:
    """Prints the table; returns 1 if a run failed."""
    every = sorted(path.stem for path in (_ROOT / "recipes" / "ptb").glob("*.yaml"))
    options = parser(__doc__)
    options.add_argument("directory", type=Path, help="where the text is")
    options.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(every)}")
    given = options.parse_args(argv)
    print("| configuration | time, s | peak, GiB | failure |\n|---|---|---|---|", flush=True)
    failed = False
    for name in given.names or every:
        seconds, memory, failure = run(name, str(given.directory.resolve()))
        failed |= bool(failure)
        print(f"| {name} | {seconds:.0f} | {memory:.2f} | {failure or 'none'} |", flush=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
