"""certify with an example: operations against dense Jacobians, forwards of their own, refusals."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from typing import Any

import einops
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import lipformer as lf
from lipformer.certificate.bounds import product_up
from tests.oracles import dense_jacobian
from tests.promises.oracle import gain

NORMS = ("l2", "token", "self", "linf")
B, N, D = 3, 4, 6


class Plain(nn.Module):
    """A module without a rule, of a given forward."""

    def __init__(self, fn: Callable[..., Any], **parts: nn.Module) -> None:
        super().__init__()
        self.fn = fn
        for name, part in parts.items():
            self.add_module(name, part)

    def forward(self, x: Tensor) -> Any:
        return self.fn(self, x) if len(inspect.signature(self.fn).parameters) == 2 else self.fn(x)


def example(*shape: int) -> Tensor:
    return torch.randn(shape or (B, N, D), dtype=torch.float64)


def true_gain(module: nn.Module, x: Tensor, norm: str) -> float | None:
    """At one sample."""
    jacobian = dense_jacobian(module, x[:1])[None]
    out = module(x[:1])
    found = gain(jacobian, norm, out.shape[-1], x.shape[-1])
    return None if found is None else float(found.max())


MIX = torch.tensor([0.5, -2.0, 1.0, 0.0, 3.0, 1.0], dtype=torch.float64)
MASK = torch.tensor([[False], [False], [True], [False]])
# What is done to tokens (B, N, D), and the norms it has a bound in; capitals: the bound is attained.
OPERATIONS: dict[str, tuple[Callable[[Tensor], Tensor], str]] = {
    "mean over tokens": (lambda x: x.mean(1), "L2 token LINF"),
    "mean over all": (lambda x: x.mean((1, 2)), "L2 LINF"),
    "mean over features, kept": (lambda x: x.mean(-1, keepdim=True), "L2 LINF"),
    "sum over tokens": (lambda x: x.sum(1), "L2 token LINF"),
    "maximum over tokens": (lambda x: x.amax(1), "L2 token LINF"),
    "max of torch": (lambda x: x.max(1).values, "L2 token LINF"),
    "minimum": (lambda x: x.min(dim=2)[0], "L2 LINF"),
    "flatten": (lambda x: x.flatten(1), "L2 LINF"),
    "reshape": (lambda x: x.reshape(len(x), 2, 12), "L2 LINF"),
    "reshape of leading dimensions": (lambda x: x.view(-1, 2, 2, D), "L2 TOKEN LINF"),
    "a class token's row": (lambda x: x[:, 0], "L2 TOKEN LINF"),
    "a slice of tokens": (lambda x: x[:, 1:3], "L2 TOKEN LINF"),
    "a slice of features": (lambda x: x[..., 1:4], "L2 TOKEN SELF LINF"),
    "every second token": (lambda x: x[:, ::2], "L2 TOKEN LINF"),
    "a feature": (lambda x: x[..., 2], "L2 LINF"),
    "chunks added": (lambda x: sum(x.chunk(2, -1)), "l2 token self LINF"),
    "one chunk": (lambda x: x.chunk(2, dim=1)[1], "L2 TOKEN LINF"),
    "unbind": (lambda x: x.unbind(1)[1], "L2 TOKEN LINF"),
    "transpose": (lambda x: x.transpose(1, 2), "L2 LINF"),
    "einops": (lambda x: einops.rearrange(x, "b (h w) d -> b w h d", h=2), "L2 TOKEN LINF"),
    "einops' mean": (lambda x: einops.reduce(x, "b n d -> b d", "mean"), "L2 LINF"),
    "squeeze": (lambda x: x.unsqueeze(1).squeeze(1), "L2 TOKEN LINF"),
    "flip": (lambda x: x.flip(1), "L2 TOKEN LINF"),
    "roll": (lambda x: x.roll(1, 1), "L2 TOKEN LINF"),
    "pad": (lambda x: F.pad(x, (0, 0, 1, 0)), "L2 TOKEN LINF"),
    "add to itself": (lambda x: x + x, "L2 TOKEN SELF LINF"),
    "add, weighted": (lambda x: torch.add(x, x, alpha=-0.5), "l2 token self linf"),
    "subtract": (lambda x: 3 - 2 * x.flip(1), "L2 TOKEN LINF"),
    "add a constant": (lambda x: x + MIX, "L2 TOKEN SELF LINF"),
    "add the mean": (lambda x: x + x.mean(1, keepdim=True), "L2 token LINF"),
    "add the mean's row": (lambda x: x.mean(1, keepdim=True) + torch.ones(1, N, 1), "L2 token LINF"),
    "constant factor": (lambda x: 0.3 * x, "L2 TOKEN SELF LINF"),
    "constant factors": (lambda x: MIX * x, "L2 TOKEN SELF LINF"),
    "constant divisor": (lambda x: x / (1.5 + MASK.double()), "L2 TOKEN SELF LINF"),
    "masked mean": (lambda x: (x * ~MASK).sum(1) / (~MASK).sum(), "l2 token linf"),
    "masked fill": (lambda x: x.masked_fill(MASK, -1.0), "L2 TOKEN SELF LINF"),
    "where": (lambda x: torch.where(MASK, x.flip(1), x), "l2 token LINF"),
    "cat of tokens": (lambda x: torch.cat([x, 2 * x], 1), "L2 TOKEN LINF"),
    "cat of features": (lambda x: torch.cat([x, 2 * x], -1), "L2 TOKEN SELF LINF"),
    "cat of a constant": (lambda x: torch.cat([torch.ones(len(x), 1, D), x], 1), "L2 TOKEN LINF"),
    "stack": (lambda x: torch.stack([x, x], 1), "L2 TOKEN LINF"),
    "expand": (lambda x: x[:, :1].expand(-1, 5, -1), "L2 TOKEN LINF"),
    "repeat": (lambda x: x.repeat(1, 1, 3), "L2 TOKEN SELF LINF"),
    "in place": (lambda x: (x * 2).add_(x).mul_(0.5), "L2 TOKEN SELF LINF"),
    "relu": (lambda x: F.relu(x), "l2 token self linf"),
    "gelu": (lambda x: F.gelu(x, approximate="tanh"), "l2 token self linf"),
    "silu and more": (lambda x: torch.tanh(F.silu(x)) + x.sigmoid(), "l2 token self linf"),
    "leaky relu": (lambda x: F.leaky_relu(x, 1.7).clamp(-9, 9), "l2 token self linf"),
    "softmax": (lambda x: x.softmax(-1), "l2 token self linf"),
    "to one pixel": (lambda x: F.adaptive_avg_pool1d(x, 1), "L2 LINF"),
    "to other pixels": (lambda x: F.adaptive_avg_pool1d(x, 4), "l2 LINF"),
    "to more pixels": (lambda x: F.adaptive_avg_pool1d(x, 12), "L2 LINF"),
    "dropout, in eval": (lambda x: F.dropout(x, 0.5, training=False) + 0.0, "L2 TOKEN SELF LINF"),
    "autograd function": (lambda x: Twice.apply(x), "L2 TOKEN SELF LINF"),
    "nothing": (lambda x: x, "L2 TOKEN SELF LINF"),
}  # fmt: skip


class Twice(torch.autograd.Function):
    """Passes by __torch_function__."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return 2 * x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return 2 * grad


