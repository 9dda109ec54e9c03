"""Random trees of modules, as plain descriptions that can be printed, pasted, shrunk and built.

A node is ``(kind, options, children)``. Options may hold ``seed`` (of the weights), ``scale`` (of the
weights), ``share`` (nodes of one number are one module), ``params`` (parametrizations of the weight) and
``defect``: ``(name, value, early)``, something done to the module behind lipformer's back, before the
modules around it are built (early) or when all are.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.utils.parametrize as parametrize
from torch import Tensor, nn
from torch.nn.utils import parametrizations, prune

import lipformer as lf
from lipformer.layers.scaled import FirstOutput, Scaled
from lipformer.models.self_attention import DotProductSelfAttention

Node = tuple  # (kind, options, children)
DTYPES = ("float16", "bfloat16", "float32", "float64")
EXTREMES = {
    "float16": (1e-7, 1e-5, 1e3, 1e4),
    "bfloat16": (1e-38, 1e-20, 1e20, 1e37),
    "float32": (1e-40, 1e-20, 1e20, 1e37),
    "float64": (1e-200, 1e-100, 1e100, 1e200),
}
ACTIVATIONS = {
    "relu": nn.ReLU, "gelu": nn.GELU, "tanh": nn.Tanh, "silu": nn.SiLU, "elu": lambda: nn.ELU(1.5),
    "leaky": lambda: nn.LeakyReLU(0.1), "prelu": lambda: nn.PReLU(init=-1.3), "mish": nn.Mish,
    "softplus": nn.Softplus, "sigmoid": nn.Sigmoid, "selu": nn.SELU, "lipswish": lf.LipSwish,
    "identity": nn.Identity, "hardswish": nn.Hardswish, "gelu_tanh": lambda: nn.GELU("tanh"),
}  # fmt: skip


@dataclass(frozen=True)
class Case:
    """A tree and the question about it: paste it into ``checks.examine``.

    Attributes:
        tree: the description.
        shape: of one sample, without the batch.
        dtype: of the weights.
        autocast: the dtype that is asked and run in, or None.
        batch_axis: 0, or 1 for tokens (N, B, D).
        seq_len: of the question.
        seed: of the inputs.
    """

    tree: Node
    shape: tuple[int, ...]
    dtype: str = "float64"
    autocast: str | None = None
    batch_axis: int = 0
    seq_len: int | None = None
    seed: int = 0


def nodes(tree: Node) -> list[Node]:
    """All nodes of a tree."""
    return [tree, *(node for child in tree[2] for node in nodes(child))]


def is_local(case: Case) -> bool:
    """Whether a case has dot products, hence no global constant."""
    return any(kind in ("dot_product", "torch_attention") for kind, _, _ in nodes(case.tree))


def planted(case: Case) -> list[str]:
    """What was done behind lipformer's back in a case."""
    found = []
    for kind, options, _ in nodes(case.tree):
        if "defect" in options:
            name, value, early = options["defect"]
            found.append(f"{name}{'' if value is None else f'={value}'} on {kind}{' early' * early}")
        if "planted" in options:
            found.append(f"{options['planted']} in {kind}")
    return found


# --- building ---------------------------------------------------------------------------------


