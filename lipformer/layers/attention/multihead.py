"""L2 multi-head self-attention with a certified Lipschitz constant."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

from lipformer.functional import l2_attention, l2_attention_step, l2_attention_weights
from lipformer.functional.attention.checks import check_window
from lipformer.functional.rounding import without_subnormals
from lipformer.layers import layout
from lipformer.layers.attention import masks
from lipformer.layers.attention.key_ball import bounded
from lipformer.layers.attention.key_cache import KeyCache, extend
from lipformer.layers.attention.positions import default_slopes, exact_slopes, rotary_angles, rotate
from lipformer.layers.attention.self_attention import SelfAttention, check_settings
from lipformer.layers.constants import Constants
from lipformer.layers.spectral import SpectralLinear

POSITIONS = (None, "alibi", "rotary")


def check_arguments(
    embed_dim: int,
    num_heads: int,
    *,
    dropout: float,
    batch_first: bool,
    causal: bool | None,
    any_mask: bool,
    window: int | None,
    positions: str | None,
    max_len: int | None,
    slopes: Sequence[float] | None,
    smooth_radius: bool,
) -> None:
    """Raises ValueError for arguments that do not fit together."""
    flags = {"batch_first": batch_first, "any_mask": any_mask, "smooth_radius": smooth_radius}
    check_settings(embed_dim, num_heads, dropout, max_len, **flags)
    if causal is not None and not isinstance(causal, bool):
        raise ValueError(f"causal must be True, False or None, got {causal!r}")
    if positions not in POSITIONS:
        raise ValueError(f"positions must be None, 'alibi' or 'rotary', got {positions!r}")
    if positions == "alibi" and causal is not True:
        raise ValueError(f"positions='alibi' needs causal=True, got causal={causal}")
    if slopes is not None and positions != "alibi":
        raise ValueError(f"slopes need positions='alibi', got positions={positions!r}")
    if window is not None and causal is not True:
        raise ValueError(f"window={window} needs causal=True, got causal={causal}")
    check_window(window, True)
    head_dim = embed_dim // num_heads
    if positions == "rotary" and head_dim % 2:
        raise ValueError(f"positions='rotary' needs an even head width, got {head_dim}")


# Settings that may change later, which check_arguments then checks again; the first two are fixed.
_SETTINGS = (
    "embed_dim", "num_heads", "dropout", "batch_first", "causal", "any_mask", "window", "positions",
    "max_len", "smooth_radius", "slopes",
)  # fmt: skip


class Keys(NamedTuple):
    """The keys of a pass and what made them.

    Attributes:
        y: scaled keys sqrt(2 t) x W (B, H, N, d), bounded by key_radius, with rotary positions rotated.
        weight: their weight (H d, D), sqrt(2 t) times that of q_proj.
        angles: of the rotations, or None.
        root: sqrt(2 t_h), (H, 1, 1).
        free: with key_radius the scaled keys before it (B, N, H, d), else None.
    """

    y: Tensor
    weight: Tensor
    angles: tuple[Tensor, Tensor] | None
    root: Tensor
    free: Tensor | None


class L2MultiheadAttention(SelfAttention):
    r"""Multi-head self-attention with logits :math:`-t_h \|x_i W_h - x_j W_h\|^2`.

    .. math:: F(X) = \sum_h P_h Y_h M_h + b, \qquad Y_h = X W_h

    Call-compatible with nn.MultiheadAttention for self-attention. Source: Kim, Papamakarios, Mnih
    2021. With ``value_proj=True`` the paper's form, :math:`M_h = W_h^\top W^V_h W^O_h / \sqrt d` and
    :math:`t_h = 1/\sqrt d`; by default the lean form (docs/theory, section 1): the same functions with
    two matrices instead of four, :math:`M_h` being a block of out_proj, and a learned temperature per
    head, on which the bound does not depend.

    With ``key_radius`` each :math:`y_h = x W_h + b_h` is projected on a ball of learned radius
    :math:`R_h`, as query, key and value alike. The gain of the head is then that of a ball of radius
    :math:`r_h = \sqrt{t_h} R_h` (Theorem F), much smaller for :math:`r_h \le 1`, and without a mask for
    any number of tokens. The bound then depends on temperature and radius, with gradients.

    Args:
        embed_dim: D, the width of the tokens.
        num_heads: H; D must be a multiple of it.
        dropout: probability of dropping an attention weight in training.
        bias: learned bias of the output. (One of the query-key projection would move all keys
            together and change nothing, so there is none except with rotary positions or key_radius.)
        batch_first: input (B, N, D) rather than (N, B, D).
        value_proj: the paper's form (True) or the lean form (False, the default).
        causal: True always masks, False never does, None leaves it to each call.
        any_mask: allow any attn_mask that hides keys but never a token's own; certified by the
            corollary of Theorem G.
        window: each token sees its ``window`` latest keys, itself included; needs causal=True.
        positions: None, "alibi" (needs causal=True) or "rotary".
        max_len: the largest number of tokens; certify then needs no seq_len.
        proj_coeff: if given, all projections have spectral norm at most this.
        key_radius: initial R of each head's ball, such as :math:`\sqrt d`, or None for no balls.
        smooth_radius: :math:`y/\sqrt{1 + \|y\|^2/R^2}` in place of the projection, for densities.
        slopes: ALiBi slopes, one per head; default 1/2 to 1/16.
        device: of the parameters.
        dtype: of the parameters.

    Example:
        >>> layer = L2MultiheadAttention(16, 4, batch_first=True)
        >>> x = torch.randn(2, 10, 16)
        >>> out, weights = layer(x, x, x)
        >>> out.shape, weights.shape
        (torch.Size([2, 10, 16]), torch.Size([2, 10, 10]))
    """

    projections = ("q_proj", "v_proj", "out_proj")

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        dropout: float = 0.0,
        bias: bool = True,
        batch_first: bool = False,
        *,
        value_proj: bool = False,
        causal: bool | None = None,
        any_mask: bool = False,
        window: int | None = None,
        positions: str | None = None,
        max_len: int | None = None,
        proj_coeff: float | None = None,
        key_radius: float | None = None,
        smooth_radius: bool = False,
        slopes: Sequence[float] | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        check_arguments(
            embed_dim,
            num_heads,
            dropout=dropout,
            batch_first=batch_first,
            causal=causal,
            any_mask=any_mask,
            window=window,
            positions=positions,
            max_len=max_len,
            slopes=slopes,
            smooth_radius=smooth_radius,
        )
        number = isinstance(key_radius, (int, float)) and 0.0 < key_radius < math.inf
        if key_radius is not None and not number:
            raise ValueError(f"key_radius must be None or positive and finite, got {key_radius!r}")
        if smooth_radius and key_radius is None:
            raise ValueError("smooth_radius=True needs a key_radius, got key_radius=None")
        self.embed_dim = embed_dim
        self.num_heads = num_heads
        self.dropout = dropout
        self.batch_first = batch_first
        self.causal = causal
        self.any_mask = any_mask
        self.window = window
        self.positions = positions
        self.max_len = max_len
        self.smooth_radius = smooth_radius
        self._first_radius = key_radius

        place: dict[str, Any] = {"device": device, "dtype": dtype}

        def linear(with_bias: bool) -> nn.Linear:
            if proj_coeff is None:
                return nn.Linear(embed_dim, embed_dim, with_bias, **place)
            return SpectralLinear(
                embed_dim, embed_dim, with_bias, coeff=proj_coeff, mode="normalize", **place
            )

        self.q_proj = linear(bias and (positions == "rotary" or key_radius is not None))
        self.v_proj = linear(False) if value_proj else None
        self.out_proj = linear(bias)
        self.log_temperature = None if value_proj else nn.Parameter(torch.empty(num_heads, **place))
        self.log_key_radius = (
            None if key_radius is None else nn.Parameter(torch.empty(num_heads, **place))
        )
        self._balance: tuple[float, ...] | None = None
        self.constants = Constants()
        if positions == "alibi":
            slopes = exact_slopes(default_slopes(num_heads) if slopes is None else slopes, num_heads)
        self.slopes: tuple[float, ...] | None = slopes  # type: ignore[assignment]
        self.reset_parameters()

    def __setattr__(self, name: str, value: Any) -> None:
        # Settings are read when the layer runs and when it is certified: those changed later must fit
        # together too. The slopes are the last that the constructor sets.
        if name in _SETTINGS and "slopes" in self.__dict__:
            given = {key: self.__dict__[key] for key in _SETTINGS}
            if name in _SETTINGS[:2] and value != given[name]:
                raise ValueError(f"{name} is {given[name]} by the shape of the weights, got {value!r}")
            given[name] = value
            check_arguments(**given)
            if (given["positions"] == "alibi") != (given["slopes"] is not None):
                raise ValueError(
                    "positions='alibi' and its slopes are given to the constructor together, got "
                    f"positions={given['positions']!r}, slopes={given['slopes']}"
                )
            if name == "slopes" and value is not None:
                value = exact_slopes(value, self.num_heads)
        super().__setattr__(name, value)

    @property
    def proj_coeff(self) -> float | None:
        """The bound of the projections' norms, or None."""
        return self.q_proj.coeff if isinstance(self.q_proj, SpectralLinear) else None

    @property
    def bounds_keys(self) -> bool:
        """Whether it has a key_radius."""
        return self.log_key_radius is not None

    def reset_parameters(self) -> None:
        """Initial weights.

        L2 attention gives each token its own key at distance 0, so with a sharp kernel it attends
        only to itself and learns nothing at first: the paper's form starts with a small W_Q, the
        lean form with temperatures around 1/d, spread over the heads.
        """
        with torch.no_grad():
            for linear in (self.q_proj, self.v_proj, self.out_proj):
                if isinstance(linear, SpectralLinear):
                    linear.reset_parameters()
                elif linear is not None:
                    nn.init.xavier_uniform_(linear.weight)
                    if linear.bias is not None:
                        linear.bias.zero_()
            if self.v_proj is not None and self.proj_coeff is None:
                reach = 2.0**-4 / math.sqrt(self.embed_dim)
                nn.init.uniform_(self.q_proj.weight, -reach, reach)
            if self.log_temperature is not None:
                spread = torch.linspace(-1.5, 1.5, self.num_heads) if self.num_heads > 1 else 0.0
                self.log_temperature.copy_(torch.as_tensor(spread) - math.log(self.head_dim))
            if self.log_key_radius is not None:
                assert self._first_radius is not None
                self.log_key_radius.fill_(math.log(self._first_radius))

    @property
    def temperature(self) -> float | Tensor:
        """t: 1/sqrt(d) in the paper's form, learned (H, 1, 1) in the lean form, 1/2 once baked."""
        if self.log_temperature is None:
            return self.head_dim**-0.5
        return self.log_temperature.exp()[:, None, None]

    def output_matrix(self) -> Tensor:
        r"""The matrices :math:`M_h` (H, d, D), in the paper's form as products in float64.

        float64, because the factors may cancel: rounded in float32, what should be nearly zero would
        be noise, which Contractive then divides by a small bound.
        """
        out = rearrange(self.out_proj.weight, "o (h d) -> h d o", h=self.num_heads)
        if self.v_proj is None:
            return out
        q = rearrange(self.q_proj.weight, "(h d) i -> h d i", h=self.num_heads)
        v = rearrange(self.v_proj.weight, "(h d) i -> h d i", h=self.num_heads)
        with torch.autocast(q.device.type, enabled=False):
            return (q.double() @ v.double().mT) @ out.double() * self.head_dim**-0.5

    def forward(
        self,
        query: Tensor,
        key: Tensor | None = None,
        value: Tensor | None = None,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Self-attention; arguments and results as in nn.MultiheadAttention.

        Args:
            query: (N, B, D), (B, N, D) if batch_first, or (N, D).
            key: the same tensor as query, or None.
            value: the same tensor as query, or None.
            key_padding_mask: (B, N) or (N,), True (or -inf) at padded tokens; their rows of
                attention are zero, so that their output is the bias.
            need_weights: also return the attention weights (an N x N tensor).
            attn_mask: see causal and any_mask.
            average_attn_weights: average the weights over the heads.
            is_causal: mask later keys; with attn_mask the hint that it is the causal mask.

        Returns:
            The output, of query's shape, and the weights (B, N, N), (B, H, N, N) if not averaged,
            without B for an input without one, or None.
        """
        self._one_tensor(query, key, value)
        x, padding = self._batched(query, key_padding_mask)
        mask = masks.resolve(
            attn_mask,
            is_causal,
            causal=self.causal,
            any_mask=self.any_mask,
            batch=x.shape[0],
            heads=self.num_heads,
            n=x.shape[1],
            dtype=x.dtype,
        )
        keys = self._keys(x, 0)
        out = self._output(self._attend(keys.y, mask, padding), keys)
        weights: Tensor | None = None
        if need_weights:
            weights = l2_attention_weights(
                keys.y,
                is_causal=mask.is_causal,
                window=self.window,
                slopes=self._slopes(keys.y),
                bias=mask.bias,
                key_padding_mask=padding,
                scale=0.5,
            )
            weights = weights.mean(1) if average_attn_weights else weights
            weights = weights.squeeze(0) if query.ndim == 2 else weights
        return layout.unbatched(out, query, self.batch_first), weights

    def scaled(self, x: Tensor, head_scale: Tensor, key_padding_mask: Tensor | None = None) -> Tensor:
        r""":math:`\sum_h s_h P_h Y_h M_h + \bar s b`: what Contractive runs.

        Args:
            x: as query in forward.
            head_scale: :math:`s_h` (H,), of which the bias gets the mean.
            key_padding_mask: as in forward.
        """
        rows, padding = self._batched(x, key_padding_mask)
        keys = self._keys(rows, 0)
        heads = self._attend(keys.y, masks.Mask(bool(self.causal), None), padding)
        return layout.unbatched(self._output(heads, keys, head_scale), x, self.batch_first)

    def step(
        self,
        x: Tensor,
        cache: KeyCache | None = None,
        key_padding_mask: Tensor | None = None,
        *,
        head_scale: Tensor | None = None,
    ) -> tuple[Tensor, KeyCache]:
        """Causal attention of new tokens over all tokens so far, for step-by-step decoding.

        Args:
            x: new tokens (B, T, D), or (T, B, D) unless batch_first.
            cache: what the step before returned, None at the first.
            key_padding_mask: (B, T) of the new tokens.
            head_scale: as in :meth:`scaled`.

        Returns:
            The rows of the new tokens, as the full pass would give them, and the new cache.
        """
        if self.causal is False:
            raise ValueError("step-by-step decoding is causal, but the layer has causal=False")
        rows, padding = self._batched(x, key_padding_mask)
        seen = 0 if cache is None else cache.seen
        if self.max_len is not None and seen + rows.shape[1] > self.max_len:
            raise ValueError(
                f"max_len is {self.max_len}, got {seen} tokens in the cache and {rows.shape[1]} new"
            )
        keys = self._keys(rows, seen)
        cache = extend(cache, keys.y, padding)
        heads = l2_attention_step(
            cache.keys,
            rows.shape[1],
            window=self.window,
            slopes=self._slopes(keys.y),
            key_padding_mask=cache.padding,
            scale=0.5,
        )
        out = layout.unbatched(self._output(heads, keys, head_scale), x, self.batch_first)
        return out, cache if self.window is None else cache.latest(self.window - 1)

    def _slopes(self, y: Tensor) -> Tensor | None:
        """The ALiBi slopes (H,)."""
        return None if self.slopes is None else self.constants(self.slopes, y.device, torch.float32)

    def root(self) -> Tensor:
        """sqrt(2 t_h), (H, 1, 1), in at least float32.

        It is folded into the weights, so that it costs nothing per token, and each is rounded once.
        """
        log_root = self._log_root()
        if isinstance(log_root, Tensor):
            return log_root.exp()[:, None, None]
        root = math.sqrt(2.0 * self.head_dim**-0.5)
        return self._stored().new_full((self.num_heads, 1, 1), root, dtype=self._wide())

    def _log_root(self) -> Tensor | float:
        """ln sqrt(2 t_h), (H,) if it is learned."""
        if self.log_temperature is None:
            return 0.5 * math.log(2.0 * self.head_dim**-0.5)
        return 0.5 * (self.log_temperature.to(self._wide()) + math.log(2.0))

    def log_radius(self) -> Tensor | None:
        """ln of the radius sqrt(2 t_h) R_h of scaled keys, (H,) in at least float32, or None."""
        if self.log_key_radius is None:
            return None
        return self.log_key_radius.to(self._wide()) + self._log_root()

    def curb(self) -> Tensor | None:
        """1 over the squared radius of scaled keys (H, 1), in at least float32, or None."""
        log_radius = self.log_radius()
        return None if log_radius is None else (-2.0 * log_radius).clamp(-68.0, 68.0).exp()[:, None]

    def key_weight(self, root: Tensor) -> Tensor:
        """What maps tokens to scaled keys, (H d, D) in the layer's dtype; ``root`` as from root()."""
        self.check_projections()
        weight = self.q_proj.weight
        return (weight.unflatten(0, (self.num_heads, -1)) * root).to(weight.dtype).flatten(0, 1)

    def key_bias(self, root: Tensor) -> Tensor | None:
        """The bias (H d,) of scaled keys, or None."""
        bias: Tensor | None = self.q_proj.bias
        if bias is None:
            return None
        return (bias.unflatten(0, (self.num_heads, -1)) * root.squeeze(-1)).to(bias.dtype).flatten()

    def read_out_weight(self, root: Tensor, head_scale: Tensor | None = None) -> Tensor:
        """What maps heads of scaled keys, side by side, to the output, (D, H d) in the layer's dtype."""
        # (D, H, d): the lean form's stored weight seen by heads, which costs no copy.
        matrix, factor = self.output_matrix().movedim(-1, 0), root.squeeze(-1).reciprocal()
        wide = torch.promote_types(matrix.dtype, torch.float32)
        if head_scale is not None:
            factor = without_subnormals(factor * head_scale[:, None], wide)
        weight = (matrix * factor.to(wide)).flatten(1)
        # In one layout, so that a baked weight gives the same products to the last bit.
        return weight.to(self._stored().dtype).contiguous()

    def read_out_bias(self, head_scale: Tensor | None = None) -> Tensor | None:
        """The bias (D,) of the output, or None."""
        bias: Tensor | None = self.out_proj.bias
        if bias is None or head_scale is None:
            return bias
        wide = torch.promote_types(bias.dtype, torch.float32)
        return (bias.to(wide) * head_scale.mean()).to(bias.dtype)

    @property
    def key_width(self) -> int:
        """Features of a head that a cache keeps of a token: its key."""
        return self.head_dim

    def new_keys(self, x: Tensor) -> Tensor:
        """What a cache keeps of the first tokens (B, T, D), (B, H, T, d)."""
        return self._keys(x, 0).y

    def _keys(self, x: Tensor, offset: int) -> Keys:
        """Scaled keys sqrt(2 t) x W, inside their ball, rotated by rotary positions."""
        root = self.root()
        weight, curb = self.key_weight(root), self.curb()
        y = F.linear(x, weight, self.key_bias(root)).unflatten(-1, (self.num_heads, -1))
        free = None
        if curb is not None:
            free, y = y, bounded(y, curb, self.smooth_radius)
        y = y.transpose(1, 2)
        if self.positions != "rotary":
            return Keys(y, weight, None, root, free)
        angles = rotary_angles(x.shape[1], self.head_dim, offset, x.device)
        return Keys(rotate(y, *angles), weight, angles, root, free)

    def _attend(self, y: Tensor, mask: masks.Mask, padding: Tensor | None) -> Tensor:
        return l2_attention(
            y,
            is_causal=mask.is_causal,
            window=self.window,
            slopes=self._slopes(y),
            bias=mask.bias,
            key_padding_mask=padding,
            scale=0.5,
            dropout_p=self.dropout if self.training else 0.0,
        )

    def _output(self, heads: Tensor, keys: Keys, head_scale: Tensor | None = None) -> Tensor:
        """Heads (B, H, N, d) of scaled keys to the output (B, N, D)."""
        return F.linear(*self._read_out(heads, keys, head_scale), self.read_out_bias(head_scale))

    def _read_out(self, heads: Tensor, keys: Keys, head_scale: Tensor | None) -> tuple[Tensor, Tensor]:
        """The heads side by side (B, N, H d), and the weight (D, H d) that maps them to the output."""
        if keys.angles is not None:
            heads = rotate(heads, *keys.angles, back=True)
        weight = self.read_out_weight(keys.root, head_scale)
        return rearrange(heads, "b h n d -> b n (h d)"), weight

    def extra_repr(self) -> str:
        form = "lean" if self.v_proj is None else "paper"
        parts = [f"{self.embed_dim}, {self.num_heads}, form={form!r}, causal={self.causal}"]
        for name in ("window", "positions", "max_len", "proj_coeff"):
            if getattr(self, name) is not None:
                parts.append(f"{name}={getattr(self, name)!r}")
        if self.bounds_keys:
            parts.append("smooth key_radius" if self.smooth_radius else "key_radius")
        if self.dropout:
            parts.append(f"dropout={self.dropout}")
        return ", ".join(parts)
