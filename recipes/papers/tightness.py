"""Kim et al. 2021, figure 1: Bounds against attacks.

the l_inf bound stays within a constant of what ascent finds; the l2 bound is loose.

Bounds of one head, D = 1 as published or 4, and the largest gains found by ascent of all tokens, or of
two clusters and a token.
"""

import math
from pathlib import Path

import torch
from torch import Tensor

import lipformer as lf
from lipformer.functional import l2_gain, lambert_w0, row_spread
from lipformer.layers.attention.bound import linf_bound_lean, linf_bound_token
from recipes.papers.experiment import Finding, Panel, Part, Row, Rows, Setting, curves

NORMS = {"l2": 1, "token": 1, "linf": 1, "linf, D = 4": 4}
TOLD = (64, 1024, 4096)  # tokens
LINES = {name: name for name in ("published", "certificate", "clusters", "ascent")}
PANELS = [Panel("tokens", LINES, "", {"norm": n}, "xy", "tokens", "gain of one head", n) for n in NORMS]


def attack(sizes: list[int], start: Tensor, norm: str, steps: int, starts: int) -> float:
    """The largest gain found for clusters of these sizes, which move as one each.

    In the l2 norm a cluster of m tokens counts as one token that is sqrt(m) times as long.
    """
    many = torch.tensor(sizes).double()
    length = many.sqrt()[:, None] if norm == "l2" else torch.ones_like(many)[:, None]

    def attend(x: Tensor) -> Tensor:
        z = x / length
        logits = many.log() - (z[..., :, None, :] - z[..., None, :, :]).square().sum(-1)
        return length * (logits.softmax(-1) @ z)

    start, draw = length * start, torch.Generator().manual_seed(sum(sizes))
    found = lf.attack_lipschitz(attend, start, norm=norm, steps=steps, restarts=starts, generator=draw)
    return found.value


def attack_clusters(n: int, norm: str, dim: int, steps: int, starts: int) -> float:
    """For one token and two clusters, from where they gain most in theory (Theorem E's first)."""
    side = math.sqrt(1.5 + lambert_w0((n - 1) * math.exp(-1.5)))
    start = torch.tensor([[side], [-side], [0.0]]).double() * torch.eye(1, dim)
    sizes = [size for size in ((n - 1) // 2, n // 2, 1) if size]
    return attack(sizes, start[-len(sizes) :], norm, steps, starts)


def measure(n: int, steps: int, starts: int, longest: int, folder: Path) -> Rows:
    """Bounds and attacks of X -> P(X) X for one number of tokens."""
    for case, dim in NORMS.items():
        norm, row = case.split(",")[0], Row(norm=case, tokens=n)
        ours, eye = l2_gain(n, norm=norm.replace("linf", "token")), torch.eye(dim).double()[None]
        if norm == "l2":
            row["published"] = l2_gain(n, theorem="kim2021")
        elif norm == "linf":  # as the layer combines them, for one head of identity weights
            row["published"] = linf_bound_lean(eye, eye, eye.new_tensor([row_spread(n)])).item()
            ours = min(row["published"], linf_bound_token(eye, eye, eye.new_tensor([ours])).item())
        row["certificate"] = ours
        row["clusters"] = attack_clusters(n, norm, dim, steps, starts)
        if case in ("l2", "linf") and n <= longest:  # of one feature linf is the token norm
            start = torch.randn(n, 1, generator=torch.Generator().manual_seed(n)).double()
            row["ascent"] = attack([1] * n, start, norm, steps, starts)
        found = max(row["clusters"], row.get("ascent", 0.0))
        yield row | {f"{k} / found": row[k] / found for k in ("published", "certificate") if k in row}


def parts(setting: Setting) -> list[Part]:
    tokens = (2, 64, 4096) if setting.level == "smoke" else [2**k for k in range(1, 13)]
    options = setting.pick((2, 2, 2), (20, 5, 64), (50, 16, 512))  # steps, starts, longest ascent
    return [Part(f"{n} tokens", measure, (n, *options)) for n in tokens]


def judge(rows: list[Row]) -> Finding:
    def ratios(norm: str, bound: str = "certificate") -> str:
        found = curves(rows, "tokens", f"{bound} / found", "norm")[norm]
        return ", ".join(f"{found[n]:.3g}" for n in TOLD if n in found)

    over = curves(rows, "tokens", "published / found", "norm")
    loosest = {norm: max(found.values()) for norm, found in over.items()}
    exceeded = sum(row["certificate / found"] < 1.0 for row in rows)
    return Finding(
        not exceeded and loosest["linf"] < 2.0 < loosest["l2"],
        f"ours is {ratios('l2')} times what attacks find in l2 with 64, 1024, 4096 tokens (published "
        f"{ratios('l2', 'published')}), {ratios('token')} in token, {ratios('linf')} in linf",
        f"{exceeded} of {len(rows)} certificates were exceeded. With D = 4 ours is "
        f"{ratios('linf, D = 4')} times what attacks find in linf.",
    )
