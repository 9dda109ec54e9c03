"""Invertible blocks and flows: forward, inverse, steps and log-determinants, in every mode."""

from __future__ import annotations

import tempfile
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributions import Normal

import lipformer as lf
from lipformer import flows
from tests.gpu.case import DRAWN, Case, by_name, new
from tests.gpu.cases_layers import attention

CAUSAL = attention(causal=True, positions="alibi", value_proj=False)
UNMASKED = attention(causal=False, max_len=4)
FEED_FORWARD = new(lf.FeedForward, 8, 16)


def tokens() -> Tensor:
    """Few, since inverses and log-determinants cost more than layers."""
    return torch.randn(2, 4, 8)


def padding() -> Tensor:
    """The last token of the last sample is padding."""
    return torch.tensor([[False] * 4, [False] * 3 + [True]])


PADDED: dict[str, Any] = {"key_padding_mask": padding}


def context() -> Tensor:
    """A vector for each sample."""
    return torch.randn(2, 3)


def context_tokens() -> Tensor:
    """Five tokens for each sample."""
    return torch.randn(2, 5, 3)


GIVEN: dict[str, Any] = {"context": context}


def generator() -> torch.Generator:
    """Where modules are built: on the CPU."""
    return torch.Generator().manual_seed(0)


def seeded(x: Tensor) -> torch.Generator:
    """A generator on the device of x."""
    return torch.Generator(x.device).manual_seed(0)


def inverse(block: Any, y: Tensor, **mask: Tensor) -> Any:
    """The inverse with its gradient, which is solved for too."""
    y.requires_grad_()
    x = block.inverse(y, **mask)
    return x, torch.autograd.grad(x.square().sum(), y)


def inverse_step(block: Any, y: Tensor) -> Any:
    """Token by token, then the rest at once."""
    first, cache = block.inverse_step(y[:, :2])
    second, _ = block.inverse_step(y[:, 2:], cache)
    return first, second


def forward_and_log_det(block: Any, x: Tensor, **options: Any) -> Any:
    """As in training: a generator of the device would have to be read."""
    return block.forward_and_log_det(x, **options)


def inverse_and_log_det(block: Any, y: Tensor, method: str | None = None, **mask: Tensor) -> Any:
    options = {} if method is None else {"method": method, "generator": seeded(y)}
    return block.eval().inverse_and_log_det(y, **mask, **options)


def log_prob(flow: Any, x: Tensor, **options: Any) -> Tensor:
    return flow.log_prob(x, **options)


def sample(flow: Any, x: Tensor, context: Tensor | None = None, **mask: Tensor) -> Tensor:
    flow.initialize(x, context=context)
    return flow.eval().sample(2, 4, generator=seeded(x), context=context, **mask)


def encoded(encoder: Any, x: Tensor, context: Tensor) -> Tensor:
    """Context tokens of which the last are padding."""
    mask = torch.arange(5, device=x.device).expand(2, -1) >= 3
    return encoder(context, mask)


def continued(flow: Any, x: Tensor) -> Any:
    """Two continuations of each prefix, and their density."""
    flow.initialize(x)
    new = flow.eval().continue_(x[:, :2], 2, num_samples=2, generator=seeded(x))
    return new, flow.log_prob(new[0], prefix=x[:, :2])


def initialized(flow: Any, x: Tensor) -> Tensor:
    flow.initialize(x)
    return flow(x)


def inverse_gain(block: Any, x: Tensor) -> Tensor:
    return flows.estimate_inverse_gain(block, x, steps=3, generator=seeded(x))


def residual_log_det(block: Any, x: Tensor) -> Any:
    out, log_det = flows.residual_log_det(block.branch, x, method="exact", rate=0.9)
    return out, log_det.value


def estimates(block: Any, x: Tensor) -> Any:
    """A generator of the CPU serves any device."""
    options = {"rate": 0.9, "generator": generator()}
    return [
        flows.residual_log_det(block.branch, x, method=method, **options)[1].value
        for method in ("series", "roulette")
    ]


def solved(block: Any, y: Tensor) -> Tensor:
    def size(x: Tensor) -> Tensor:
        return x.flatten(1).norm(dim=-1)

    return flows.solve_fixed_point(lambda x, _: block.branch(x), y, rate=0.9, measure=size)[0]


def transformed(block: Any, x: Tensor) -> Any:
    """As a transform of torch.distributions."""
    transform = flows.to_torch_transform(block, method="exact")
    y = transform(x)
    return y, transform.log_abs_det_jacobian(x, y)


def vectors(flow: Any, x: Tensor) -> Any:
    """Each token as an event of a transform, and the flow through files."""
    with tempfile.TemporaryDirectory() as directory:
        flow.save_pretrained(directory)
        again = type(flow).from_pretrained(directory, device=x.device)
    transform = flows.to_torch_transform(again, vectors="token")
    y = transform(x)
    return y, transform.log_abs_det_jacobian(x, y)


def case(spec: Any, **options: Any) -> Case:
    return Case(spec, (tokens,), **options)


def residual(branch: Any, **options: Any) -> Any:
    return new(flows.InvertibleResidual, branch, **options)


def flow(**options: Any) -> Any:
    return new(
        flows.AttentionFlow, 8, **{"depth": 1, "num_heads": 2, "hidden": 16, "seq_len": 4, **options}
    )


