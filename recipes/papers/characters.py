"""Character models as parts of experiments, trained by what ``python -m training fit`` runs."""

import time
from collections.abc import Callable, Iterable
from pathlib import Path

from lipformer.models import LanguageModel
from recipes.papers.experiment import Part, Row, Rows, Setting
from recipes.report import count
from training import cli
from training.errors import NotFinite

_CONFIGS = Path(__file__).parents[1] / "ptb" / "small"
_QUIET = {f"{name}.enabled": "false" for name in ("certificate", "inversion", "text", "report")}


def trained(
    setting: Setting,
    config: str,
    seed: int,
    steps: int,
    options: Row,
    folder: Path,
    test: bool = False,
    judge: Callable[[LanguageModel], Row] | None = None,
) -> Row:
    """Trains a model of recipes/ptb/small, from its last checkpoint if it was killed, and judges it.

    Options are added to its configuration. The row has nats and accuracy of the validation text, nats
    of the test text (if test: once, after the last step), what the judge tells of the model, and CPU
    seconds of what was run here; or that it diverged.
    """
    text: Row = {} if setting.level == "full" else {"data.source": "pydoc", "data.characters": "plain"}
    if setting.data is not None:  # else at full size the configuration's own, of the hub
        text = {"data.source": "dir", "data.path": setting.data / "ptb"}
    given = {"config": _CONFIGS / f"{config}.yaml", **text, "seed_everything": seed, **_QUIET}
    given |= {"trainer.max_steps": steps, "trainer.val_check_interval": steps}
    given |= {"trainer.default_root_dir": folder, "trainer.enable_progress_bar": "false"}
    kept = sorted(folder.glob("*/checkpoints/last.ckpt"), key=lambda path: path.stat().st_mtime)
    given |= {"ckpt_path": kept[-1]} if kept else {}
    begin, row = time.process_time(), Row(seed=seed, steps=steps)
    try:
        run = cli.run(["fit", *(f"--{name}={value}" for name, value in (given | options).items())])
    except NotFinite:
        return row | {"diverged": True}
    found = run.trainer.callback_metrics
    row |= {"parameters": count(run.model), **(judge(run.model.model) if judge else {})}
    row |= {"nats": float(found["val/nats"]), "accuracy": float(found["val/accuracy"])}
    if test:
        told = run.trainer.test(run.model, datamodule=run.datamodule, verbose=False)
        row["test_nats"] = told[0]["test/nats"]
    return row | {"cpu_seconds": round(time.process_time() - begin, 1)}


def runs(
    setting: Setting, cases: Iterable[tuple[int, int, str]], steps: int, options: Row, test: bool = False
) -> list[Part]:
    """A part for each seed, number of layers and variant (NAME or NAME COEFF); with a token shift."""

    def work(seed: int, layers: int, variant: str, folder: Path) -> Rows:
        deep = {"model.config.num_layers": layers, "model.config.token_shift": "true", **options}
        config, _, coeff = variant.partition(" ")
        deep |= {"model.config.coeff": coeff} if coeff else {}
        found = trained(setting, config, seed, steps, deep, folder, test)
        yield {"variant": variant, "layers": layers, **found}

    return [Part(f"{case[2]} {case[1]} {case[0]}", work, case, case[1]) for case in cases]