class LowRank(nn.Module):
    """W + a b, as LoRA's parametrizations add it."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.randn(weight.shape[0], 1))
        self.b = nn.Parameter(torch.randn(1, weight[0].numel()))

    def forward(self, weight: Tensor) -> Tensor:
        return weight + (self.a @ self.b).reshape(weight.shape)


class Triple(nn.Module):
    """3 W, put behind another parametrization."""

    def forward(self, weight: Tensor) -> Tensor:
        return 3.0 * weight


def add_parametrization(module: nn.Module, name: str) -> None:
    if name == "spectral":
        lf.spectral_bound(module, coeff=0.8)
    elif name == "normalize":
        lf.spectral_bound(module, coeff=2.0, mode="normalize")
    elif name == "weight_norm":
        parametrizations.weight_norm(module)
    elif name == "orthogonal":
        parametrizations.orthogonal(module)
    elif name == "spectral_norm":
        parametrizations.spectral_norm(module)
    elif name == "low_rank":
        parametrize.register_parametrization(module, "weight", LowRank(module.weight))
    elif name == "triple":
        parametrize.register_parametrization(module, "weight", Triple())
    else:
        assert name == "prune"
        prune.l1_unstructured(module, "weight", 0.3)


def triple(out: object) -> object:
    """3 times an output, the first of several."""
    return (3.0 * out[0], *out[1:]) if isinstance(out, tuple) else 3.0 * out


def override(module: nn.Module, method: str) -> None:
    """Makes a module one of a subclass whose method gives three times what it gave."""
    cls = type(module)
    before = getattr(cls, method)

    def changed(self: nn.Module, *args: object, **kwargs: object) -> object:
        return triple(before(self, *args, **kwargs))

    module.__class__ = type("Odd", (cls,), {method: changed})


GLOBAL_HOOKS: list = []


def damage(module: nn.Module, name: str, value: object) -> None:
    """Does to a module what its description says."""
    if name == "override":
        override(module, value)
    elif name == "instance_forward":
        before = module.forward
        module.forward = lambda *args, **kwargs: triple(before(*args, **kwargs))
    elif name == "hook":
        module.register_forward_hook(lambda module, args, out: triple(out))
    elif name == "pre_hook":
        module.register_forward_pre_hook(lambda module, args: (3.0 * args[0], *args[1:]))
    elif name == "global_hook":
        hook = nn.modules.module.register_module_forward_hook(
            lambda other, args, out: triple(out) if other is module else None
        )
        GLOBAL_HOOKS.append(hook)
    elif name == "global_pre_hook":
        hook = nn.modules.module.register_module_forward_pre_hook(
            lambda other, args: (3.0 * args[0], *args[1:]) if other is module else None
        )
        GLOBAL_HOOKS.append(hook)
    elif name == "train":
        module.train()
    elif name == "weight":  # a number in place, after construction
        module.weight.data.mul_(value)
    elif name == "factor":
        module.factor.fill_(value)
    elif name == "certified_coeff":
        module.parametrizations.weight[-1].certified_coeff = value
    else:
        attribute = name.removeprefix("set_")
        assert attribute != name
        try:
            setattr(module, attribute, tuple(value) if isinstance(value, list) else value)
        except AttributeError as error:  # read-only, which is one way to refuse
            raise ValueError(str(error)) from error


def clean() -> None:
    """Removes global hooks."""
    while GLOBAL_HOOKS:
        GLOBAL_HOOKS.pop().remove()


def _attention(o: dict) -> nn.Module:
    names = ("bias", "batch_first", "value_proj", "causal", "any_mask", "window", "positions", "max_len",
             "proj_coeff")  # fmt: skip
    layer = lf.L2MultiheadAttention(o["dim"], o["heads"], **{k: o[k] for k in names if k in o})
    if o.get("eye"):  # its bound is nearest to the truth then
        for projection in (layer.q_proj, layer.v_proj, layer.out_proj):
            for weight in () if projection is None else projection.parameters():
                if weight.ndim == 2:
                    nn.init.eye_(weight)
    return layer


def _encoder_layer(o: dict, attention: nn.Module) -> nn.Module:
    layer = nn.TransformerEncoderLayer(
        o["dim"], 1, 4, activation=o["activation"], batch_first=o["batch_first"],
        norm_first=o["norm_first"], layer_norm_eps=o["eps"],
    )  # fmt: skip
    layer.self_attn = attention
    return layer


def _linear(o: dict) -> nn.Module:
    return nn.Linear(o["in"], o["out"], o.get("bias", True))


def _conv(o: dict) -> nn.Module:
    names = ("stride", "padding", "dilation", "groups", "padding_mode")
    cls = {1: nn.Conv1d, 2: nn.Conv2d}[o["dims"]]
    module = cls(o["in"], o["out"], o["kernel"], **{k: o[k] for k in names if k in o})
    if o.get("ones"):  # where strides and paddings count most
        nn.init.ones_(module.weight)
    return module


def _batch_norm(o: dict) -> nn.Module:
    module = (nn.BatchNorm1d if o["dims"] == 1 else nn.BatchNorm2d)(o["dim"])
    module.running_var.uniform_(0.01, 2.0)
    module.weight.data.normal_()
    return module


def _norm(o: dict) -> nn.Module:
    module = {"layer": nn.LayerNorm, "rms": nn.RMSNorm}[o["which"]](o["dim"], eps=o["eps"])
    module.weight.data.normal_()
    return module


def _pool(o: dict) -> nn.Module:
    cls = getattr(nn, f"{o['which']}Pool{o['dims']}d")
    if o["which"].startswith("Adaptive"):
        return cls(o["out"])
    names = ("ceil_mode", "count_include_pad") if o["which"] == "Avg" else ("ceil_mode",)
    return cls(o["kernel"], o["stride"], o["padding"], **{k: o[k] for k in names})


class Calls(nn.Module):
    """A wrapper that only calls its child."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)


