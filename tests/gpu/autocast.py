"""Autocast of the pretend GPU: the dtypes that operators run in on CUDA.

See torch's documentation of automatic mixed precision, "Op-specific behavior": matrix products take the
lower precision, what overflows or sums takes float32, and operators of several tensors the widest dtype.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

LOWER = (
    "addbmm", "addmm", "addmv", "addr", "baddbmm", "bmm", "chain_matmul", "conv1d", "conv2d",
    "conv3d", "conv_tbc", "conv_transpose1d", "conv_transpose2d.input", "conv_transpose3d.input",
    "convolution", "linalg_vecdot", "linear", "matmul", "mm", "mv", "prelu",
    "scaled_dot_product_attention",
)  # fmt: skip
FLOAT32 = (
    "acos", "asin", "cdist", "cosh", "cosine_embedding_loss", "cosine_similarity", "cumprod",
    "cumsum", "dist", "erfinv", "exp", "expm1", "group_norm", "hinge_embedding_loss", "huber_loss",
    "kl_div", "l1_loss", "layer_norm", "log", "log10", "log1p", "log2", "log_softmax.int",
    "logsumexp", "margin_ranking_loss", "mse_loss", "multi_margin_loss", "nll_loss", "nll_loss_nd",
    "norm.Scalar", "norm.ScalarOpt_dim", "norm.ScalarOpt_dtype", "norm.ScalarOpt_dim_dtype",
    "poisson_nll_loss", "pow.Scalar", "pow.Tensor_Scalar", "pow.Tensor_Tensor", "prod",
    "prod.dim_int", "reciprocal", "renorm", "rsqrt", "sinh", "smooth_l1_loss", "soft_margin_loss",
    "softmax.int", "softplus", "sum", "sum.dim_IntList", "tan", "triplet_margin_loss",
)  # fmt: skip
WIDEST = (
    "addcdiv", "addcmul", "atan2", "bilinear", "cat", "cross", "dot", "grid_sampler", "index_put",
    "scatter_add", "stack", "tensordot",
)  # fmt: skip


def _eligible(value: Any, name: str) -> bool:
    floating = isinstance(value, Tensor) and value.is_floating_point() and value.dtype != torch.float64
    return floating and value.device.type == name


def _cast(func: Any, rule: str, name: str, *args: Any, **kwargs: Any) -> Any:
    dtypes = [t.dtype for t in tree_leaves((args, kwargs)) if _eligible(t, name)]
    dtype = torch.get_autocast_dtype(name) if rule == "lower" else torch.float32
    if rule == "widest":
        dtype = functools.reduce(torch.promote_types, dtypes, torch.get_autocast_dtype(name))
    off = torch._C._ExcludeDispatchKeyGuard(
        torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastPrivateUse1)
    )
    with off:
        args, kwargs = tree_map(
            lambda value: value.to(dtype) if _eligible(value, name) else value, (args, kwargs)
        )
        return func(*args, **kwargs)


def register(name: str) -> list[torch.library.Library]:
    """Gives the device called `name` its autocast, which lasts as long as what is returned."""
    every = torch.library.Library("_", "IMPL")
    every.fallback(torch.library.fallthrough_kernel, "AutocastPrivateUse1")
    library = torch.library.Library("aten", "IMPL")
    for rule, operators in (("lower", LOWER), ("float32", FLOAT32), ("widest", WIDEST)):
        for operator in operators:
            packet, _, overload = operator.partition(".")
            func = getattr(getattr(torch.ops.aten, packet), overload or "default")
            library.impl(operator, functools.partial(_cast, func, rule, name), "AutocastPrivateUse1")
    return [every, library]
