r"""L2 self-attention on torch's fused attention kernels."""

from __future__ import annotations

import contextlib
from contextlib import AbstractContextManager

import torch
import torch.autograd.forward_ad as forward_ad
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from lipformer.functional.attention.augment import Augmented, augment
from lipformer.functional.attention.checks import check_attention
from lipformer.functional.attention.reference import first_rows, reference_point, replace_first_rows
from lipformer.functional.attention.window import window_attention


def l2_attention(
    y: Tensor,
    *,
    is_causal: bool = False,
    window: int | None = None,
    slopes: Tensor | None = None,
    bias: Tensor | None = None,
    key_padding_mask: Tensor | None = None,
    scale: float | Tensor | None = None,
    dropout_p: float = 0.0,
) -> Tensor:
    r"""Computes L2 self-attention with query, key and value in one tensor.

    .. math:: g_i = \sum_j P_{ij} y_j, \qquad
        P_{ij} = \frac{\exp(-t \|y_i - y_j\|^2 + b_{ij})}{\sum_k \exp(-t \|y_i - y_k\|^2 + b_{ik})}

    Source: Kim, Papamakarios, Mnih 2021 in the lean form of docs/theory, section 1. The Lipschitz
    constant of this map is :func:`l2_gain`, for every temperature t.

    Runs on :func:`torch.nn.functional.scaled_dot_product_attention`; no N x N tensor is made unless
    ``bias`` is given. Fused kernels have neither forward mode nor double backward. Under torch.func's
    vmap, jvp and nested grad, and in forward-mode AD, this function switches to torch's MATH backend
    by itself; for a double backward through ``backward(create_graph=True)`` put the forward pass in
    ``with torch.nn.attention.sdpa_kernel(SDPBackend.MATH)``.

    Args:
        y: :math:`y` (*, H, N, d), query, key and value at once.
        is_causal: token i sees the keys j <= i.
        window: token i sees its ``window`` latest keys, itself included; needs ``is_causal``.
        slopes: causal ALiBi slopes :math:`s_h \ge 0` (H,): :math:`b_{ij} = -s_h (i - j)`.
        bias: :math:`b`, added to the logits, broadcastable to (*, H, N, N); -inf hides a key, but
            never a query's own one.
        key_padding_mask: (*, N), bool with True at padded tokens, or float with -inf there.
        scale: temperature :math:`t`, a float or a tensor (H, 1, 1); default :math:`d^{-1/2}`.
        dropout_p: probability of dropping an attention weight.

    Returns:
        :math:`g` (*, H, N, d) in y's dtype (under autocast in autocast's). Rows of padded tokens
        are zero.

    Example:
        >>> y = torch.tensor([[[0.0], [1.0], [1.0]]])
        >>> l2_attention(y, scale=1.0).squeeze()
        tensor([0.4239, 0.8446, 0.8446])
    """
    padding, bias = check_attention(y, is_causal, window, slopes, bias, scale, key_padding_mask)
    return _attend(
        y,
        None,
        is_causal=is_causal,
        window=window,
        slopes=slopes,
        bias=bias,
        padding=padding,
        scale=scale,
        dropout_p=dropout_p,
    )


def l2_attention_step(
    y: Tensor,
    queries: int,
    *,
    window: int | None = None,
    slopes: Tensor | None = None,
    key_padding_mask: Tensor | None = None,
    scale: float | Tensor | None = None,
) -> Tensor:
    """The last ``queries`` rows of causal :func:`l2_attention`, for step-by-step decoding.

    Args:
        y: cached and new tokens together (*, H, N, d).
        queries: how many of the last tokens are new.
        window: as in :func:`l2_attention`.
        slopes: as in :func:`l2_attention`.
        key_padding_mask: (*, N), for all tokens of y.
        scale: as in :func:`l2_attention`.

    Returns:
        (*, H, queries, d).
    """
    padding, _ = check_attention(y, True, window, slopes, None, scale, key_padding_mask)
    if not 1 <= queries <= y.shape[-2]:
        raise ValueError(f"queries must be in 1..N = {y.shape[-2]}, got {queries}")
    return _attend(
        y,
        queries,
        is_causal=True,
        window=window,
        slopes=slopes,
        bias=None,
        padding=padding,
        scale=scale,
        dropout_p=0.0,
    )