EQUIVARIANT = flow(equivariant=True)  # which takes no padding
BLOCKS = [
    residual(CAUSAL, mode="causal"),
    residual(UNMASKED, norm="l2"),
    residual(UNMASKED, norm="token", accelerate=False),
    residual(UNMASKED, norm="linf"),
    residual(UNMASKED, coeff=0.5, seq_len=4),
    residual(FEED_FORWARD),
    residual(new(nn.Sequential, new(lf.TokenShift, 8), CAUSAL), mode="causal"),
]
CONDITIONAL = [
    new(flows.ContextAffine, 8, 3, limit=1.0),
    residual(new(nn.Sequential, new(lf.layers.ContextBias, 8, 3), new(lf.LipSwish), UNMASKED)),
    residual(new(nn.Sequential, new(lf.layers.ContextBias, 8, 3), CAUSAL), mode="causal"),
]
TOKEN_MAPS = [
    new(flows.ActNorm, 8),
    new(flows.InvertibleLinear, 8),
    new(flows.MeanFreeScale),
    new(flows.Permutation, 8, generator=new(generator)),
]
FLOWS_OF = [
    flow(),
    flow(mode="causal", seq_len=None, coeff=0.8),
    flow(causal=True, positions="rotary"),
    flow(mode="causal", width=8, past_bias=True),
    flow(key_radius=1.0),
    flow(width=4, linear="plu", feed_forwards=2),
    flow(mode="causal", linear="permutation", base=Normal(0.0, 2.0, validate_args=False)),
    flow(log_det="series", terms=4, probes=2),
    new(
        flows.Flow,
        new(flows.InvertibleSequential, new(flows.ActNorm, 8), residual(CAUSAL, mode="causal")),
        base=Normal(0.0, 2.0, validate_args=False),
        dim=8,
        seq_len=6,
    ),
]
CONDITIONAL_FLOWS = [
    flow(context_dim=3, width=4),
    flow(context_dim=3, mode="causal"),
    new(
        flows.Flow,
        new(flows.InvertibleSequential, new(flows.ContextAffine, 8, 6)),
        dim=8,
        seq_len=4,
        encoder=new(flows.ContextEncoder, 3, 6),
    ),
]
METHODS = (
    (residual(UNMASKED, norm="l2"), ("exact", "series", "roulette")),
    (residual(CAUSAL, mode="causal"), ("causal",)),
    (residual(FEED_FORWARD, log_det="causal"), (None, "exact")),
    (residual(new(lf.layers.PairRadial)), ("exact",)),
    (residual(UNMASKED, norm="l2", log_det="series", terms=3, probes=2), (None,)),
)
FLOWS = by_name(
    [
        *(case(block, named=mask) for block in (*BLOCKS, *TOKEN_MAPS) for mask in ({}, PADDED)),
        *(case(block, call=inverse, named=PADDED, trains=False) for block in (*BLOCKS, *TOKEN_MAPS)),
        *(case(BLOCKS[i], call=inverse, trains=False) for i in (0, 1)),
        *(case(BLOCKS[i], call=inverse_step, trains=False) for i in (0, 5)),
        *(
            case(block, call=forward_and_log_det, named={"method": method, **mask}, compared=DRAWN)
            for block, methods in METHODS
            for method in methods
            for mask in ({}, PADDED)
        ),
        *(
            case(block, call=inverse_and_log_det, named={"method": method}, trains=False, compared=DRAWN)
            for block, methods in METHODS
            for method in methods
        ),
        *(case(block, call=forward_and_log_det) for block in TOKEN_MAPS),
        *(
            case(made, call=log_prob, named=mask, compared=DRAWN)
            for made in FLOWS_OF
            for mask in ({}, PADDED)
        ),
        *(
            case(made, call=call, named={**GIVEN, **PADDED}, trains=trains)
            for made in CONDITIONAL
            for call, trains in ((forward_and_log_det, True), (inverse, False))
        ),
        *(
            case(made, call=log_prob, named={"context": form}, compared=DRAWN)
            for made, form in zip(
                CONDITIONAL_FLOWS, (context, context_tokens, context_tokens), strict=True
            )
        ),
        *(
            case(made, call=sample, named=GIVEN, trains=False, compared=DRAWN)
            for made in CONDITIONAL_FLOWS
        ),
        case(new(flows.ContextEncoder, 3, 6), call=encoded, named={"context": context_tokens}),
        case(FLOWS_OF[0], call=log_prob, named={"method": "exact"}),
        case(EQUIVARIANT, call=log_prob, compared=DRAWN),
        case(EQUIVARIANT, call=sample, trains=False, compared=DRAWN),
        case(FLOWS_OF[0], call=log_prob, named={"method": "series"}, compared=DRAWN),
        *(case(made, call=sample, trains=False, compared=DRAWN) for made in FLOWS_OF),
        case(FLOWS_OF[1], call=sample, named=PADDED, trains=False, compared=DRAWN),
        *(case(FLOWS_OF[1], call=call, trains=False) for call in (initialized, vectors)),
        case(FLOWS_OF[1], call=continued, trains=False, compared=DRAWN),
        *(
            case(BLOCKS[1], call=call, trains=False)
            for call in (residual_log_det, estimates, solved, transformed)
        ),
        case(BLOCKS[1], call=inverse_gain, trains=False, compared=DRAWN),
    ]
)