@pytest.mark.parametrize("name", OPERATIONS)
def test_operations_have_their_constants(name: str) -> None:
    fn, known = OPERATIONS[name]
    module, x = Plain(fn), example()
    for norm in NORMS:
        if norm not in known.lower().split():
            with pytest.raises(lf.NotCertifiable):
                lf.certify(module, example=x, norm=norm)
            continue
        bound = lf.certify(module, example=x, norm=norm).bound
        found = [g for s in (0.0, 1.0, 1.5) if (g := true_gain(module, s * x, norm)) is not None]
        assert max(found) <= bound * (1 + 1e-9), norm
        if norm.upper() in known.split():
            assert max(found) >= bound * (1 - 1e-3), norm


def test_a_maximum_in_the_token_norm_is_attained() -> None:
    """Each of N tokens moves one feature of the maximum."""
    for n, d in ((3, 5), (5, 3)):
        x = torch.zeros(1, n, d, dtype=torch.float64)
        for i in range(n):
            x[0, i, i % d] = 1.0
        bound = lf.certify(Plain(lambda x: x.amax(1)), example=x, norm="token").bound
        moved = (x * 0.5).amax(1) - x.amax(1)
        assert moved.norm() / 0.5 == pytest.approx(bound)


# --- models -----------------------------------------------------------------------------------


