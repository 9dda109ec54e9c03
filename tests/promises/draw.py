"""Draws random trees of modules from a seed, some with something planted in them."""

from __future__ import annotations

import math
import random
from dataclasses import replace

from torch import nn

import lipformer as lf
from lipformer.layers import Layer
from tests.promises.trees import ACTIVATIONS, DTYPES, EXTREMES, Case, Node, nodes, replaced


def draw(seed: int) -> Case:
    """The case of a seed."""
    return Draw(seed).case(seed)


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
        if any("attention" in node[0] or node[0] == "encoder_layer" for node in nodes(tree)):
            # Distances of keys beyond 1e8 leave no digits of float64 to the oracle's own derivatives.
            for _, options, _ in nodes(tree):
                if "scale" in options:
                    options["scale"] = min(options["scale"], 1e3)
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
            if shape == start and len(parts) == 1 and self.rng.random() < 0.12:
                # One module in two places, perhaps with another module around it in one of them.
                self.shares += 1
                shared = (part[0], {**part[1], "share": self.shares}, part[2])
                wrapped = len(shape) == 2 and self.rng.random() < 0.5
                parts = [shared, self.wrap(shared, shape) if wrapped else shared]
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
            scaled=0.6 * deep, attention=2.5, encoder_layer=0.4, wrapper=0.5 * deep,
            token_mean=0.4 * self.batch_first * (not keep), pool=0.2 * self.batch_first * (not keep),
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
        if kind == "pool":
            return self.pool(shape, 1)
        if kind == "token_mean":
            self.length_known = False
            return ("token_mean", {"least": rng.choice((1, 2, n, n + 1))}, []), (d,)
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
        o = {"seed": self.seed(), "dims": dims, "in": shape[0], "out": rng.randint(1, 4),
             "kernel": kernel,
             "stride": rng.choice((1, 1, 2)), "padding": rng.randint(0, 1),
             "ones": rng.random() < 0.3}  # fmt: skip
        if rng.random() < 0.2:
            o |= {"padding_mode": "circular", "stride": 1, "padding": (kernel - 1) // 2}
        if rng.random() < 0.5:
            o["params"] = ["spectral"]
        sizes = [(s + 2 * o["padding"] - kernel) // o["stride"] + 1 for s in shape[1:]]
        self.length_known = False
        return ("conv", o, []), (o["out"], *sizes)

    def pool(self, shape: tuple[int, ...], dims: int) -> tuple[Node, tuple]:
        rng = self.rng
        self.length_known = False
        which = rng.choice(("Avg", "Max", "AdaptiveAvg", "AdaptiveMax"))
        if which.startswith("Adaptive"):
            return ("pool", {"which": which, "dims": dims, "out": 1}, []), (shape[0], *[1] * dims)
        kernel = rng.randint(1, min(3, *shape[1:]))
        o = {"which": which, "dims": dims, "kernel": kernel, "stride": rng.choice((1, 2, kernel)),
             "padding": rng.randint(0, kernel // 2), "ceil_mode": rng.random() < 0.3,
             "count_include_pad": rng.random() < 0.5}  # fmt: skip
        sizes = []
        for size in shape[1:]:
            span = size + 2 * o["padding"] - kernel
            steps = -(-span // o["stride"]) if o["ceil_mode"] else span // o["stride"]
            # A window that would begin beyond the input is left out.
            sizes.append(steps + (steps * o["stride"] < size + o["padding"]))
        return ("pool", o, []), (shape[0], *sizes)

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
        if kind == "wrapper":
            return (kind, {"which": rng.choice(("calls", "parallel"))}, [child])
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
                         pool=0.7 * (not keep), group_norm=0.5 * (c * h * w > 1),
                         residual=depth > 0, contractive=depth > 0, tokens=1.0 * (not keep))  # fmt: skip
        if kind == "conv":
            return self.conv(shape, 2)
        if kind == "batch_norm":
            return ("batch_norm", {"seed": self.seed(), "dims": 2, "dim": c}, []), shape
        if kind == "pool":
            return self.pool(shape, 2)
        if kind == "group_norm":
            return ("group_norm", {"dim": c, "eps": self.rng.choice((1e-5, 1.0))}, []), shape
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
                  ("hook", None), ("pre_hook", None), ("global_hook", None),
                  ("global_pre_hook", None)]  # fmt: skip
        own: dict[str, list] = {
            "linear": [("weight", 3.0), ("rebuild", {"params": ["prune"]})],
            "spectral_linear": [("certified_coeff", 0.1), ("set_coeff", 0.1)],
            "conv": [("override", "_conv_forward")] * 2
            + [("set_stride", [1] * o.get("dims", 1)), ("set_stride", [2] * o.get("dims", 1)),
               ("set_dilation", [2] * o.get("dims", 1)), ("set_padding_mode", "circular")],
            "attention": [("set_causal", rng.choice((1, 0, True, False, None))), ("set_max_len", None),
                          ("set_window", rng.choice((None, 1))), ("set_slopes", None),
                          ("set_positions", None),
                          ("rebuild", {"batch_first": not o.get("batch_first")}),
                          ("override", "_attend"), ("override", "_output"),
                          ("override", "output_matrix"),
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
            "token_mean": [("set_least", 1), ("set_least", 30)],
            "pool": [("set_stride", 1), ("set_kernel_size", 1), ("set_count_include_pad", False)],
            "group_norm": [("set_eps", 1e-8), ("weight", 3.0)],
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
