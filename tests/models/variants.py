"""Small models of every variant, for the tests."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lipformer.models import VARIANTS, LanguageModel

VOCABULARY = "abcdefghijk"
CASES: dict[str, dict[str, Any]] = {
    "dot_product": {},
    "dot_product sinusoidal": {"positions": "sinusoidal"},
    "dot_product rotary": {"positions": "rotary"},
    "l2_untied": {},
    "l2_untied rotary": {"positions": "rotary"},
    "l2": {},
    "l2 sinusoidal": {"positions": "sinusoidal"},
    "l2 rotary": {"positions": "rotary"},
    "l2 paper": {"value_proj": True, "norm_place": "post"},
    "contractive": {},
    "contractive l2 pre": {"norm": "l2", "norm_place": "pre", "coeff": 0.8},
    "contractive kim2021": {"bound": "kim2021"},
    "lipschitz": {},
    "lipschitz centred": {"norm_place": "pre", "positions": "rotary"},
    "lipschitz gathered": {
        "gather": 3,
        "norm": "token",
        "token_shift": False,
        "embedding_rms": 1.0,
        "attention_weight": 0.2,
        "feed_forward_weight": 1.0,
    },
    "invertible": {},
    "invertible apart": {"past_bias": False},
    "invertible norm": {"norm": "l2", "coeff": 0.8},
}
CERTIFIED = [name for name in CASES if not name.startswith(("dot_product", "l2_untied"))]


def build(case: str, **options: Any) -> LanguageModel:
    """The model of a case: 11 symbols, width 16, 2 heads, 2 layers, 24 tokens."""
    sizes = {"dim": 16, "num_heads": 2, "num_layers": 2, "max_len": 24, "vocabulary": VOCABULARY}
    return VARIANTS[case.partition(" ")[0]](len(VOCABULARY), **{**sizes, **CASES[case], **options})


def tokens(batch: int, length: int) -> Tensor:
    return torch.randint(len(VOCABULARY), (batch, length))


def fit(model: LanguageModel, steps: int, lr: float = 3e-3) -> list[float]:
    """The losses of some optimiser steps on one small batch of repeating text."""
    data = torch.arange(21).remainder(7).repeat(4, 1) + torch.arange(4)[:, None]
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    losses = []
    model.train()
    for _ in range(steps):
        loss = F.cross_entropy(model(data[:, :-1]).flatten(0, 1), data[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    model.eval()
    return losses
