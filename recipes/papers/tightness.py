"""Kim et al. 2021, figure 1: Bounds against attacks.

the l_inf bound stays within a constant of what ascent finds; the l2 bound is loose.

Bounds, and the largest gains found by ascent from random tokens and for two clusters.
"""

import math
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

import lipformer as lf
from lipformer.functional import l2_gain, lambert_w0, row_spread
from lipformer.layers.attention.bound import linf_bound_lean
from recipes.papers.experiment import Finding, Panel, Part, Row, Rows, Setting, curves

NORMS = {"l2": 1, "token": 1, "linf": 1, "linf, D = 4": 4}
TOLD = (64, 1024, 4096)  # tokens
LINES = {name: name for name in ("published", "certificate", "clusters", "ascent")}
PANELS = [Panel("tokens", LINES, "", {"norm": n}, "xy", "tokens", "gain of one head", n) for n in NORMS]


def attack_clusters(n: int, norm: str, dim: int, steps: int, starts: int) -> float:
    """The largest gain found for one token and two clusters, which move as one each (Theorem E's first).

    In the l2 norm a cluster of m tokens counts as one token that is sqrt(m) times as long.
    """
    many = torch.tensor([size for size in ((n - 1) // 2, n // 2, 1) if size]).double()
    length = many.sqrt()[:, None] if norm == "l2" else torch.ones_like(many)[:, None]

    def attend(x: Tensor) -> Tensor:
        z = x / length
        logits = many.log() - (z[..., :, None, :] - z[..., None, :, :]).square().sum(-1)
        return length * (logits.softmax(-1) @ z)

    side = math.sqrt(1.5 + lambert_w0((n - 1) * math.exp(-1.5)))
    start = length * F.pad(torch.tensor([[side], [-side], [0.0]])[-len(many) :].double(), (0, dim - 1))
    draw = torch.Generator().manual_seed(n)
    found = lf.attack_lipschitz(attend, start, norm=norm, steps=steps, restarts=starts, generator=draw)
    return found.value


def jacobian(z: Tensor) -> Tensor:
    """dg_i/dz_j of L2 attention (docs/theory, (3)) for tokens of one feature, (S, N) -> (S, N, N)."""
    offset = z[:, :, None] - z[:, None, :]
    p = (-offset.square()).softmax(-1)
    centred = z[:, None, :] - p @ z[:, :, None]
    return p * (1 + 2 * centred * offset) + torch.diag_embed(2 * (p * centred.square()).sum(-1))


def ascend(n: int, norm: str, steps: int, starts: int) -> float:
    """The largest gain that Adam finds from tokens uniform in [-c, c], c uniform in [0, 10]."""
    draw = partial(torch.rand, generator=torch.Generator().manual_seed(n), dtype=torch.float64)
    best = 0.0
    for z in (10 * draw(starts, 1) * (2 * draw(starts, n) - 1)).split(max(1, 2**20 // n**2)):
        v, optimiser = draw(*z.shape, 1), torch.optim.Adam([z.requires_grad_()], lr=0.1)
        for _ in range(steps):
            j = jacobian(z)
            v = F.normalize(j.detach().mT @ (j.detach() @ v), dim=1)  # a power step
            gain = (j @ v).norm(dim=(1, 2)) if norm == "l2" else j.abs().sum(-1).amax(-1)
            best = max(best, gain.max().item())
            optimiser.zero_grad()
            (-gain.sum()).backward()
            optimiser.step()
    return best


def measure(n: int, steps: int, starts: int, longest: int, folder: Path) -> Rows:
    """Bounds and attacks of X -> P(X) X for one number of tokens."""
    for case, dim in NORMS.items():
        norm, row = case.split(",")[0], Row(norm=case, tokens=n)
        eye, spread = torch.eye(dim).double()[None], torch.tensor([row_spread(n)]).double()
        ours = linf_bound_lean(eye, eye, spread).item() if norm == "linf" else l2_gain(n, norm=norm)
        if norm != "token":  # in linf the published bound is ours, for one head of identity weights
            row["published"] = l2_gain(n, theorem="kim2021") if norm == "l2" else ours
        row["certificate"] = ours
        row["clusters"] = attack_clusters(n, norm, dim, steps // 4, starts // 3)
        if case in ("l2", "linf") and n <= longest:  # of one feature linf is the token norm
            row["ascent"] = ascend(n, norm, steps, starts)
        found = max(row["clusters"], row.get("ascent", 0.0))
        yield row | {f"{k} / found": row[k] / found for k in list(LINES)[:2] if k in row}


def parts(setting: Setting) -> list[Part]:
    tokens = (2, 64, 4096) if setting.level == "smoke" else [2**k for k in range(1, 13)]
    options = setting.pick((8, 6, 2), (80, 15, 64), (200, 50, 512))  # steps, starts, longest ascent
    cost = {n: 1 + n * n / 1e4 * (n <= options[2]) for n in tokens}
    return [Part(f"{n} tokens", measure, (n, *options), cost[n]) for n in tokens]


def table(rows: list[Row]) -> list[Row]:
    return [row for row in rows if row["tokens"] in (2, *TOLD)]


def judge(rows: list[Row]) -> Finding:
    def ratios(case: str, bound: str = "certificate") -> str:
        return ", ".join(f"{v:.3g}" for n, v in looseness[bound][case].items() if n in TOLD)

    looseness = {k: curves(rows, "tokens", f"{k} / found", "norm") for k in ("published", "certificate")}
    loosest = {case: max(found.values()) for case, found in looseness["published"].items()}
    counts = ", ".join(str(n) for n in looseness["published"]["l2"] if n in TOLD)
    passed = sum(row["certificate / found"] < 1.0 for row in rows)
    return Finding(
        not passed and loosest["linf"] < 2.0 < loosest["l2"],
        f"ours is {ratios('l2')} times what attacks find in l2 with {counts} tokens (published "
        f"{ratios('l2', 'published')}), {ratios('token')} in token, {ratios('linf')} in linf",
        f"One head, D = 1 as published; {passed} of {len(rows)} certificates were passed. In linf ours "
        f"is the published bound; with D = 4 it is {ratios('linf, D = 4')} times what attacks find.",
    )
