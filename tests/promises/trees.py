"""Random trees of modules, as plain descriptions that can be printed, pasted, shrunk and built.

A node is ``(kind, options, children)``. Options may hold ``seed`` (of the weights), ``scale`` (of the
weights), ``share`` (nodes of one number are one module), ``params`` (parametrizations of the weight) and
``defect``: ``(name, value, early)``, something done to the module behind lipformer's back, before the
modules around it are built (early) or when all are.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, replace

import torch
import torch.nn.utils.parametrize as parametrize
from torch import Tensor, nn
from torch.nn.utils import parametrizations, prune

import lipformer as lf
from lipformer.layers import Layer
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
        setattr(module, attribute, tuple(value) if isinstance(value, list) else value)


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


# --- drawing ----------------------------------------------------------------------------------


class Draw:
    """Draws a tree; ``shape`` is that of one sample at the place reached."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.shares = 0
        self.length_known = True  # no change of tokens so far

    def case(self, seed: int) -> Case:
        rng = self.rng
        dtype = rng.choices(DTYPES, (2, 3, 3, 4))[0]
        # Half precision under autocast of the other kind does not run in torch itself.
        autocast = rng.choices((None, "bfloat16", "float16"), (7, 2, 1))[0]
        autocast = autocast if dtype in ("float32", "float64", autocast) else None
        self.extremes = EXTREMES[autocast if autocast and dtype != "float64" else dtype]
        self.half = "float16" in (dtype, autocast)
        self.extreme = rng.random() < 0.1
        family = rng.choices(("tokens", "time_first", "image", "local", "dot"), (7, 2, 1.5, 1, 1))[0]
        self.batch_first = family != "time_first"
        self.local = family == "local"
        if family == "image":
            shape = (rng.randint(1, 3), rng.randint(2, 3), rng.randint(2, 4))
        else:
            shape = (rng.randint(1, 6), rng.choice((2, 4, 4, 6, 3)))
            if math.prod(shape) > 24:
                shape = (4, 4)
        # In shallow trees bounds are tight, and little is hidden by what is loose.
        depth = rng.choice((1, 1, 2, 2, 3, 4))
        tree = self.dot(shape) if family == "dot" else self.sequence(shape, depth)[0]
        seq_len = None if family == "image" or rng.random() < 0.15 else shape[0]
        case = Case(tree, shape, dtype, autocast, int(not self.batch_first), seq_len, seed)
        if rng.random() < 0.35:
            case = replace(case, tree=self.plant(tree))
        return case

    def pick(self, **weights: float) -> str:
        return self.rng.choices(list(weights), list(weights.values()))[0]

    def seed(self) -> int:
        return self.rng.randrange(1000)

    def sequence(self, shape: tuple[int, ...], depth: int, keep: bool = False) -> tuple[Node, tuple]:
        """An nn.Sequential of one to four parts; ``keep``: of the shape it was given."""
        start, parts = shape, []
        for _ in range(self.rng.randint(1, 1 + min(depth, 3))):
            part, shape = self.part(shape, depth - 1, keep)
            parts.append(part)
            if (
                part[0] not in ("seq",)
                and shape == start
                and self.rng.random() < 0.06
                and len(parts) == 1
            ):
                # One module in two places.
                self.shares += 1
                parts[0] = part = (part[0], {**part[1], "share": self.shares}, part[2])
                parts.append(part)
        if keep and shape != start:
            parts.append(self.linear(shape, start[-1]))
        return ("seq", {}, parts), (start if keep else shape)

    def part(self, shape: tuple[int, ...], depth: int, keep: bool = False) -> tuple[Node, tuple]:
        if len(shape) == 3:
            return self.image_part(shape, depth, keep)
        if len(shape) == 1:
            return self.flat_part(shape, depth, keep)
        n, d = shape
        rng = self.rng
        deep = depth > 0  # may hold others
        kind = self.pick(
            linear=3, chain=0.3 + 2 * self.extreme, spectral_linear=1.5, act=2, norm=0.5, batch_norm=0.2,
            dropout=0.3, softmax=0.4, center=0.6 * (d > 1), ball=0.6, shift=0.7 * self.batch_first,
            max_min=0.5 * (d % 2 == 0), feed_forward=0.6, conv=0.3 * self.batch_first * (not keep),
            reshape=1.2 * self.batch_first * (not keep), seq=1.5 * deep, residual=1.5 * deep,
            convex=0.8 * deep, contractive=1.2 * deep, invertible=0.5 * deep * self.batch_first,
            scaled=0.6 * deep, attention=2.5, encoder_layer=0.4,
        )  # fmt: skip
        o = {"seed": self.seed()}
        if kind == "linear":
            out = d if keep or rng.random() < 0.6 else rng.randint(1, 6)
            return self.linear(shape, out), (n, out)
        if kind == "chain":
            return self.chain(d), shape
        if kind == "spectral_linear":
            o |= {"in": d, "out": d, "coeff": rng.choice((1.0, 0.5, 2.0, 1e-4)),
                  "mode": rng.choice(("cap", "normalize"))}  # fmt: skip
            return ("spectral_linear", o, []), shape
        if kind == "norm":
            o |= {"which": rng.choice(("layer", "rms")), "dim": d, "eps": rng.choice((1e-5, 1e-2, 1.0))}
            return ("norm", o, []), shape
        if kind == "batch_norm":
            return ("batch_norm", o | {"dims": 1, "dim": n}, []), shape
        if kind in ("dropout", "max_min"):
            return (kind, {}, []), shape
        if kind == "softmax":
            return ("softmax", {"dim": rng.choice((-1, -1, 2, 1, -2))}, []), shape
        if kind == "act":
            return self.act(), shape
        if kind == "center":
            return ("center", o | {"dim": d, "affine": rng.random() < 0.5}, []), shape
        if kind == "ball":
            return ("ball", {"radius": rng.choice((0.5, 2.0, 10.0))}, []), shape
        if kind == "shift":
            return ("shift", {"dim": d, "shifted": rng.randint(0, d)}, []), shape
        if kind == "feed_forward":
            return (
                "feed_forward",
                o | {"dim": d, "hidden": 4, "coeff": rng.choice((1.0, 0.5))},
                [],
            ), shape
        if kind == "conv":
            return self.conv(shape, 1)
        if kind == "reshape":
            return self.reshape(shape)
        if kind == "seq":
            return self.sequence(shape, depth, keep)
        if kind == "encoder_layer":
            o |= {"dim": d, "activation": rng.choice(("relu", "gelu")), "batch_first": self.batch_first,
                  "norm_first": rng.random() < 0.5, "eps": rng.choice((1e-5, 1.0))}  # fmt: skip
            attention = self.attention(shape)
            if self.local:
                return self.wrap(attention, shape), shape
            return ("encoder_layer", o, [attention]), shape
        if kind == "attention":
            return self.wrap(self.attention_branch(shape, depth), shape), shape
        return self.wrap(self.sequence(shape, depth, keep=True)[0], shape, kind), shape

    def linear(self, shape: tuple[int, ...], out: int) -> Node:
        o = {"seed": self.seed(), "in": shape[-1], "out": out, "bias": self.rng.random() < 0.5}
        if self.rng.random() < 0.25:
            o["params"] = self.rng.choice(
                (["spectral"], ["normalize"], ["weight_norm"], ["orthogonal"], ["low_rank"],
                 ["spectral", "low_rank"], ["low_rank", "spectral"], ["spectral", "triple"],
                 ["weight_norm", "spectral"], ["spectral_norm"])
            )  # fmt: skip
        if self.extreme and self.rng.random() < 0.5:
            o["scale"] = self.rng.choice(self.extremes)
        elif self.rng.random() < 0.2:
            o["scale"] = self.rng.choice((0.1, 3.0, 10.0 if self.half else 100.0))
        return ("linear", o, [])

    def chain(self, dim: int) -> Node:
        """Linear maps of extreme sizes whose product is not."""
        pairs = self.rng.choice((1, 2, 2, 3))
        scales = [self.extremes[0]] * pairs + [self.extremes[3]] * pairs
        if self.rng.random() < 0.5:
            scales = scales[::-1]
        parts = [
            ("linear", {"seed": self.seed(), "in": dim, "out": dim, "bias": False, "scale": s}, [])
            for s in scales
        ]
        return ("seq", {}, parts)

    def act(self) -> Node:
        return ("act", {"name": self.rng.choice(list(ACTIVATIONS))}, [])

    def conv(self, shape: tuple[int, ...], dims: int) -> tuple[Node, tuple]:
        rng = self.rng
        kernel = rng.randint(1, min(3, *shape[1:]))
        o = {"seed": self.seed(), "dims": dims, "in": shape[0], "out": rng.randint(1, 4), "kernel": kernel,
             "stride": rng.choice((1, 1, 2)), "padding": rng.randint(0, 1),
             "ones": rng.random() < 0.3}  # fmt: skip
        if rng.random() < 0.2:
            o |= {"padding_mode": "circular", "stride": 1, "padding": (kernel - 1) // 2}
        if rng.random() < 0.5:
            o["params"] = ["spectral"]
        sizes = [(s + 2 * o["padding"] - kernel) // o["stride"] + 1 for s in shape[1:]]
        self.length_known = False
        return ("conv", o, []), (o["out"], *sizes)

    def reshape(self, shape: tuple[int, int]) -> tuple[Node, tuple]:
        """Other tokens of the same entries, in one container or two."""
        total = math.prod(shape)
        n = self.rng.choice([k for k in range(1, 9) if total % k == 0])
        parts = [("flatten", {}, []), ("unflatten", {"shape": [n, total // n]}, [])]
        self.length_known = False
        if self.rng.random() < 0.15:
            return parts[0], (total,)
        return ("seq", {}, parts), (n, total // n)

    def dot(self, shape: tuple[int, int]) -> Node:
        """Dot-product attention, which has local bounds alone."""
        rng = self.rng
        d = shape[1]
        o = {"seed": self.seed(), "dim": d, "heads": rng.choice([h for h in (1, 2, 3) if d % h == 0])}
        if rng.random() < 0.5:
            return (
                "dot_product",
                o | {"coeffs": rng.choice(({}, {"logit_coeff": 1.0, "value_coeff": 0.7}))},
                [],
            )
        return (
            "torch_attention",
            o | {"batch_first": rng.random() < 0.8, "bias": rng.random() < 0.5},
            [],
        )

    def attention(self, shape: tuple[int, int]) -> Node:
        n, d = shape
        rng = self.rng
        if self.local:
            return self.dot(shape)
        o = {"seed": self.seed(), "dim": d, "heads": rng.choice([h for h in (1, 2, 3) if d % h == 0]),
             "batch_first": self.batch_first, "causal": rng.choice((True, False, None)),
             "bias": rng.random() < 0.5}  # fmt: skip
        if rng.random() < 0.3:
            o["value_proj"] = True
        if o["causal"]:
            more = rng.choice(({}, {"window": rng.randint(1, 3)}, {"positions": "alibi"}))
            o |= more
        elif (d // o["heads"]) % 2 == 0 and rng.random() < 0.3:
            o["positions"] = "rotary"
        if rng.random() < 0.3:
            o["proj_coeff"] = rng.choice((1.0, 0.5, 2.0))
        if rng.random() < 0.1:
            o["any_mask"] = True
        if rng.random() < 0.25:
            o["scale"] = rng.choice((3.0, 0.3))
        o["eye"] = rng.random() < 0.5
        if rng.random() < (0.4 if self.length_known else 0.6):
            o["max_len"] = n + rng.randint(0, 1)
        elif not self.length_known and "window" not in o and "positions" not in o:
            o["planted"] = "no length known"
        return ("attention", o, [])

    def attention_branch(self, shape: tuple[int, int], depth: int) -> Node:
        """Attention alone, or behind other parts; nothing follows it, for its output is a tuple."""
        attention = self.attention(shape)
        if depth < 1 or self.rng.random() < 0.5:
            return attention
        before, _ = self.sequence(shape, depth - 1, keep=True)
        return ("seq", {}, [before, attention] if self.rng.random() < 0.5 else [*before[2], attention])

    def wrap(self, child: Node, shape: tuple[int, ...], kind: str | None = None) -> Node:
        rng = self.rng
        kind = kind or self.pick(
            residual=2, convex=1, contractive=2, invertible=0.7 * self.batch_first, first=1.5, scaled=0.7
        )
        if kind == "convex":
            return (kind, {"weight": rng.choice((0.0, 0.3, 0.5, 1.0))}, [child])
        if kind == "scaled":
            return (kind, {"factor": rng.choice((0.5, -2.0, 1e-3))}, [child])
        o = {}
        if kind in ("contractive", "invertible"):
            o["coeff"] = rng.choice((0.9, 0.5) if kind == "invertible" else (0.9, 1.0, 3.0, 1e-3))
            o["seq_len"] = shape[0] if len(shape) == 2 and rng.random() < 0.8 else None
            if o["seq_len"] is not None and rng.random() < 0.1 and shape[0] > 1:
                o |= {"seq_len": 1, "planted": "too small a seq_len"}
            o["norm"] = rng.choice((None, None, "l2", "token", "linf"))
            if rng.random() < 0.15:
                o |= {"norm": "self"} if kind == "contractive" else {"norm": None, "mode": "causal"}
        return (kind, o, [child])

    def flat_part(self, shape: tuple[int], depth: int, keep: bool) -> tuple[Node, tuple]:
        (total,) = shape
        kind = self.pick(linear=2, act=1, norm=0.4, unflatten=1.0 * (not keep), residual=depth > 0)
        if kind == "linear":
            out = total if keep else self.rng.randint(1, 8)
            return self.linear(shape, out), (out,)
        if kind == "norm":
            o = {"seed": self.seed(), "which": "layer", "dim": total, "eps": 1e-2}
            return ("norm", o, []), shape
        if kind == "unflatten":
            n = self.rng.choice([k for k in range(1, 7) if total % k == 0])
            return ("unflatten", {"shape": [n, total // n]}, []), (n, total // n)
        if kind == "residual":
            return ("residual", {}, [self.sequence(shape, depth, keep=True)[0]]), shape
        return self.act(), shape

    def image_part(self, shape: tuple[int, ...], depth: int, keep: bool) -> tuple[Node, tuple]:
        c, h, w = shape
        kind = self.pick(conv=2 * (not keep), act=1.5, batch_norm=0.5, flatten=1.0 * (not keep),
                         residual=depth > 0, contractive=depth > 0, tokens=1.0 * (not keep))  # fmt: skip
        if kind == "conv":
            return self.conv(shape, 2)
        if kind == "batch_norm":
            return ("batch_norm", {"seed": self.seed(), "dims": 2, "dim": c}, []), shape
        self.length_known = False
        if kind == "flatten":
            return ("flatten", {}, []), (c * h * w,)
        if kind == "tokens":
            return ("flatten", {"start": 2}, []), (c, h * w)
        if kind in ("residual", "contractive"):
            return self.wrap(self.same_conv(shape), shape, kind), shape
        return self.act(), shape

    def same_conv(self, shape: tuple[int, ...]) -> Node:
        o = {"seed": self.seed(), "dims": 2, "in": shape[0], "out": shape[0], "kernel": 1}
        if min(shape[1:]) >= 3:
            o |= {"kernel": 3, "padding": 1}
        return ("conv", o, [])

    # --- planting -----------------------------------------------------------------------------

    def plant(self, tree: Node) -> Node:
        """The tree with one thing done to one of its modules."""
        places = nodes(tree)
        target = self.rng.randrange(len(places))
        for step in range(len(places)):  # the next module that something can be done to
            place = places[(target + step) % len(places)]
            choices = self.defects(*place[:2])
            if choices:
                name, value = self.rng.choice(choices)
                early = self.rng.random() < 0.3
                if name == "rebuild":
                    changed = (place[0], {**place[1], **value, "planted": str(value)}, place[2])
                else:
                    changed = (place[0], {**place[1], "defect": (name, value, early)}, place[2])
                return replaced(tree, place, changed)
        return tree

    def defects(self, kind: str, o: dict) -> list[tuple[str, object]]:
        if o.get("share") is not None:
            return []
        rng = self.rng
        common = [("override", "forward"), ("override", "__call__"), ("instance_forward", None),
                  ("hook", None), ("pre_hook", None), ("global_hook", None), ("global_pre_hook", None)]  # fmt: skip
        own: dict[str, list] = {
            "linear": [("weight", 3.0), ("rebuild", {"params": ["prune"]})],
            "spectral_linear": [("certified_coeff", 0.1), ("set_coeff", 0.1)],
            "conv": [("override", "_conv_forward")] * 2
            + [("set_stride", [1] * o.get("dims", 1)), ("set_stride", [2] * o.get("dims", 1)),
               ("set_dilation", [2] * o.get("dims", 1)), ("set_padding_mode", "circular")],
            "attention": [("set_causal", rng.choice((1, 0, True, False, None))), ("set_max_len", None),
                          ("set_window", rng.choice((None, 1))), ("set_slopes", None),
                          ("set_positions", None), ("rebuild", {"batch_first": not o.get("batch_first")}),
                          ("override", "_attend"), ("override", "_output"), ("override", "output_matrix"),
                          ("set_batch_first", not o.get("batch_first"))],
            "encoder_layer": [("override", "_ff_block"), ("override", "_sa_block"),
                              ("set_norm_first", not o.get("norm_first"))],
            "convex": [("set_weight", 1.6), ("set_weight", -0.5), ("override", "mix")],
            "residual": [("override", "mix")],
            "contractive": [("set_coeff", 5.0), ("set_seq_len", None), ("set_seq_len", 1),
                            ("set_norm", "linf"), ("set_norms", ["linf"]), ("override", "scales")],
            "invertible": [("set_coeff", 0.1)],
            "scaled": [("factor", 7.0)],
            "ball": [("set_radius", 30.0)],
            "shift": [("set_shifted", 1), ("override", "step")],
            "center": [("set_dim", 2)],
            "norm": [("set_eps", 1e-8), ("weight", 3.0)],
            "batch_norm": [("train", None), ("set_eps", 1.0)],
            "dropout": [("train", None)],
            "softmax": [("set_dim", 0), ("set_dim", None)],
            "flatten": [("set_start_dim", 0)],
        }  # fmt: skip
        found = own[kind] if kind in own and rng.random() < 0.7 else common
        # Methods of a class without them are nobody's.
        return [d for d in found if d[0] != "override" or kind_has(kind, d[1])]


def kind_has(kind: str, method: object) -> bool:
    """Whether modules of a kind have the method that is to be overridden."""
    if method in ("forward", "__call__"):
        return True
    classes: dict[str, type] = {
        "attention": lf.L2MultiheadAttention, "encoder_layer": nn.TransformerEncoderLayer,
        "conv": nn.Conv2d, "convex": lf.ConvexResidual, "residual": lf.Residual,
        "contractive": lf.Contractive, "shift": lf.TokenShift,
    }  # fmt: skip
    return hasattr(classes.get(kind, Layer), str(method))


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


def draw(seed: int) -> Case:
    """The case of a seed."""
    return Draw(seed).case(seed)
