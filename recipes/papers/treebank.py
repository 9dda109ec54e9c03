"""Kim et al. 2021, figure 3: Penn Treebank characters by number of layers.

tied L2 attention is slightly worse than dot-product attention, the contractive form worse for each
number of layers and still improving with more (shown only). Here: with our certificate the contractive
form loses less than half of what it loses with the published one (judged).

Nats per character of the test text, which is read once, after each run; mean and range over seeds.
"""

from itertools import product
from typing import Any

from recipes.papers.characters import runs
from recipes.papers.experiment import Finding, Panel, Part, Row, Setting, curves

OURS, PUBLISHED, BASELINE = "contractive", "contractive_kim2021", "dot_product"
VARIANTS = (BASELINE, "l2_untied", "l2", OURS, "invertible", "lipschitz", PUBLISHED)
PANELS = [Panel("layers", "test_nats", "variant", {}, "", "layers", "test text, nats per character")]
TABLES = PANELS


def _tested(run: Any) -> Row:
    found = run.trainer.test(run.model, datamodule=run.datamodule, verbose=False)
    return {"test_nats": found[0]["test/nats"]}


def parts(setting: Setting) -> list[Part]:
    variants = setting.pick((BASELINE, OURS, PUBLISHED), VARIANTS, VARIANTS)
    seeds, layers, steps = setting.pick((1, 1, 2), (1, 2, 30), (3, 5, 800))
    options: Row = {"data.batch_size": 16, "model.config.dim": 64, "trainer.max_steps": steps}
    options |= {"trainer.limit_val_batches": 50}
    return runs(setting, product(range(seeds), range(1, 1 + layers), variants), options, _tested)


def judge(rows: list[Row]) -> Finding:
    deepest, steps = max(row["layers"] for row in rows), rows[0]["steps"]
    found = curves(rows, "layers", "test_nats", "variant")
    nats = {variant: points[deepest] for variant, points in found.items()}
    ours, published = (nats[variant] - nats[BASELINE] for variant in (OURS, PUBLISHED))
    told = ", ".join(f"{variant} {mean:.3f}" for variant, mean in nats.items())
    return Finding(
        published > 0.0 and ours < published / 2.0 if steps >= 100 else None,
        f"{told} nats per character of the test text with {deepest} layers",
        f"The contractive form is {ours:+.3f} nats from dot-product attention if divided by our bound, "
        f"{published:+.3f} by the published one. D = 64, a token shift, {steps} steps of 16 x 128. "
        "Published models have D = 512, no token shift, one temperature for all heads, and were trained "
        "to convergence: neither their nats nor their order need be these.",
    )
