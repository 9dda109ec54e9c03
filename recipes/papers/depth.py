"""Kim et al. 2021, figure 4: Depth at a fixed learning rate.

dot-product attention fails to train beyond 10 layers, L2 attention trains to 18. Here: one of ours
trains to 32.

Nats per character of the validation text against depth, without warm-up; mean and range over seeds.
Missing points are not a number.
"""

from recipes.papers.characters import runs
from recipes.papers.experiment import Finding, Panel, Part, Row, Setting, curves, pivot

VARIANTS, GOAL = ("dot_product", "l2", "contractive", "contractive 0.2"), 32
DEEP = (2, 4, 6, 8, 10, 12, 14, 16, 18, 24, 32, 48)
SEVERAL_SEEDS = 10  # layers up to which there are three seeds
MARGIN = 0.3  # nats above the model of two layers from which a run counts as failed
PANELS = [Panel("layers", "nats", "variant", {}, "", "layers", "validation text, nats per character")]


def parts(setting: Setting) -> list[Part]:
    options: Row = {"model.config.norm_place": "post", "model.config.dim": setting.pick(16, 64, 64)}
    options |= {"data.block": 64, "data.batch_size": 16, "model.lr": 0.001, "model.warmup": 0}
    options |= {"model.schedule": "constant", "trainer.limit_val_batches": setting.pick(1, 50, 50)}
    seeds, deep, steps = setting.pick((1, (2,), 2), (1, (2, 6, 12), 100), (3, DEEP, 400))
    sizes = [(s, n) for s in range(seeds) for n in deep if s == 0 or n <= SEVERAL_SEEDS]
    return runs(setting, [(s, n, v) for s, n in sizes for v in VARIANTS], steps, options)


def failures(rows: list[Row]) -> dict[str, list[int]]:
    """By variant, numbers of layers at which a seed was not a number or far above the shallowest."""
    return {
        variant: [n for n, seeds in nats.items() if not seeds.high <= nats[min(nats)] + MARGIN]
        for variant, nats in curves(rows, "layers", "nats", "variant").items()
    }


def table(rows: list[Row]) -> list[Row]:
    failed = {variant: ", ".join(map(str, bad)) or "none" for variant, bad in failures(rows).items()}
    lines = pivot(rows, "variant", "layers", "nats")
    return [line | {"failed": failed[line["variant"]]} for line in lines]


def judge(rows: list[Row]) -> Finding:
    deepest, failed = max(row["layers"] for row in rows), failures(rows)
    told = [
        f"{v} fails at {', '.join(map(str, bad))}" if bad else f"{v} trains to {deepest}"
        for v, bad in failed.items()
    ]
    return Finding(
        any(min(failed[v], default=deepest + 1) > GOAL for v in VARIANTS[1:])
        if deepest >= GOAL
        else None,
        f"{'; '.join(told)} layers",
        ("" if failed["dot_product"] else "Dot-product attention does not fail here. ")
        + "D = 64, AdamW at a rate of 0.001 from the first step on, post-norm, a token shift in all "
        f"variants, {rows[0]['steps']} steps of 16 x 64 characters; three seeds to {SEVERAL_SEEDS} "
        'layers, one beyond. Attention of "contractive" is divided to a constant of 1, of '
        '"contractive 0.2" to one of 0.2, so that each block stays near the identity. Failed: not a '
        f"number, or some seed {MARGIN} nats above the same variant with 2 layers.",
    )