class Encoder(nn.Module):
    """What a user writes by hand."""

    def __init__(self, vocabulary: int | None = None) -> None:
        super().__init__()
        self.embed = lf.SpectralLinear(D, 8) if vocabulary is None else nn.Embedding(vocabulary, 8)
        self.positions = nn.Parameter(torch.randn(N, 8))
        self.blocks = nn.ModuleList()
        for _ in range(2):
            attention = lf.L2MultiheadAttention(8, 2, batch_first=True)
            self.blocks.append(lf.ConvexResidual(lf.Contractive(attention, 1.0, norm="l2", seq_len=N)))
            self.blocks.append(lf.ConvexResidual(lf.FeedForward(8, 16)))
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x.view(-1, *x.shape[1:])) + self.positions
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean(dim=1))


def by_hand(model: Encoder, *before: nn.Module) -> float:
    parts = (*before, *model.blocks, lf.TokenMean(N), model.head)
    return product_up(lf.certify(part).bound for part in parts)


def test_a_hand_written_encoder_gets_the_bound_composed_by_hand() -> None:
    model = Encoder().double().eval()
    certificate = lf.certify(model, example=example(1, N, D))
    assert certificate.bound == by_hand(model, model.embed)
    assert certificate.domain == f"for samples of shape ({N}, {D})"
    assert certificate.seq_len == N
    assert [part.path for part in certificate.parts][:2] == ["embed", "blocks.0"]
    assert "mean" in str(certificate)
    assert true_gain(model, example(), "l2") <= certificate.bound
    for norm in ("token", "linf"):
        assert lf.certify(model, example=example(), norm=norm).bound > 0
    # Nothing is left behind.
    assert nn.Module.__call__ is nn.Module._wrapped_call_impl
    assert model(example()).shape == (B, 3)


def test_symbols_count_from_their_embedding() -> None:
    model = Encoder(vocabulary=11).eval()
    ids = torch.randint(11, (2, N))
    certificate = lf.certify(model, example=ids)
    assert certificate.bound == by_hand(model)
    assert "from embed" in certificate.domain
    with pytest.raises(lf.NotCertifiable, match="example=ids"):
        lf.certify(nn.Sequential(nn.Embedding(3, 4), nn.Linear(4, 4)))
    twice = Plain(lambda self, x: self.a(x) + self.b(x), a=nn.Embedding(11, 4), b=nn.Embedding(11, 4))
    with pytest.raises(lf.NotCertifiable, match="b looks the symbols up again, after a"):
        lf.certify(twice, example=ids)
    language_model = lf.models.lipschitz(vocab_size=11, dim=8, num_heads=2, num_layers=1).eval()
    found, known = lf.certify(language_model, example=ids), lf.certify(language_model, seq_len=N)
    assert found.bound == pytest.approx(known.bound, rel=0.1)


def test_attention_called_as_torch_calls_it() -> None:
    def forward(self: nn.Module, x: Tensor) -> Tensor:
        return x + self.attention(x, x, x)[0]

    model = Plain(forward, attention=lf.L2MultiheadAttention(D, 2, batch_first=True)).double()
    bound = lf.certify(model, example=example()).bound
    assert bound == pytest.approx(1 + lf.certify(model.attention, seq_len=N).bound)
    model.fn = lambda self, x: self.attention(x, x, x)[1]
    with pytest.raises(lf.NotCertifiable, match="of L2MultiheadAttention other than the first"):
        lf.certify(model, example=example())


def test_containers_and_hooks_are_followed_into() -> None:
    block = Plain(lambda x: 2 * x)
    linear = nn.Linear(D, D, dtype=torch.float64)
    model = nn.Sequential(lf.Residual(block), nn.Sequential(linear, block), nn.ReLU(inplace=True))
    bound = lf.certify(model, example=example()).bound
    assert bound == pytest.approx(6 * lf.certify(linear).bound)
    block.register_forward_pre_hook(lambda module, given: (3 * given[0],))
    bound = lf.certify(model, example=example()).bound
    assert bound == pytest.approx(42 * lf.certify(linear).bound)
    assert true_gain(model, example(), "l2") <= bound
    linear.register_forward_hook(lambda module, given, out: 10 * out)
    with pytest.raises(lf.NotCertifiable) as caught:  # what F.linear does inside it has no rule
        lf.certify(model, example=example())
    assert caught.value.path == "1.0"


