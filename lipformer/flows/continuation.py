r"""What a flow must be for the density of tokens given the earlier ones to be known.

If token i of the noise is a function of the first i tokens of the data (a causal flow), the Jacobian is
block lower triangular; if the noise is independent from token to token too, the density is a product
over the tokens, whose first P factors are the density of the first P tokens:

.. math:: \log p(x_{>P} \mid x_{\le P}) = \log p(x) - \log p(x_{\le P}).

Given the prefix, the later tokens of the noise are still independent of it: drawn afresh and pulled
through the inverse, they give a draw from that density.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor, nn

from lipformer.flows.log_det.exact import supports_causal


def _single(block: nn.Module) -> Iterator[nn.Module]:
    """The blocks of a flow or stack, of those in it too."""
    block = getattr(block, "blocks", block)
    if isinstance(block, nn.Sequential):
        for part in block:
            yield from _single(part)
    else:
        yield block


def check_follows(prefix: Tensor, x: Tensor) -> None:
    """Raises unless x (B, T, D) can stand after a prefix (B, P, D)."""
    if prefix.ndim != 3 or x.ndim != 3 or prefix.shape[::2] != x.shape[::2]:
        raise ValueError(
            f"x (B, T, D) follows a prefix (B, P, D), got x {tuple(x.shape)} and prefix "
            f"{tuple(prefix.shape)}: repeat a prefix for each x, for n draws (n, B, T, D) by "
            "log_prob(x.flatten(0, 1), prefix=prefix.repeat(n, 1, 1))"
        )


def check_prefix(
    blocks: nn.Module, base: tuple[int, ...], seq_len: int | None, prefix: Tensor, steps: int
) -> None:
    """Raises unless a flow knows the density of so many tokens after a prefix.

    Args:
        blocks: of the flow.
        base: what one draw of its base looks like: () a number, (D,) a token, (T, D) an event.
        seq_len: the largest number of tokens, or None.
        prefix: (B, P, D).
        steps: tokens after it.
    """
    for block in _single(blocks):
        # Of a residual block its branch decides; others say what they are.
        if not supports_causal(getattr(block, "branch", block)):
            raise ValueError(
                "only a causal flow can be continued: in this one tokens may depend on later ones, by a "
                f"{type(block).__name__}, so that their density given a prefix is not known; build it "
                'with mode="causal", and of blocks with token_wise = True'
            )
    if len(base) == 2:
        raise ValueError(
            "a flow can be continued if its base is of numbers or tokens, which are independent of each "
            f"other, got one of events {base}"
        )
    if prefix.ndim != 3 or not prefix.shape[1]:
        raise ValueError(f"prefix must be (B, P, D) with at least one token, got {tuple(prefix.shape)}")
    if seq_len is not None and prefix.shape[1] + steps > seq_len:
        raise ValueError(
            f"the flow has seq_len={seq_len}, got {prefix.shape[1]} tokens and {steps} more"
        )
