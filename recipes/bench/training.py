"""Training speed of the language models: characters per second, and as a share of dot_product's.

    python -m recipes.bench.training [--seconds 120] [--out FILE.json]

Each small recipe of recipes/ptb takes whole training steps (forward, backward, clipping, AdamW) on
random symbols, in turn with all others. A share is the median over turns of the baseline's time by the
variant's, with quartiles. It takes two minutes on two CPU cores; leave the machine alone meanwhile.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import yaml

from lipformer.models import LanguageModel, LanguageModelConfig
from recipes.bench.timing import Samples, Step, environment, interleave
from recipes.output import parser, show, write_json
from training.optimisers import adamw

RECIPES = Path(__file__).resolve().parents[1] / "ptb" / "small"
BASELINE = "dot_product"
_VOCABULARY = 50


def config_of(recipe: Path, block: int, **changes: Any) -> LanguageModelConfig:
    """What the model of a recipe is made of, with some of its options changed."""
    options: dict[str, Any] = yaml.safe_load(recipe.read_text(encoding="utf-8"))["model"]["config"]
    return LanguageModelConfig(**{**options, **changes}, vocab_size=_VOCABULARY, max_len=block)


def model_of(recipe: Path, block: int, **changes: Any) -> LanguageModel:
    """The model that a recipe trains, with some of its options changed."""
    return LanguageModel(config_of(recipe, block, **changes))


def training_step(
    model: LanguageModel,
    batch: int,
    block: int,
    precision: AbstractContextManager[Any] = nullcontext(),  # noqa: B008 (it holds no state)
) -> Step:
    """A function that takes one whole training step.

    Args:
        model: on the device to train on.
        batch: number of sequences.
        block: tokens of each.
        precision: what the forward pass runs in, autocast for instance.
    """
    optimiser = adamw(model, 1e-4, 0.01, (0.9, 0.999))
    device = next(model.parameters()).device
    symbols = torch.randint(_VOCABULARY, (batch, block + 1)).to(device)
    model.initialize(symbols[:, :-1])
    model.train()

    def step() -> None:
        with precision:
            logits = model(symbols[:, :-1])
            loss = F.cross_entropy(logits.flatten(0, 1), symbols[:, 1:].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        optimiser.zero_grad()

    return step


def report(samples: Samples, symbols: int) -> dict[str, dict[str, float]]:
    """Characters per second and shares of the baseline's, by recipe."""
    found = {}
    for name in samples.seconds:
        ratio = samples.ratio(BASELINE, name)
        assert ratio is not None
        quartiles = {"share": ratio.median, "low": ratio.low, "high": ratio.high}
        found[name] = {"characters_per_second": symbols / samples.median(name), **quartiles}
    return found


def main(argv: list[str] | None = None) -> None:
    """Measures, prints the table and writes the JSON."""
    given = parser(__doc__)
    given.add_argument("--seconds", type=float, default=120.0, help="of measuring")
    given.add_argument("--batch", type=int, default=32, help="sequences")
    given.add_argument("--block", type=int, default=128, help="tokens of each")
    given.add_argument("--out", type=Path, default=Path("report/bench/training.json"), help="JSON file")
    options = given.parse_args(argv)
    torch.manual_seed(0)
    torch.set_flush_denormal(True)
    steps = {
        path.stem: training_step(model_of(path, options.block), options.batch, options.block)
        for path in sorted(RECIPES.glob("*.yaml"))
    }
    samples = interleave(steps, seconds=options.seconds, min_repetitions=2)
    rows = report(samples, options.batch * options.block)
    show(
        [
            {"recipe": name, **row}
            for name, row in sorted(rows.items(), key=lambda item: -item[1]["share"])
        ],
        f"characters per second, and their share of {BASELINE}'s with quartiles",
    )
    write_json(options.out, {"environment": environment(), "rows": rows})


if __name__ == "__main__":
    main()