def _attend(
    y: Tensor,
    queries: int | None,
    *,
    is_causal: bool,
    window: int | None,
    slopes: Tensor | None,
    bias: Tensor | None,
    padding: Tensor | None,
    scale: float | Tensor | None,
    dropout_p: float,
) -> Tensor:
    """Attention of the last ``queries`` tokens (all if None) over all tokens of y."""
    d = y.shape[-1]
    skipped = 0 if queries is None else y.shape[-2] - queries
    temperature = d**-0.5 if scale is None else scale
    dtype = kernel_dtype(y)
    wide = torch.promote_types(dtype, torch.float32)
    root: Tensor | None = None
    if isinstance(temperature, Tensor) or temperature != 0.5:
        root = torch.as_tensor(2 * temperature, dtype=wide, device=y.device).sqrt()
    centre = reference_point(y, padding, is_causal=is_causal).to(wide)
    z = y.to(wide) - centre
    if padding is not None:
        z = z.masked_fill(padding[..., None, :, None], 0.0)
    z = (z if root is None else z * root).to(dtype)
    tokens = augment(z, padding, slopes, row_sums=dropout_p > 0.0)
    with differentiable_backend():
        out = _kernel(tokens, queries, is_causal, window, bias, dropout_p)

    # With dropout the weights of a row no longer sum to one; the reference point is added back with
    # the sum they have, so that the result is the dropped-out P times y, whatever the point.
    shift = centre if tokens.ones is None else out[..., tokens.ones, None] * centre
    rows = _token_columns(out, tokens).to(wide)
    rows = rows + shift if root is None else torch.addcmul(shift, rows, root.reciprocal())
    rows = rows.to(dtype)
    if is_causal:
        exact = first_rows(
            y,
            scale=temperature,
            slopes=slopes,
            bias=bias,
            padding=padding,
            window=window,
            dropout_p=dropout_p,
        )
        rows = replace_first_rows(rows, exact.to(dtype), padding, skipped)
    if padding is not None:
        rows = rows.masked_fill(padding[..., None, skipped:, None], 0.0)
    return rows


def _token_columns(out: Tensor, tokens: Augmented) -> Tensor:
    """The columns of the tokens (*, H, N, d) in the kernel's output (*, H, N, E).

    As one piece of a split, whose gradient is joined in one pass (that of a slice is filled with
    zeros first), with heads inside tokens, the layout in which fused kernels keep their tensors.
    """
    rest = out.shape[-1] - tokens.start - tokens.width
    pieces = out.transpose(-3, -2).split([tokens.start, tokens.width, rest], dim=-1)
    return pieces[1].transpose(-3, -2)


def kernel_dtype(y: Tensor) -> torch.dtype:
    """The dtype the kernel runs in: autocast's where it would cast, else y's own."""
    device = y.device.type
    if torch.is_autocast_enabled(device) and y.dtype != torch.float64:
        return torch.get_autocast_dtype(device)
    return y.dtype


def differentiable_backend() -> AbstractContextManager[None]:
    """MATH where a fused kernel has no derivative or batching rule, else torch's own choice."""
    if torch.compiler.is_compiling():
        return contextlib.nullcontext()
    transforms = torch._C._functorch.get_interpreter_stack() or []
    single_grad = len(transforms) == 1 and transforms[0].key() == torch._C._functorch.TransformType.Grad
    if forward_ad._current_level >= 0 or (transforms and not single_grad):
        return sdpa_kernel(SDPBackend.MATH)
    return contextlib.nullcontext()


def _kernel(
    tokens: Augmented,
    queries: int | None,
    is_causal: bool,
    window: int | None,
    bias: Tensor | None,
    dropout_p: float,
) -> Tensor:
    """Attention of the last ``queries`` augmented queries over all keys, (*, H, queries, E)."""
    lead, heads_n_e = tokens.query.shape[:-3], tokens.query.shape[-3:]
    query = tokens.query.reshape(-1, *heads_n_e)
    key = tokens.key.reshape(-1, *heads_n_e)
    if window is not None and window >= heads_n_e[1]:
        window = None
    if queries is None and bias is None and window is not None:
        out = window_attention(query, key, window, tokens.norm, tokens.hidden, dropout_p)
    elif queries is None and bias is None:
        out = F.scaled_dot_product_attention(
            query, key, key, is_causal=is_causal, dropout_p=dropout_p, scale=1.0
        )
    else:
        mask = _dense_mask(tokens.query, queries, is_causal, window, bias)
        if queries is not None:
            query = query[..., -queries:, :]
        out = F.scaled_dot_product_attention(
            query, key, key, attn_mask=mask, dropout_p=dropout_p, scale=1.0
        )
    return out.reshape(*lead, *out.shape[-3:])


def _dense_mask(
    query: Tensor, queries: int | None, is_causal: bool, window: int | None, bias: Tensor | None
) -> Tensor | None:
    """Mask of the last ``queries`` rows: bool (queries, N), or additive with a bias, or None."""
    n = query.shape[-2]
    visible: Tensor | None = None
    if is_causal and (queries != 1 or window is not None):
        column = torch.arange(n, device=query.device)
        row = column[:, None] if queries is None else column[-queries:, None]
        visible = column <= row
        if window is not None:
            visible = visible & (column > row - window)
    if bias is None:
        return visible
    bias = bias.to(query.dtype)
    if visible is not None:
        bias = bias.masked_fill(~visible, -torch.inf)
    if query.ndim <= 4:
        return bias
    full = (*query.shape[:-3], bias.shape[-3] if bias.ndim >= 3 else 1, n, n)
    return bias.expand(full).reshape(-1, *full[-3:])
