"""Attention that looks like L2 attention breaks the certificate of the layer with the same weights.

So the certificate is no accident of the attack: each condition of docs/theory, section 1, is needed.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import pytest
import torch
from torch import Tensor

import lipformer as lf
from tests.oracles import (
    dense_jacobian,
    free_values_attention,
    own_key_masked_attention,
    positive_sign_attention,
    tied_attention,
    unsquared_attention,
    unsquared_free_values_attention,
    untied_attention,
)

N, D, HEAD = 6, 4, 2


def layer() -> lf.L2MultiheadAttention:
    """Two heads; the second one is silent, so that the first is one head of width d < D."""
    torch.manual_seed(1)
    made = lf.L2MultiheadAttention(
        D, 2, bias=False, batch_first=True, value_proj=False, dtype=torch.float64
    )
    with torch.no_grad():
        made.q_proj.weight.normal_()
        made.out_proj.weight.copy_(torch.eye(D))
        made.out_proj.weight[:, HEAD:] = 0.0
        made.log_temperature.zero_()
    return made


def weights() -> tuple[Tensor, Tensor]:
    """The first head's W_Q (D, d), and another matrix of the same norm for the untied form."""
    q = layer().q_proj.weight.detach()
    other = torch.linalg.qr(torch.randn(D, D, dtype=torch.float64)).Q @ q[:HEAD].T
    return q[:HEAD].T, other


def null_space_input(size: float) -> Tensor:
    """Tokens that differ by O(1) where W looks and by O(size) where it does not."""
    w, _ = weights()
    x = torch.randn(1, N, D, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    seen = torch.linalg.qr(w).Q
    inside = x @ seen @ seen.T
    return inside + size * (x - inside)


BROKEN: dict[str, Callable[..., Tensor]] = {
    "untied": lambda x, w, other: untied_attention(x, w, other),
    "no A_h": lambda x, w, other: free_values_attention(x, w),
    "own key masked": lambda x, w, other: own_key_masked_attention(x, w),
    "unsquared": lambda x, w, other: unsquared_free_values_attention(x, w),
    "sign not negated": lambda x, w, other: positive_sign_attention(x, w),
}


def attack(fn: Callable[[Tensor], Tensor], size: float) -> float:
    found = lf.attack_lipschitz(
        fn, null_space_input(size), steps=10, restarts=6, generator=torch.Generator().manual_seed(0)
    )
    return torch.linalg.matrix_norm(dense_jacobian(fn, found.input), 2).item()


def certificates() -> dict[str, float]:
    """The certificates that a user might rely on, none of them below the others' meaning."""
    anything = lf.L2MultiheadAttention(
        D, 2, bias=False, batch_first=True, value_proj=False, any_mask=True, dtype=torch.float64
    )
    anything.load_state_dict(layer().state_dict())
    return {
        "any mask": lf.certify(anything, seq_len=N).bound,
        "plain": lf.certify(layer(), seq_len=N).bound,
    }


def test_the_layer_is_the_tied_form() -> None:
    w, _ = weights()
    x = null_space_input(10.0)
    out = layer()(x)[0][..., :HEAD]
    torch.testing.assert_close(out, tied_attention(x, w), rtol=0, atol=1e-10)


@pytest.mark.parametrize("name", BROKEN)
def test_broken_forms_exceed_the_certificate(name: str) -> None:
    """The gain goes up with the size of the input, past any certificate."""
    w, other = weights()
    bound = max(certificates().values())
    values = [attack(lambda x: BROKEN[name](x, w, other), size) for size in (10.0, 1e2, 1e3, 1e4)]
    assert all(after > 3 * before for before, after in pairwise(values))
    assert values[1] > bound
    assert values[2] > 10 * bound
    assert values[3] > 10 * values[1]


@pytest.mark.parametrize("fn", [tied_attention, unsquared_attention])
def test_sound_forms_keep_below_their_constant(fn: Callable[..., Tensor]) -> None:
    """The same search on the same inputs: so the growth above is due to the defects.

    The unsquared distance alone is no defect: with tied weights and values linear in the keys,
    sum_j P_ij |y_i - y_j| <= W0((n-1)/e) takes the place of the squared distances.
    """
    w, _ = weights()
    m = lf.functional.row_spread(N)
    limit = torch.linalg.matrix_norm(w, 2).item() * (N**0.25 + 2 * m + 2 * m**0.5 * (N / 2) ** 0.25)
    for size in (1.0, 10.0, 1e2, 1e3):
        assert 1 <= attack(lambda x: fn(x, w), size) <= limit


@pytest.mark.parametrize("size", [1.0, 1e2, 1e4])
def test_the_layer_itself_does_not(size: float) -> None:
    """The same attack, from the same inputs, with the same weights."""
    module = layer()
    value = attack(lambda x: module(x, need_weights=False)[0], size)
    assert 1.0 <= value <= certificates()["plain"] * (1 + 1e-9)
