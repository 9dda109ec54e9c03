"""Character models as parts of experiments, trained by what ``python -m training fit`` runs."""

import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from recipes.papers.experiment import Part, Row, Rows, Setting
from recipes.report import count
from training import cli
from training.errors import NotFinite

_RECIPES = Path(__file__).parents[1]
_QUIET = {f"{name}.enabled": "false" for name in ("certificate", "inversion", "text", "report")}
_QUIET |= {"trainer.enable_progress_bar": "false"}
_TINY = {"model.config.dim": 16, "data.block": 16, "trainer.limit_val_batches": 1}
_TINY |= {"trainer.limit_test_batches": 1}
Extra = Callable[[Any], Row]  # of a finished run: what to add to its row


def trained(
    setting: Setting, config: str, seed: int, options: Row, folder: Path, extra: Extra | None
) -> Row:
    """Trains the model of a file of recipes/, from its last checkpoint if it was killed.

    Options, the steps among them, are added to its configuration. The row has nats and accuracy of the
    validation text, extra columns, and CPU seconds of what was run here; or that it diverged.
    """
    text: Row = {} if setting.level == "full" else {"data.source": "pydoc", "data.characters": "plain"}
    if setting.data is not None:  # else at full size the configuration's own, of the hub
        text = {"data.source": "dir", "data.path": setting.data / "ptb"}
    given = {"config": _RECIPES / f"{config}.yaml", **text, "seed_everything": seed, **_QUIET}
    steps = options["trainer.max_steps"]
    given |= {"trainer.val_check_interval": steps + 1, "trainer.default_root_dir": folder}
    kept = sorted(folder.glob("*/checkpoints/last.ckpt"), key=lambda path: path.stat().st_mtime)
    given |= {"ckpt_path": kept[-1]} if kept else {}
    given |= options | (_TINY if setting.level == "smoke" else {})
    begin, row = time.process_time(), Row(seed=seed, steps=steps)
    try:
        run = cli.run(["fit", *(f"--{name}={value}" for name, value in given.items())])
        told = run.trainer.validate(run.model, datamodule=run.datamodule, verbose=False)[0]
    except NotFinite:
        return row | {"diverged": True}
    found = {name: told[f"val/{name}"] for name in ("nats", "accuracy")}
    row |= {"parameters": count(run.model), **found, **(extra(run) if extra else {})}
    return row | {"cpu_seconds": round(time.process_time() - begin, 1)}


def runs(setting: Setting, cases: Iterable[Any], options: Row, extra: Extra | None = None) -> list[Part]:
    """A part for each seed, depth and variant (NAME or NAME COEFF) of ptb/small, with a token shift."""

    def work(seed: int, layers: int, variant: str, folder: Path) -> Rows:
        deep = {"model.config.num_layers": layers, "model.config.token_shift": "true", **options}
        config, _, coeff = variant.partition(" ")
        deep |= {"model.config.coeff": coeff} if coeff else {}
        found = trained(setting, f"ptb/small/{config}", seed, deep, folder, extra)
        yield {"variant": variant, "layers": layers, **found}

    return [Part(f"{variant} {n} {seed}", work, (seed, n, variant)) for seed, n, variant in cases]
