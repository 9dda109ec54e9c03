"""A branch as one fixed map of the unpadded tokens alone, and what its derivatives need."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from lipformer.estimates.jacobian_products import differentiable_kernels
from lipformer.functional.wide import alongside
from lipformer.layers import frozen
from lipformer.layers.branch import Call, active_dropout, apart, call_branch
from lipformer.layers.layout import without_padding
from lipformer.layers.residual import same_shape


def masked_branch(branch: nn.Module, x: Tensor, call: Call) -> Tensor:
    """The branch as a map of the unpadded tokens alone, (B, T, D) -> (B, T, D).

    Padded tokens enter as zeros and leave as zeros, so that the Jacobian has zero rows and columns
    there, I + J is the identity there, and not even a NaN in them reaches a gradient.

    Args:
        branch: the branch.
        x: (B, T, D).
        call: the padding as bool (B, T) and the context (B, C), where there are any.
    """
    padding = call.key_padding_mask
    out = call_branch(branch, without_padding(apart(x, branch), padding), *wide_call(call, x))
    return without_padding(same_shape(x, out), padding)


def wide_call(call: Call, x: Tensor) -> Call:
    """A call whose context is as wide as the tokens, so that its part in rounding is seen too."""
    return call if call.context is None else call._replace(context=alongside(call.context, x))


def check_tokens(x: Tensor) -> None:
    """Raises unless x is of floating-point tokens (B, T, D)."""
    if not isinstance(x, Tensor) or x.ndim != 3 or not x.is_floating_point():
        got = f"{tuple(x.shape)}, {x.dtype}" if isinstance(x, Tensor) else type(x).__name__
        raise ValueError(f"an invertible block takes a floating-point tensor (B, T, D), got {got}")


def check_batch_first(branch: nn.Module) -> None:
    """Raises where a part would take tokens for samples."""
    for path, part in branch.named_modules():
        if getattr(part, "batch_first", True) is False:
            raise ValueError(
                f"events are (B, T, D): build {path or 'the branch'} ({type(part).__name__}) with "
                "batch_first=True, got batch_first=False"
            )


def refuse_dropout(branch: nn.Module) -> None:
    """Raises where a part is random: the inverse and the density are those of one fixed map."""
    for path, p in active_dropout(branch).items():
        raise RuntimeError(
            f"dropout (p={p} in {path or 'the branch'}) makes the block random, so that it has neither "
            "inverse nor density: call .eval() before, or build the branch without dropout"
        )


@contextlib.contextmanager
def derivatives(branch: nn.Module, x: Tensor) -> Iterator[None]:
    """Gradients on, and what derivatives need: no autocast, no fused kernels, weights derived once."""
    with (
        torch.inference_mode(False),
        differentiable_kernels(),
        torch.autocast(x.device.type, enabled=False),
        frozen(branch),
    ):
        yield
