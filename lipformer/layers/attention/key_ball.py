r"""Keys inside a ball, for Theorem F: each head's keys are bounded by a radius R.

Either projected on the ball, :math:`y \min(1, R/\|y\|)`, or shrunk smoothly,
:math:`f y = y/\sqrt{1 + \|y\|^2/R^2}`, which a density wants. Both are 1-Lipschitz: the second has the
derivative :math:`f (I - f^2 y y^\top/R^2)`, of eigenvalues f and :math:`f^3`.
"""

from __future__ import annotations

import functools
import itertools
import math

import torch
from torch import Tensor

from lipformer.functional.gain.ball import FIRST, KNOTS, STEP, Rows, ball_knots
from lipformer.functional.tracing import tracing


def _total(y: Tensor, curb: Tensor, smooth: bool) -> tuple[Tensor, Tensor]:
    """y in at least float32, and 1 + q or max(1, q) of its squared length q in units of R^2, (*, 1)."""
    wide = y.to(torch.promote_types(y.dtype, torch.float32))
    length = wide.square().sum(-1, keepdim=True) * curb
    return wide, 1.0 + length if smooth else length.clamp_min(1.0)


def bounded(y: Tensor, curb: Tensor, smooth: bool) -> Tensor:
    """Keys (*, H, d) inside their balls; ``curb`` is R^-2, broadcastable to (*, H, 1), in >= float32."""
    wide, total = _total(y, curb, smooth)
    return (wide * total.rsqrt()).to(y.dtype)


def push_bounded(y: Tensor, curb: Tensor, smooth: bool, tangents: Tensor) -> Tensor:
    """The derivative of :func:`bounded` at y (*, H, d) times tangents (R, *, H, d)."""
    wide, total = _total(y, curb, smooth)
    share = curb / total if smooth else curb / total * (total > 1.0)
    along = (wide * tangents).sum(-1, keepdim=True)
    return (total.rsqrt() * (tangents - share * along * wide)).to(tangents.dtype)


Head = tuple[tuple[tuple[str, float, str, float], ...], float]
"""The `Rows` that a head may have, as tuples for torch.compile, and its gain without a ball."""


@functools.lru_cache(maxsize=256)
def _lines(heads: tuple[Head, ...], factor: float) -> tuple[list[list[float]], list[list[float]]]:
    """a and b (H, KNOTS + 1): the gain is at most a + b x in cell 0 (x < 0), ..., KNOTS (beyond all)."""
    constant, slope = [], []
    for rows, most in heads:
        value = [
            factor * max(each) for each in zip(*(ball_knots(Rows(*row)) for row in rows), strict=True)
        ]
        rise = [after - before for before, after in itertools.pairwise(value)]
        if math.inf in value:
            value, rise = [most] * KNOTS, [0.0] * (KNOTS - 1)
        cells = [before - k * b for k, (before, b) in enumerate(zip(value, rise, strict=False))]
        constant.append([value[0], *cells, most])
        slope.append([0.0, *rise, 0.0])
    return constant, slope


_held: dict[tuple[object, ...], Tensor] = {}


def _line_tensor(heads: tuple[Head, ...], factor: float, device: str) -> Tensor:
    """(2, H, KNOTS + 1) in float64 on a device, copied there once; a constant for torch.compile."""
    key = heads, factor, device
    if tracing() or key not in _held:
        with torch.inference_mode(False):
            made = torch.tensor(_lines(heads, factor), dtype=torch.float64, device=device)
        if tracing() or type(made) is not Tensor:  # one of a transform's or of FakeTensorMode's own
            return made
        if len(_held) == 256:
            _held.clear()
        _held[key] = made
    return _held[key]


_line_tensor._dynamo_marked_constant = True  # type: ignore[attr-defined]


def ball_gains(log_radius: Tensor, heads: tuple[Head, ...], factor: float, margin: float) -> Tensor:
    r"""The gain of each head (H,) on its ball, with the gradient for the radius, never below Theorem F.

    Linear in ln r between the knots of `ball_knots`, constant below them, and at most the gain without
    a radius.

    Args:
        log_radius: logarithm of that of the keys at temperature 1/2, :math:`\ln \sqrt 2\, r` (H,).
        heads: one entry for each head, or one for all.
        factor: what the gains are multiplied by.
        margin: what the radii are multiplied by, above the rounding of keys.
    """
    lines = _line_tensor(heads, factor, str(log_radius.device))
    # The radius is its exponential, within a few units of float32.
    offset = math.log(margin * (1.0 + 1e-6) / math.sqrt(2.0)) - FIRST
    x = (log_radius.double() + offset) / STEP
    # A radius that is not a number gives such a gain, not an index that no cell has.
    cell = (x.detach().floor() + 1.0).clamp(0, KNOTS).nan_to_num(0.0).long()
    a, b = lines.expand(2, len(x), -1).gather(2, cell[None, :, None].expand(2, -1, 1)).squeeze(2)
    most = lines[0, :, -1]
    return torch.minimum(torch.addcmul(a, b, x), most)