def test_arguments_by_name_and_compiled_functions() -> None:
    compiled = torch.compile(lambda x: 2 * x, backend="eager")
    parts = {"a": nn.Linear(D, D), "b": nn.Identity()}
    model = Plain(lambda self, x: compiled(self.b(self.a(input=x))), **parts).double()
    model.b = torch.compile(model.b, backend="eager")
    model.a.compile(backend="eager")
    bound = lf.certify(model, example=example()).bound
    assert bound == pytest.approx(2 * lf.certify(parts["a"]).bound)


def test_the_batch_does_not_matter() -> None:
    model = Encoder().double().eval()
    bounds = {lf.certify(model, example=example(b, N, D)).bound for b in (1, N)}
    assert len(bounds) == 1


# --- refusals ---------------------------------------------------------------------------------


def noisy(x: Tensor) -> Tensor:
    return x * torch.rand(1, dtype=x.dtype)


def swallow(x: Tensor) -> Tensor:
    try:
        return x * x
    except Exception:
        return x


def overwritten(self: nn.Module, x: Tensor) -> Tensor:
    y = 3 * x
    view = y[:, 0]
    return self.relu(y) + view.unsqueeze(1)


def counting(self: nn.Module, x: Tensor) -> Tensor:
    self.calls = getattr(self, "calls", 0) + 1
    return x * self.calls


def written(self: nn.Module, x: Tensor) -> Tensor:
    self.norm.running_var.add_(1.0)
    return x / self.norm.running_var[0]


def into_a_buffer(x: Tensor) -> Tensor:
    out = torch.zeros_like(x)
    out[:, 0] = 5 * x[:, 0]
    return out


def into_itself(x: Tensor) -> Tensor:
    y = x * 1
    row = y[:, 0]
    row.mul_(5)
    return y


LINES: dict[str, tuple[Callable[..., Any], str]] = {
    "a product": (lambda x: x * x, "product of two values"),
    "a quotient": (lambda x: 1 / x, "aten.reciprocal"),
    "its length": (lambda x: x / x.norm(), "linalg_vector_norm"),
    "a matrix product": (lambda x: x @ x.transpose(1, 2), "bmm"),
    "dot products": (lambda x: F.scaled_dot_product_attention(x, x, x), "attention"),
    "a branch on values": (lambda x: x if x.mean() > 0 else 100 * x, "dimension 0"),
    "a reading": (lambda x: x[0, 0, 0].item() * x, "dimension 0"),
    "a comparison": (lambda x: torch.where(x > 0, 5.0, 0.0) * x, "aten.gt"),
    "noise": (noisy, "draws random numbers"),
    "dropout": (lambda x: F.dropout(x, 0.5), "draws random numbers"),
    "a caught refusal": (swallow, "product of two values"),
    "samples that mix": (lambda x: x + x.mean(0, keepdim=True), "along dimension 0"),
    "samples that move": (lambda x: x.flip(0), "along dimension 0"),
    "samples that are tokens": (lambda x: x.reshape(1, -1, D), "along dimension 0"),
    "a sample of the batch": (lambda x: x - x[:1], "along dimension 0"),
    "samples transposed": (lambda x: x.transpose(0, 1), "along dimension 0"),
    "batch in front": (lambda x: x[None], "along dimension 0"),
    "a buffer": (into_a_buffer, "writes into a tensor"),
    "a view in place": (into_itself, "written over in place"),
    "zero divisor": (lambda x: x / MIX, "bound of aten.div is inf"),
    "integers": (lambda x: x.long(), "torch.int64"),
    "bits": (lambda x: x.view(torch.float32), "bits of its input"),
    "a list": (lambda x: torch.tensor(x.tolist()), "RuntimeError"),
    "numpy": (lambda x: torch.from_numpy(x.numpy()), "RuntimeError"),
}


@pytest.mark.parametrize("name", LINES)
@pytest.mark.filterwarnings("ignore")
def test_what_cannot_be_followed_is_named_by_its_line(name: str) -> None:
    fn, reason = LINES[name]
    with pytest.raises(lf.NotCertifiable, match=reason) as caught:
        lf.certify(nn.Sequential(nn.Linear(D, D), Plain(fn)).double(), example=example())
    assert f"{__file__}:" in caught.value.reason
    assert caught.value.path in ("", "1")
    assert nn.Module.__call__ is nn.Module._wrapped_call_impl


