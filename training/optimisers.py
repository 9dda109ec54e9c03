"""AdamW with weight decay on matrices alone."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


def decay_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Parameters in two groups: weights of linear maps decay; all else does not.

    Biases, norms, temperatures, scales and embeddings set sizes that decay would pull to zero for no
    gain. Weights that are divided by their norm decay too: it only sets their learning rate.
    """
    embeddings = {id(p) for m in model.modules() if isinstance(m, nn.Embedding) for p in m.parameters()}
    decayed: list[nn.Parameter] = []
    kept: list[nn.Parameter] = []
    for p in model.parameters():
        is_matrix = sum(size > 1 for size in p.shape) >= 2
        (decayed if is_matrix and id(p) not in embeddings else kept).append(p)
    return [
        {"params": decayed, "weight_decay": weight_decay},
        {"params": kept, "weight_decay": 0.0},
    ]


def adamw(
    model: nn.Module, lr: float, weight_decay: float, betas: tuple[float, float]
) -> torch.optim.AdamW:
    """AdamW over `decay_groups`, in one kernel on a GPU; gradients may be clipped before it."""
    fused = all(p.device.type != "cpu" for p in model.parameters())
    groups = [group for group in decay_groups(model, weight_decay) if group["params"]]
    optimiser = torch.optim.AdamW(groups, lr=lr, betas=betas, fused=fused or None)
    # A fused step offers to divide gradients by a loss scale itself, after they were clipped. So mixed
    # precision refuses to clip for it, even where nothing is scaled (bf16). Without the offer gradients
    # are unscaled first, if they are scaled at all, then clipped, then learnt from: as unfused.
    optimiser._step_supports_amp_scaling = False
    return optimiser
