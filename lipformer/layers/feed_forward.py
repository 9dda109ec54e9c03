"""The feed-forward part of a Transformer block, with a certified constant."""

from __future__ import annotations

from collections import OrderedDict

from torch import nn

from lipformer.layers.activations import MaxMin
from lipformer.layers.layer import Layer
from lipformer.layers.spectral import SpectralLinear


class FeedForward(nn.Sequential, Layer):
    """Two linear layers around an activation; the product of their norms is at most ``coeff``.

    Args:
        dim: width of the tokens.
        hidden: width between the two layers.
        coeff: bound on the product of their norms, or None for plain nn.Linear layers.
        activation: default MaxMin, of constant 1.
        dropout: dropout after the activation, in training.
        bias: learned biases.
        mode: of the two SpectralLinear: "normalize", "orthogonal" or "cap".
    """

    def __init__(
        self,
        dim: int,
        hidden: int,
        coeff: float | None = 1.0,
        *,
        activation: nn.Module | None = None,
        dropout: float = 0.0,
        bias: bool = True,
        mode: str = "normalize",
    ) -> None:
        if activation is None and hidden % 2:
            raise ValueError(f"hidden must be even for MaxMin, got {hidden}")
        up: nn.Module
        down: nn.Module
        if coeff is None:
            up, down = nn.Linear(dim, hidden, bias), nn.Linear(hidden, dim, bias)
        else:
            up = SpectralLinear(dim, hidden, bias, coeff=1.0, mode=mode)
            down = SpectralLinear(hidden, dim, bias, coeff=coeff, mode=mode)
        layers = OrderedDict(up=up, activation=MaxMin() if activation is None else activation)
        if dropout > 0.0:
            layers["dropout"] = nn.Dropout(dropout)
        layers["down"] = down
        super().__init__(layers)
