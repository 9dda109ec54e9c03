"""Forces between pairs of tokens along their difference: maps that turn and permute with their input."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from lipformer.certificate import Ask, Bound, register_bound
from lipformer.layers.layer import Layer
from lipformer.layers.layout import padding


def radial_profile(s: Tensor, slopes: Tensor, reach: float) -> tuple[Tensor, Tensor]:
    r"""G(s) / s and G'(s) of a profile with G(0) = 0 whose slope runs through given values.

    G' is linear between the K knots :math:`k\,\text{reach}/(K-1)` and constant beyond the last.

    Args:
        s: distances, positive, any shape.
        slopes: G' at the knots (K,).
        reach: the last knot.
    """
    step = reach / (len(slopes) - 1)
    rises = 0.5 * step * (slopes[1:] + slopes[:-1])
    heights = torch.cat([rises.new_zeros(1), rises.cumsum(0)])  # G at the knots
    place = s / step
    # NaN has no knot: it stays NaN by its part.
    knot = place.detach().nan_to_num(0.0).floor().clamp(max=len(slopes) - 1).long()
    part = place - knot
    left, right = slopes[knot], slopes[(knot + 1).clamp(max=len(slopes) - 1)]
    slope = torch.lerp(left, right, part)  # beyond the last knot both are its slope
    height = heights[knot] + 0.5 * step * part * (left + slope)
    return height / s, slope


class PairRadial(Layer):
    r""":math:`f_i(x) = \frac1n \sum_j \psi(x_i - x_j)`, :math:`\psi(r) = G(|r|)\, r/|r|`, of constant 1.

    G is learned, with G(0) = 0 and :math:`|G'| \le 1`. f keeps still where all tokens move together, its
    outputs sum to zero, and it turns, reflects and permutes with its input: what a density of particles
    needs. Its Jacobian is symmetric. Proof of the constant, in the l2 norm (docs/theory, section 4):
    :math:`\psi` is odd and of constant 1, its Jacobian having the eigenvalues G'(s) along r and
    :math:`G(s)/s` across. With B the differences of all pairs i < j, :math:`f = \frac1n B^\top \psi(Bx)`
    and :math:`\|B\|^2 = n`. G(s) = s attains it.

    Args:
        knots: K, where the slope of G is learned; it is linear between them.
        reach: distance of the last knot, beyond which the slope is constant.

    Example:
        >>> import lipformer as lf
        >>> layer = PairRadial()
        >>> x = torch.randn(2, 5, 3)
        >>> bool(layer(x).sum(1).abs().max() < 1e-5), lf.certify(layer).bound
        (True, 1.0)
    """

    batch_first = True

    def __init__(self, knots: int = 24, reach: float = 5.0) -> None:
        super().__init__()
        if not isinstance(knots, int) or knots < 2:
            raise ValueError(f"knots must be an integer >= 2, got {knots!r}")
        if not 0.0 < reach < float("inf"):
            raise ValueError(f"reach must be positive and finite, got {reach!r}")
        self.reach = float(reach)
        self.raw_slopes = nn.Parameter(torch.empty(knots))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Small random slopes."""
        nn.init.normal_(self.raw_slopes, std=0.1)

    @property
    def slopes(self) -> Tensor:
        """G' at the knots (K,), between -1 and 1."""
        return self.raw_slopes.tanh()

    def forward(self, x: Tensor, key_padding_mask: Tensor | None = None) -> Tensor:
        """(B, n, d), and (B, n), True at padded tokens -> (B, n, d), zero at padded tokens."""
        difference, _, weight, ratio, _ = self._pairs(x, key_padding_mask)
        return ((weight * ratio).unsqueeze(-1) * difference).sum(2).to(x.dtype)

    def forward_and_jacobian(
        self, x: Tensor, key_padding_mask: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        r"""f(x) (B, n, d) and its Jacobian (B, n d, n d) in closed form.

        For :math:`i \ne j` the block is :math:`-A_{ij}/n` with
        :math:`A_{ij} = G' u u^\top + \frac{G}{s} (I - u u^\top)`, :math:`r = s u`; the rows of blocks
        sum to zero.
        """
        difference, distance, weight, ratio, slope = self._pairs(x, key_padding_mask)
        across = weight * ratio
        unit = difference / distance.unsqueeze(-1)
        along = (weight * slope - across)[..., None, None] * unit.unsqueeze(-1) * unit.unsqueeze(-2)
        one = torch.eye(x.shape[-1], dtype=unit.dtype, device=x.device)
        pairs = (along + across[..., None, None] * one).transpose(2, 3)  # B i d j d
        # A pair of a token with itself is in the sum and in the difference.
        own = torch.diag_embed(pairs.sum(3).movedim(1, -1)).permute(0, 3, 1, 4, 2)
        jacobian = (own - pairs).flatten(3).flatten(1, 2)
        return (across.unsqueeze(-1) * difference).sum(2).to(x.dtype), jacobian.to(x.dtype)

    def _pairs(self, x: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """x_i - x_j (B, n, n, d), and (B, n, n) each: their lengths, weights 1/n, G(s) / s, G'(s)."""
        if x.ndim != 3:
            raise ValueError(f"x must have shape (B, n, d), got {tuple(x.shape)}")
        hidden = padding(mask, x)
        x = x.to(torch.promote_types(x.dtype, torch.float32))  # float16 has no squares above 256
        if hidden is None:
            weight = x.new_full((1, 1, 1), 1.0 / max(1, x.shape[1]))
        else:
            x = x.masked_fill(hidden.unsqueeze(-1), 0.0)
            kept = (~hidden).to(x.dtype)
            weight = kept.unsqueeze(1) * kept.unsqueeze(2)
            weight = weight / kept.sum(-1).clamp_min(1.0)[:, None, None]
        difference = x.unsqueeze(2) - x.unsqueeze(1)
        # Away from zero, where the root has no derivative: there G(s) / s is the first slope.
        least = torch.finfo(x.dtype).tiny ** 0.5
        distance = difference.square().sum(-1).clamp_min(least).sqrt()
        ratio, slope = radial_profile(distance, self.slopes.to(x.dtype), self.reach)
        return difference, distance, weight, ratio, slope

    def extra_repr(self) -> str:
        return f"knots={len(self.raw_slopes)}, reach={self.reach}"


@register_bound(PairRadial)
def _(module: PairRadial, ask: Ask) -> Bound:
    ask.only("l2")
    return Bound(1.0, "radial maps of differences, |G'| <= 1")
