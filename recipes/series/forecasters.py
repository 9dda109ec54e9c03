"""Forecasts of windows (B, past + horizon, 1) and their score: the flow's, and those of baselines."""

from __future__ import annotations

import time
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from recipes.report import count
from recipes.series.module import SeriesModule


def crps(samples: Tensor, truth: Tensor) -> Tensor:
    r"""The continuous ranked probability score of samples, without bias; less is better.

    .. math:: \mathrm{CRPS}(F, y) = E|X - y| - \tfrac12 E|X - X'|

    with X, X' independent of F. The second mean is over pairs of different samples, by their order:
    :math:`\sum_{i<j} |x_i - x_j| = \sum_i (2i - m - 1) x_{(i)}`. Source: Gneiting and Raftery 2007.

    Args:
        samples: (m, *), m at least 2.
        truth: (*).

    Returns:
        (*), in the unit of the data.
    """
    m = len(samples)
    if m < 2:
        raise ValueError(f"the score needs at least 2 samples, got {m}")
    ranks = 2.0 * torch.arange(1, m + 1, dtype=samples.dtype, device=samples.device) - m - 1.0
    pairs = torch.tensordot(ranks, samples.sort(0).values, 1) / (m * (m - 1))
    return (samples - truth).abs().mean(0) - pairs


class Forecaster(Protocol):
    """What is scored: the density of a future given its past, and draws from it."""

    name: str
    parameters: int
    updates: int
    seconds: float

    def log_prob(self, windows: Tensor) -> Tensor:
        """log p(future | past), (B, past + horizon, 1) -> (B,)."""

    def sample(self, windows: Tensor, samples: int) -> Tensor:
        """Draws of the future, (samples, B, horizon)."""


class FlowForecaster:
    """The trained flow."""

    name = "AttentionFlow, causal"

    def __init__(self, module: SeriesModule, updates: int, seconds: float) -> None:
        self.module, self.updates, self.seconds = module, updates, seconds
        self.parameters = count(module)

    def log_prob(self, windows: Tensor) -> Tensor:
        windows = windows.to(self.module.device)
        return torch.cat([self.module.log_prob(x) for x in windows.split(256)]).cpu()

    def sample(self, windows: Tensor, samples: int) -> Tensor:
        past, device = self.module.past, self.module.device
        generator = torch.Generator(device).manual_seed(0)
        drawn = [
            self.module.flow.continue_(
                x[:, :past], x.shape[1] - past, num_samples=samples, generator=generator, tol=1e-4
            )
            for x in windows.to(device).split(32)
        ]
        return torch.cat(drawn, 1).squeeze(-1).cpu()


class GaussianAR:
    r"""A linear autoregression with Gaussian noise, fitted by least squares.

    :math:`x_t = a_0 + \sum_{k \le p} a_k x_{t-k} + \sigma e_t`; :math:`\sigma^2` is the sum of squared
    residuals by the degrees of freedom. Forecasts of several steps are simulated, so that their
    variance is that of the sum of all noise on the way.

    Args:
        windows: to train on, (W, past + horizon, 1).
        past: p, all of it.
    """

    name, updates = "Gaussian autoregression", 0

    def __init__(self, windows: Tensor, past: int) -> None:
        begin = time.perf_counter()
        lags, after = windows[:, :past, 0].double(), windows[:, past, 0].double()
        inputs = torch.cat([torch.ones_like(lags[:, :1]), lags], 1)
        self.weights = torch.linalg.lstsq(inputs, after.unsqueeze(1)).solution.squeeze(1)
        rest = after - inputs @ self.weights
        self.sigma = (rest.square().sum() / (len(rest) - past - 1)).sqrt()
        self.past, self.parameters = past, past + 2
        self.seconds = time.perf_counter() - begin

    def _mean(self, lags: Tensor) -> Tensor:
        return self.weights[0] + lags @ self.weights[1:]

    def log_prob(self, windows: Tensor) -> Tensor:
        x = windows[..., 0].double()
        means = self._mean(x[:, :-1].unfold(1, self.past, 1))
        return torch.distributions.Normal(means, self.sigma).log_prob(x[:, self.past :]).sum(1)

    def sample(self, windows: Tensor, samples: int) -> Tensor:
        generator = torch.Generator().manual_seed(0)
        x = windows[:, : self.past, 0].double().expand(samples, -1, -1)
        for _ in range(windows.shape[1] - self.past):
            noise = torch.randn(x.shape[:2], generator=generator, dtype=x.dtype, device="cpu")
            x = torch.cat([x, (self._mean(x[..., -self.past :]) + self.sigma * noise).unsqueeze(-1)], -1)
        return x[..., self.past :].float()


class MaskedFlow:
    """A masked autoregressive flow of zuko of the whole future, conditioned on the past.

    Trained by Adam with a falling learning rate, for so many seconds of the processor.

    Args:
        windows: to train on, (W, past + horizon, 1).
        past: numbers of the past.
        seconds: of training.
        batch_size: windows of a batch.
        lr: the largest learning rate.
    """

    def __init__(
        self, windows: Tensor, past: int, seconds: float, batch_size: int, lr: float = 1e-3
    ) -> None:
        self.past, self.name = past, f"masked autoregressive flow (zuko), rate {lr:g}"
        # Importing zuko switches off validation in torch.distributions, which others rely on.
        validates = torch.distributions.Distribution._validate_args
        import zuko

        torch.distributions.Distribution.set_default_validate_args(validates)
        torch.manual_seed(0)
        horizon = windows.shape[1] - past
        self.model: nn.Module = zuko.flows.MAF(horizon, past, transforms=3, hidden_features=(64, 64))
        self.parameters, self.updates = count(self.model), 0
        adam = torch.optim.Adam(self.model.parameters(), lr)
        begin = time.process_time()
        with torch.enable_grad():
            while (spent := time.process_time() - begin) < seconds or not self.updates:
                for group in adam.param_groups:
                    group["lr"] = lr * max(0.01, 1.0 - spent / seconds)
                batch = windows[torch.randint(len(windows), (batch_size,))]
                loss = -self.log_prob(batch).mean()
                adam.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
                adam.step()
                self.updates += 1
        self.seconds = time.process_time() - begin
        self.model.eval()

    def _given(self, windows: Tensor) -> Any:
        return self.model(windows[:, : self.past, 0])

    def log_prob(self, windows: Tensor) -> Tensor:
        found: Tensor = self._given(windows).log_prob(windows[:, self.past :, 0])
        return found

    def sample(self, windows: Tensor, samples: int) -> Tensor:
        torch.manual_seed(0)
        drawn: Tensor = self._given(windows).sample((samples,))
        return drawn
