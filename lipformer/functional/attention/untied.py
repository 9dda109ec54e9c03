r"""L2 attention with queries, keys and values of their own, as operands of dot-product attention."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def untied_operands(
    q: Tensor, k: Tensor, v: Tensor, scale: float | Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    r""":math:`[2t\,q, 1], [k, -t\|k\|^2], [v, 0]`, whose plain dot products are L2 logits.

    .. math:: 2t\,q_i \cdot k_j - t\|k_j\|^2 = -t\|q_i - k_j\|^2 + t\|q_i\|^2

    The last term is the same in each row, so that weights are those of :math:`-t\|q_i - k_j\|^2`.
    Untied L2 attention has no finite Lipschitz constant (Kim, Papamakarios, Mnih 2021): for one, query
    and key must be tied and the values linear in the keys (docs/theory, section 1).

    The norm takes two columns, the second with the first's rounding error: half precision alone would
    lose it. Fused kernels want one width for all three, a multiple of 8.

    Args:
        q: (*, H, T, d).
        k: (*, K, S, d), for K = H heads or fewer, which the kernel shares.
        v: (*, K, S, e).
        scale: temperature :math:`t`, a float or a tensor (H, 1, 1).

    Returns:
        Query, key and value of one width (of another for values wider than queries), for a kernel with
        scale 1; the first e columns of its output are attention's.
    """
    d = q.shape[-1]
    wide = k.to(torch.promote_types(k.dtype, torch.float32))
    norm = -scale * wide.square().sum(-1, keepdim=True)
    high = norm.to(k.dtype)
    low = (norm.detach() - high.detach().to(norm.dtype)).to(k.dtype)
    filler = -(d + 2) % 8
    ones = torch.ones_like(q[..., :1])
    query = torch.cat([(2.0 * scale * q).to(q.dtype), ones, ones], dim=-1)
    key = torch.cat([k, high, low], dim=-1)
    rest = max(0, d + 2 + filler - v.shape[-1])
    return F.pad(query, (0, filler)), F.pad(key, (0, filler)), F.pad(v, (0, rest))
