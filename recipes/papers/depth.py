"""Kim et al. 2021, figure 4: Depth at a fixed learning rate.

dot-product attention fails to train beyond 10 layers, L2 attention trains to 18 (shown only). Here: one
of ours trains to 32, dot-product attention not to 12 (judged).

Nats per character of the validation text against depth, without warm-up; mean and range over seeds.
Missing points are not a number.
"""

from recipes.papers.characters import runs
from recipes.papers.experiment import Finding, Panel, Part, Row, Setting, curves

GOAL, OURS = 32, ("contractive", "contractive 0.2")
VARIANTS, DEEP = ("dot_product", "l2", *OURS), (2, 4, 6, 8, 10, 12, 14, 16, 18, 24, 32, 48)
SEVERAL_SEEDS, MARGIN = 10, 0.3  # layers with three seeds; nats above two layers' where runs failed
PANELS = [Panel("layers", "nats", "variant", {}, "", "layers", "validation text, nats per character")]
TABLES = PANELS


def parts(setting: Setting) -> list[Part]:
    options: Row = {"model.config.norm_place": "post", "model.config.dim": 64, "model.lr": 0.001}
    options |= {"data.block": 64, "data.batch_size": 16, "trainer.limit_val_batches": 50}
    seeds, deep, steps = setting.pick((1, (2,), 2), (1, (2, 6, 12), 100), (3, DEEP, 400))
    options |= {"model.schedule": "constant", "model.warmup": 0, "trainer.max_steps": steps}
    sizes = [(s, n) for s in range(seeds) for n in deep if s == 0 or n <= SEVERAL_SEEDS]
    return runs(setting, [(s, n, v) for s, n in sizes for v in VARIANTS], options)


def judge(rows: list[Row]) -> Finding:
    deepest, first = max(row["layers"] for row in rows), Row()
    for variant, nats in curves(rows, "layers", "nats", "variant").items():
        failed = [n for n, seeds in nats.items() if not seeds.high <= nats[min(nats)] + MARGIN]
        first[variant] = min(failed, default=deepest + 1)
    ends = [f"first fails at {n}" if n <= deepest else f"trains to {n - 1}" for n in first.values()]
    told = [f"{variant} {end}" for variant, end in zip(first, ends, strict=True)]
    return Finding(
        first[VARIANTS[0]] <= 12 and max(first[v] for v in OURS) > GOAL if deepest >= GOAL else None,
        f"{'; '.join(told)} layers",
        f"Failed: not a number, or some seed {MARGIN} nats above the same variant with 2 layers. AdamW "
        "at a rate of 0.001 from the first step on, D = 64, post-norm, a token shift in all variants, "
        f"{rows[0]['steps']} steps of 16 x 64 characters; three seeds to {SEVERAL_SEEDS} layers, one "
        'beyond. Attention is divided to a constant of 1 in "contractive", of 0.2 in "contractive 0.2".',
    )