def _center(o: dict) -> nn.Module:
    module = lf.CenterNorm(o["dim"], o["affine"])
    if o["affine"]:
        module.weight.data.normal_()
    return module


MAKERS = {
    "seq": lambda o, *children: nn.Sequential(*children),
    "residual": lambda o, child: lf.Residual(child),
    "convex": lambda o, child: lf.ConvexResidual(child, o["weight"]),
    "contractive": lambda o, child: lf.Contractive(
        child, o["coeff"], norm=o.get("norm"), seq_len=o.get("seq_len")
    ),
    "invertible": lambda o, child: lf.InvertibleResidual(
        child, o["coeff"], o.get("mode", "norm"), norm=o.get("norm"), seq_len=o.get("seq_len")
    ),
    "scaled": lambda o, child: Scaled(child, torch.tensor(o["factor"])),
    "first": lambda o, child: FirstOutput(child),
    "wrapper": lambda o, child: {"calls": Calls, "parallel": nn.DataParallel}[o["which"]](child),
    "token_mean": lambda o: lf.TokenMean(o["least"]),
    "pool": _pool,
    "group_norm": lambda o: nn.GroupNorm(1, o["dim"], eps=o["eps"]),
    "linear": _linear,
    "spectral_linear": lambda o: lf.SpectralLinear(o["in"], o["out"], coeff=o["coeff"], mode=o["mode"]),
    "conv": _conv,
    "feed_forward": lambda o: lf.FeedForward(o["dim"], o["hidden"], o["coeff"]),
    "attention": _attention,
    "encoder_layer": _encoder_layer,
    "norm": _norm,
    "batch_norm": _batch_norm,
    "center": _center,
    "ball": lambda o: lf.BallProjection(o["radius"]),
    "shift": lambda o: lf.TokenShift(o["dim"], o["shifted"]),
    "max_min": lambda o: lf.MaxMin(),
    "act": lambda o: ACTIVATIONS[o["name"]](),
    "softmax": lambda o: nn.Softmax(dim=o["dim"]),
    "dropout": lambda o: nn.Dropout(0.5),
    "flatten": lambda o: nn.Flatten(o.get("start", 1), o.get("end", -1)),
    "unflatten": lambda o: nn.Unflatten(o.get("at", 1), tuple(o["shape"])),
    "dot_product": lambda o: DotProductSelfAttention(o["dim"], o["heads"], **o.get("coeffs", {})),
    "torch_attention": lambda o: nn.MultiheadAttention(
        o["dim"], o["heads"], batch_first=o["batch_first"], bias=o["bias"]
    ),
}


def build(tree: Node, dtype: str = "float64") -> nn.Module:
    """The module that a tree describes, in eval mode, of a dtype.

    Raises what its constructors raise: that is a refusal too.
    """
    late: list[tuple[nn.Module, tuple]] = []
    shared: dict[int, nn.Module] = {}
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        module = _build(tree, late, shared)
        module = module.eval().requires_grad_(False).to(getattr(torch, dtype))
        for part, (name, value, _) in late:
            damage(part, name, value)
    finally:
        torch.set_default_dtype(before)
    return module


def _build(tree: Node, late: list, shared: dict[int, nn.Module]) -> nn.Module:
    kind, options, children = tree
    if options.get("share") in shared:
        return shared[options["share"]]
    parts = [_build(child, late, shared) for child in children]
    torch.default_generator.manual_seed(options.get("seed", 0))
    module = MAKERS[kind](options, *parts)
    module.eval()
    if "scale" in options:
        for weight in module.parameters(recurse=kind != "seq"):
            if weight.ndim > 1:
                weight.data.mul_(options["scale"])
    for name in options.get("params", ()):
        add_parametrization(module, name)
    if "share" in options:
        shared[options["share"]] = module
    if "defect" in options:
        if options["defect"][2]:
            damage(module, *options["defect"][:2])
        else:
            late.append((module, options["defect"]))
    return module


def replaced(tree: Node, old: Node, new: Node | None) -> Node:
    """The tree with one node (by identity) replaced; None drops it."""
    if tree is old:
        assert new is not None
        return new
    children = []
    for child in tree[2]:
        if child is old:
            if new is not None:
                children.append(new)
        else:
            children.append(replaced(child, old, new))
    return (tree[0], tree[1], children)
