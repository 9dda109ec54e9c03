"""Theorem L for a layer of L2 attention: its heads' local gains where the global ones stand."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from lipformer.analysis.robustness.lofast import Modulus
from lipformer.analysis.robustness.theorem_l import head_terms, jacobian_bound, local_gain
from lipformer.certificate import Ask
from lipformer.certificate.bounds import bound_of
from lipformer.certificate.paths import Passage, Paths, behind, total
from lipformer.certificate.rules import kind_of
from lipformer.functional.rounding import FLOOR, ROUND_UP, UNIT, enlarge
from lipformer.functional.spectral.bound import norm_bound
from lipformer.functional.wide import plain
from lipformer.layers import L2MultiheadAttention
from lipformer.layers.attention.bound import (
    effective_weights,
    head_gains,
    read_out_passage,
    rounded_passage,
)


def position_bias(layer: L2MultiheadAttention, n: int, device: torch.device) -> Tensor | None:
    """The bias of the logits of n tokens, -inf where masked, (N, N) or (H, N, N); None without any."""
    if not layer.causal:
        return None
    place = torch.arange(n, device=device)
    lag = (place[:, None] - place).double()
    hidden = lag < 0
    if layer.window is not None:
        hidden = hidden | (lag >= layer.window)
    bias = torch.zeros_like(lag)
    if layer.slopes is not None:
        bias = -layer.constants(layer.slopes, device)[:, None, None] * lag
    return bias.masked_fill(hidden, -torch.inf)


def l2_modulus(
    layer: L2MultiheadAttention, x: Tensor, head_scale: Tensor | None = None
) -> tuple[Modulus, Passage]:
    r"""How far the output of L2 attention can move, as a function (B,) to (B,) of how far x can.

    And the same of paths (docs/theory, section 4), for networks that follow them.

    Head h sees tokens :math:`Z_h = \sqrt{t_h} X W_h`, which move by at most
    :math:`\eta_h = \sqrt{t_h} \|W_h\| \epsilon`. Its local gain (`local_gain`) bounds
    :math:`\|\Phi(Z_h') - \Phi(Z_h)\| / \|Z_h' - Z_h\|` for all such steps, and so may stand where its
    global gain stands in the joint bound of the heads (docs/theory, sections 2 and 8).

    Args:
        layer: the attention, called without masks other than its own.
        x: (B, N, D), in float64.
        head_scale: factors of the heads' outputs, (H,), default 1.
    """
    ask = Ask("l2", x.shape[-2], kind=kind_of(layer), alone=True, dims=x.ndim)
    bound_of(layer, ask)  # refuses what has no global bound either: dropout, samples that mix
    n, dim = x.shape[-2:]
    heads = layer.num_heads
    y = plain(layer._keys(x, 0).y).double() / math.sqrt(2.0)
    z = y - y.mean(-2, keepdim=True)
    root = layer.root()
    key = layer.key_weight(root).double().unflatten(0, (heads, -1)) / math.sqrt(2.0)
    bias = layer.key_bias(root)
    # Entries of products of D-term sums are off by so much; turning and centring keep lengths.
    size = torch.linalg.matrix_norm(plain(x))[:, None] * torch.linalg.matrix_norm(key)
    if bias is not None:
        size = size + math.sqrt(n) * bias.double().unflatten(0, (heads, -1)).norm(dim=-1)
    error = 16.0 * (dim + n + 8) * UNIT * size
    # Rotary angles are rounded, so that turning is an isometry up to that.
    turned = 1.0 + torch.finfo(layer._stored().dtype).eps if layer.positions == "rotary" else 1.0
    lengths = norm_bound(key) * (turned * ROUND_UP)
    gains = head_gains(layer, ask, x.device)
    terms = head_terms(z, position_bias(layer, n, x.device))
    slope = jacobian_bound(terms)
    q, m = effective_weights(layer, head_scale)
    floor = FLOOR * ((q != 0).any() & (m != 0).any()).double()
    joint = _Joint(q, m)

    def around(delta: Tensor) -> Tensor:
        local = local_gain(terms, slope, lengths * delta[:, None], gains, error) * turned**2
        return torch.minimum(local, gains)

    def modulus(delta: Tensor) -> Tensor:
        bound = joint(around(delta)) * delta * ROUND_UP
        return torch.where(delta > 0, torch.maximum(bound, floor), delta)

    def passage(paths: Paths) -> Paths:
        keys = rounded_passage(q.flatten(0, 1))(paths)
        return read_out_passage(layer, m, around(total(paths)))(behind(total(keys)))

    return modulus, passage


class _Joint:
    r"""The constant of a layer with gains :math:`G_h` of its heads, for many gains (B, H) at once.

    The minimum of :math:`\|[a_1 W_1 .. a_H W_H]\| \|\mathrm{stack}_h (G_h M_h / a_h)\|` over a = 1,
    a = G and the balance of each head's norms, and of :math:`\sum_h G_h \|W_h\| \|M_h\|`: the same ways
    as for global gains.
    """

    def __init__(self, q: Tensor, m: Tensor) -> None:
        self.q, self.m = q, m
        self.own_q, self.own_m = norm_bound(q), norm_bound(m)
        self.norms = norm_bound(q.flatten(0, 1)), norm_bound(m.flatten(0, 1))

    def __call__(self, gains: Tensor) -> Tensor:
        """(B, H) -> (B,)."""

        def stacked(factors: Tensor, matrices: Tensor) -> Tensor:
            return norm_bound((factors[..., None, None] * matrices).flatten(-3, -2))

        tiny = torch.finfo(gains.dtype).tiny
        balance = (gains * self.own_m).clamp_min(tiny) / self.own_q.clamp_min(tiny)
        balance = balance.sqrt().clamp(1e-6, 1e6)
        ways = [(gains * self.own_q * self.own_m).sum(-1)]
        if gains.shape[-1] > 1:  # with one head the others are no smaller
            ways += [
                self.norms[0] * stacked(gains, self.m),
                stacked(gains, self.q) * self.norms[1],
                stacked(balance, self.q) * stacked(gains / balance, self.m),
            ]
        return enlarge(torch.stack(ways).amin(0))
