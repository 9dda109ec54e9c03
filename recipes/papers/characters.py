"""Character models as parts of experiments, trained by what ``python -m training fit`` runs."""

from __future__ import annotations

import math
import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from lipformer.models import LanguageModel
from recipes.papers.experiment import Row, Setting
from recipes.report import count
from training import cli
from training.errors import NotFinite

_CONFIGS = Path(__file__).parents[1] / "ptb" / "small"
_QUIET = ("certificate", "inversion", "text", "report")


def trained(
    folder: Path,
    setting: Setting,
    config: str,
    seed: int,
    steps: int,
    *options: str,
    test: bool = False,
    judge: Callable[[LanguageModel], Row] | None = None,
) -> Row:
    """Trains a model of recipes/ptb/small, from its last checkpoint if it was killed, and judges it.

    Args:
        folder: where its checkpoints are.
        setting: whose data is used.
        config: name of the configuration.
        seed: of weights and batches.
        steps: of training.
        options: of the command line, beside those of the configuration.
        test: judge the test text, too, once after the last step.
        judge: what else to tell of the model.

    Returns:
        nats and accuracy of the validation text, nats of the test text, parameters, and CPU seconds of
        what was run here; of training that diverged only that.
    """
    text = ["--data.source", "pydoc", "--data.characters", "plain"]
    if setting.data is not None:
        text = ["--data.source", "dir", "--data.path", str(setting.data / "ptb")]
    elif setting.level == "full":
        text = []  # the configuration's own, of the hub
    given = ["fit", "--config", str(_CONFIGS / f"{config}.yaml"), *text, "--seed_everything", str(seed)]
    given += ["--trainer.max_steps", str(steps), "--trainer.val_check_interval", str(steps)]
    given += ["--trainer.default_root_dir", str(folder), "--trainer.enable_progress_bar", "false"]
    given += [word for name in _QUIET for word in (f"--{name}.enabled", "false")]
    kept = sorted(folder.glob("*/checkpoints/last.ckpt"), key=lambda path: path.stat().st_mtime)
    given += ["--ckpt_path", str(kept[-1])] if kept else []
    begin = time.process_time()
    row: Row = {"seed": seed, "steps": steps}
    try:
        run = cli.run([*given, *options])
    except NotFinite:
        return row | {"diverged": True}
    found = run.trainer.callback_metrics
    row |= {"parameters": count(run.model), **(judge(run.model.model) if judge else {})}
    row |= {"nats": float(found["val/nats"]), "accuracy": float(found["val/accuracy"])}
    if test:
        told = run.trainer.test(run.model, datamodule=run.datamodule, verbose=False)
        row["test_nats"] = told[0]["test/nats"]
    return row | {"cpu_seconds": round(time.process_time() - begin, 1)}


@dataclass(frozen=True)
class Spread:
    """Mean, smallest and largest of some seeds."""

    mean: float
    low: float
    high: float

    @property
    def text(self) -> str:
        """As a cell of a table."""
        if self.low == self.high:
            return f"{self.mean:.3f}"
        return f"{self.mean:.3f} ({self.low:.3f} to {self.high:.3f})"


def mean_over_seeds(rows: list[Row], column: str, variant: str) -> dict[int, Spread]:
    """A column of one variant by number of layers; NaN where a seed is."""
    found: dict[int, list[float]] = defaultdict(list)
    for row in rows:
        if row["variant"] == variant:
            found[row["layers"]].append(row.get(column, math.nan))
    return {n: Spread(statistics.mean(v), min(v), max(v)) for n, v in sorted(found.items())}