def test_state_is_noticed() -> None:
    with pytest.raises(lf.NotCertifiable, match="differs from that of a plain run"):
        lf.certify(Plain(counting), example=example())
    with pytest.raises(lf.NotCertifiable, match="with one more sample"):
        lf.certify(Plain(lambda x: x / len(x)), example=example())
    with pytest.raises(lf.NotCertifiable, match="changes a parameter or buffer"):
        lf.certify(Plain(written, norm=nn.BatchNorm1d(3)).double().eval(), example=example())
    with pytest.raises(lf.NotCertifiable, match="written over in place"):
        lf.certify(Plain(overwritten, relu=nn.ReLU(inplace=True)), example=example())


def test_rules_speak_for_their_modules() -> None:
    inner = nn.MultiheadAttention(D, 2, batch_first=True)
    model = Plain(lambda self, x: x + self.block(x), block=Plain(lambda s, x: s.a(x, x, x)[0], a=inner))
    with pytest.raises(lf.NotCertifiable, match="dot-product attention has no finite") as caught:
        lf.certify(model.double(), example=example())
    assert caught.value.path == "block.a"
    dropout = Plain(lambda self, x: self.drop(x), drop=nn.Dropout(0.5))
    with pytest.raises(lf.NotCertifiable, match="random in training mode"):
        lf.certify(dropout, example=example())
    masked = Plain(lambda self, x: self.shift(x, x[..., 0] * 0), shift=lf.TokenShift(D))
    with pytest.raises(lf.NotCertifiable, match="as x, key_padding_mask, and its bound"):
        lf.certify(masked, example=example())
    time_first = lf.L2MultiheadAttention(D, 2, batch_first=False)
    with pytest.raises(lf.NotCertifiable, match="samples may influence"):
        lf.certify(Plain(lambda self, x: self.a(x)[0], a=time_first).double(), example=example())


def test_questions_that_do_not_fit() -> None:
    linear = nn.Linear(D, D)
    for question in ({"seq_len": 3}, {"at": example(), "radius": 1.0}):
        with pytest.raises(ValueError, match="leave out seq_len"):
            lf.certify(linear, example=example(), **question)
    with pytest.raises(ValueError, match=r"one tensor of samples, got dict: .* \[\"input_ids\"\]"):
        lf.certify(linear, example={"input_ids": torch.ones(1, 2)})
    with pytest.raises(ValueError, match=r"a batch of samples \(B, \.\.\.\), got shape \(3,\)"):
        lf.certify(linear, example=torch.ones(3))
    assert lf.certify(Plain(lambda x: {"y": 2 * x, "z": x}), example=example()).bound == 2.0
    for constant in (lambda x: [x], lambda x: torch.ones(len(x), 2)):
        with pytest.raises(lf.NotCertifiable, match="does not follow from the example"):
            lf.certify(Plain(constant), example=example())


@pytest.mark.parametrize("seed", range(8))
def test_random_forwards(seed: int) -> None:
    """Random chains of the operations above, sums of them and modules between."""
    rng = torch.Generator().manual_seed(seed)
    names = [n for n in OPERATIONS if OPERATIONS[n][0](example()).shape == (B, N, D)]

    def draw() -> Callable[[Tensor], Tensor]:
        return OPERATIONS[names[int(torch.randint(len(names), (), generator=rng))]][0]

    fns = [draw() for _ in range(4)]
    linear = nn.Linear(D, D).double()
    layer = copy.deepcopy(linear)

    def forward(self: nn.Module, x: Tensor) -> Tensor:
        y = self.a(fns[0](x)) - fns[1](x)
        return torch.cat([fns[2](y).mean(1), self.b(fns[3](y) + x).amax(1)], -1)

    model = Plain(forward, a=linear, b=layer)
    for norm in ("l2", "token", "linf"):
        bound = lf.certify(model, example=example(), norm=norm).bound
        gains = [true_gain(model, s * example(), norm) for s in (0.1, 1.0, 3.0)]
        assert max(gains) <= bound * (1 + 1e-9)
