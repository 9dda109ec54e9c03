"""ActNorm: the first batch, its flag, padding, and the battery of certified layers."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import lipformer as lf
from lipformer.flows import ActNorm
from tests.layers.battery import CertifiedLayer, saved
from tests.oracles import dense_jacobian


class TestActNorm(CertifiedLayer):
    def make(self) -> nn.Module:
        return ActNorm(8).eval()

    least = 0.9


@pytest.fixture
def batch() -> torch.Tensor:
    return 5.0 + 3.0 * torch.randn(16, 7, 3, dtype=torch.float64)


def test_the_first_training_batch_gets_mean_0_and_deviation_1(batch: torch.Tensor) -> None:
    layer = ActNorm(3).double()
    y = layer(batch)
    torch.testing.assert_close(y.mean((0, 1)), torch.zeros(3).double(), rtol=0, atol=1e-12)
    torch.testing.assert_close(y.std((0, 1), correction=0), torch.ones(3).double(), rtol=1e-12, atol=0)
    # Only the first: the second is mapped by what was learnt from it.
    again = layer(2.0 * batch)
    assert again.mean().item() > 1.0


def test_padded_tokens_do_not_count_for_the_first_batch(batch: torch.Tensor) -> None:
    padded = torch.zeros(16, 7, dtype=torch.bool)
    padded[:, 4:] = True
    spoilt = batch.masked_fill(padded.unsqueeze(-1), 1e6)
    layer, short = ActNorm(3).double(), ActNorm(3).double()
    y = layer(spoilt, padded)
    torch.testing.assert_close(y[:, :4], short(batch[:, :4]), rtol=1e-12, atol=1e-12)
    assert torch.equal(y[:, 4:], spoilt[:, 4:])
    control = ActNorm(3).double()
    assert (control(spoilt)[:, :4] - y[:, :4]).abs().max() > 0.1, "without the mask they do count"


def test_before_a_first_batch_it_is_the_identity_in_eval(batch: torch.Tensor) -> None:
    layer = ActNorm(3).double().eval()
    y, log_det = layer.forward_and_log_det(batch)
    assert torch.equal(y, batch)
    assert torch.equal(log_det, torch.zeros(16).double())
    assert not layer.initialized
    layer.train().inverse(batch)
    assert not layer.initialized, "only a forward pass brings data"


def test_that_it_has_learnt_is_saved_with_the_weights(batch: torch.Tensor) -> None:
    layer = ActNorm(3).double()
    expected = layer(batch)
    other = ActNorm(3).double()
    other.load_state_dict(saved(layer))
    other.train()
    other(100.0 * batch)  # would be the first batch if the flag were lost
    assert torch.equal(other(batch), expected)
    assert torch.equal(copy.deepcopy(other)(batch), expected)


def test_loading_untaught_weights_makes_it_learn_again(batch: torch.Tensor) -> None:
    layer = ActNorm(3).double()
    untaught = copy.deepcopy(layer.state_dict())
    layer(batch)
    assert layer.is_set()
    layer.load_state_dict(untaught)
    assert not layer.is_set()
    torch.testing.assert_close(layer(9.0 * batch).mean(), torch.zeros(()).double(), rtol=0, atol=1e-12)


def test_once_set_the_flag_is_not_read_again_on_a_gpu(batch: torch.Tensor) -> None:
    """The meta device stands for a GPU: reading a value there raises."""
    layer = ActNorm(3).double()
    layer(batch)
    layer.to("meta")
    for copied in (layer, copy.deepcopy(layer)):
        copied.train()(batch.to("meta"))
    layer.load_state_dict(layer.state_dict())
    with pytest.raises(RuntimeError, match="meta"):
        layer(batch.to("meta"))


def test_a_batch_of_padding_alone_teaches_nothing(batch: torch.Tensor) -> None:
    layer = ActNorm(3).double()
    layer(batch, torch.ones(16, 7, dtype=torch.bool))
    assert not layer.initialized
    layer(batch)
    assert layer.initialized


def test_a_feature_that_does_not_vary_keeps_its_scale() -> None:
    x = torch.randn(4, 5, 2)
    x[..., 1] = 7.0
    layer = ActNorm(2)
    y = layer(x)
    assert torch.equal(y[..., 1], torch.zeros(4, 5))
    assert layer.log_scale[1] == 0.0


def test_a_first_batch_that_is_not_finite_is_refused() -> None:
    with pytest.raises(ValueError, match="first batch has entries that are NaN or infinite"):
        ActNorm(2)(torch.full((1, 2, 2), float("nan")))


def test_log_det_counts_unpadded_tokens() -> None:
    layer = ActNorm(3).double().eval()
    with torch.no_grad():
        layer.log_scale.normal_()
        layer.shift.normal_()
    x = torch.randn(3, 4, 3, dtype=torch.float64)
    padded = torch.tensor([[0, 0, 0, 0], [0, 0, 1, 1], [1, 1, 1, 1]]).bool()
    _, log_det = layer.forward_and_log_det(x, padded)
    for b in range(3):
        jacobian = dense_jacobian(lambda z, b=b: layer(z, padded[b : b + 1]), x[b : b + 1])
        torch.testing.assert_close(log_det[b], torch.linalg.slogdet(jacobian)[1], rtol=1e-12, atol=1e-12)


def test_the_certificate_is_the_largest_scale() -> None:
    layer = ActNorm(3).eval()
    with torch.no_grad():
        layer.log_scale.copy_(torch.tensor([0.0, 2.0, -3.0]).log1p().nan_to_num(-1.0))
    assert lf.certify(layer).bound == pytest.approx(3.0)
    with torch.no_grad():
        layer.log_scale.fill_(-1.0)
    assert lf.certify(layer).bound == 1.0, "padded tokens pass unchanged"


def test_act_norm_in_a_branch_must_be_set_first() -> None:
    norm = ActNorm(4)
    with pytest.raises(lf.NotCertifiable, match="first training batch"):
        lf.InvertibleResidual(nn.Sequential(norm, lf.SpectralLinear(4, 4)), 0.5)
    x = 1e-3 * torch.randn(8, 5, 4)
    norm.initialize(x)
    block = lf.InvertibleResidual(nn.Sequential(norm, lf.SpectralLinear(4, 4)), 0.5)
    first, second = (block.forward_and_log_det(x, method="exact")[1] for _ in range(2))
    assert torch.equal(first, second)
    assert bool((first.abs() <= 20 * 0.7).all())


def test_a_wrong_shape_is_named() -> None:
    with pytest.raises(ValueError, match=r"must be \(B, T, D\) with D=3, got"):
        ActNorm(3)(torch.zeros(4, 3))
