"""certify with an example: runs a model's own forward, and follows what depends on its input.

Modules that have a bound are run as they are, on plain tensors, and contribute it. All else goes on into
their forward: each operation on a value that depends on the input arrives here, by its name in torch's
dispatcher, and has a rule in :mod:`lipformer.certificate.operations` or is refused with its source line.
Such values have no entries that other code could read.

Taken on trust is that the forward does the same at every call on samples of this shape: Python that
depends on anything else (a counter, a clock) is seen as it ran. So is that a
module with a bound keeps nothing of its input that others read. Random numbers and writing to parameters
or buffers are refused, and a plain run with one more sample must give the same output.
"""

from __future__ import annotations

import contextlib
import inspect
import linecache
import os
import sys
import threading
from collections.abc import Iterator, Mapping
from traceback import walk_stack, walk_tb
from typing import Any
from unittest import mock

import einops
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from lipformer.certificate.bounds import Ask, Bound, bound_of, bound_rules, finish, product_up
from lipformer.certificate.certificate import Certificate, NotCertifiable
from lipformer.certificate.operations import CONSTANTS, JOINS, Followed, Step, aten, constant_of
from lipformer.certificate.rules import kind_of
from lipformer.certificate.torch_rules import sequential_bound
from lipformer.certificate.wrappers import refuse_sharded, unwrapped, wrapped

# Whose source lines say nothing to a user.
_NOT_THEIRS = (
    *(os.path.dirname(str(file)) + os.sep for file in (torch.__file__, einops.__file__, __file__)),
    contextlib.__file__,
)


# Whose operations know the number of pixels.
_SHAPED = (nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d)


def _line(error: Exception | None = None) -> str:
    """The innermost line of the user's code that runs now, or at which an error was raised."""
    if error is None:
        frames = [(frame.f_code.co_filename, number) for frame, number in walk_stack(None)]
    else:
        frames = [(frame.f_code.co_filename, number) for frame, number in walk_tb(error.__traceback__)]
        frames.reverse()
    for file, number in frames:
        if not file.startswith(_NOT_THEIRS):
            source = linecache.getline(file, number).strip()
            return f"{file}:{number}" + (f", `{source}`" if source else "")
    return "an unknown line"


def _followed(values: object) -> list[Followed]:
    return [value for value in tree_leaves(values) if isinstance(value, Followed)]


def _values(values: Any) -> Any:
    """Arguments with the values at the example in place of what is followed."""
    return tree_map(lambda v: v.value if isinstance(v, Followed) else v, values)


def _storage(tensor: Tensor) -> int:
    """Where its entries are: equal for views of each other."""
    return tensor.untyped_storage().data_ptr()


def _written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> set[int]:
    """The storages that an operation writes to."""
    if not func._schema.is_mutable:
        return set()
    given = {**{a.name: v for a, v in zip(func._schema.arguments, args, strict=False)}, **kwargs}
    places = [given.get(a.name) for a in func._schema.arguments if a.is_write]
    return {
        _storage(t) for t in tree_leaves(places) if isinstance(t, Tensor) and not isinstance(t, Followed)
    }


class _Walk(TorchDispatchMode):
    """One run of a model.

    Attributes:
        rows: what the certificate shows, in the order of the run.
        start: the output of the embedding that the input comes from, ``source`` its path.
        refused: the first line that could not be followed.
    """

    def __init__(self, model: nn.Module, norm: str, ids: Tensor | None) -> None:
        super().__init__()
        self.norm, self.ids, self.source = norm, ids, ""
        self.start: Followed | None = None
        self.refused: NotCertifiable | None = None
        self.rows: list[Bound] = []
        self._paths: dict[nn.Module, str] = {}
        for path, module in model.named_modules():
            self._paths.setdefault(module, path)
        self._inside = [model]
        self._plain = False  # within a module that is run as it is
        self._known: list[tuple[Tensor, Tensor]] = []
        self._owned = {_storage(t) for t in (*model.parameters(), *model.buffers()) if t.numel()}
        self._thread = threading.get_ident()
        self._call = nn.Module.__call__
        self._time = 0
        self._written: dict[int, int] = {}  # storages, and when they were written to

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # else torch imports its compiler, which takes seconds

    def follow(self, value: Tensor, bound: float | None, why: str = "") -> Followed:
        """A value that depends on the input."""
        self._time += 1
        return Followed(value, bound, self._time, why)

    def _ask(self, module: nn.Module, dims: Tensor | None = None) -> Ask:
        path = self._paths.get(module, f"({kind_of(module)})")
        shape = () if dims is None else dims.shape
        seq_len = shape[1] if len(shape) == 3 else None
        return Ask(
            self.norm, seq_len, path, kind_of(module), known=self._known, alone=True, dims=len(shape)
        )

    def refuse(self, reason: str, instead: str, error: Exception | None = None) -> NotCertifiable:
        """The exception for a line that cannot be followed; the first is kept, whoever catches it."""
        ask = self._ask(self._inside[-1])
        at = f"its forward cannot be followed at {_line(error)}"
        self.refused = self.refused or ask.refuse(f"{at}: {reason}", instead)
        return self.refused

    def check(self, used: list[Followed]) -> None:
        """Refuses values without a bound, and those that were written over."""
        for value in used:
            if value.bound is None:
                raise self.refuse(value.why, "the first output alone")
            if self._written.get(_storage(value.value), 0) > value.born:
                raise self.refuse("a value is used that was written over in place", "inplace=False")

    # --- operations ---------------------------------------------------------------------------

    def __torch_dispatch__(
        self, func: Any, types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        used = _followed((args, kwargs))
        written = _written(func, args, kwargs)
        if not used:
            self._time += 1
            self._written.update(dict.fromkeys(written, self._time))
        if self._plain:
            return func(*args, **kwargs)
        if written & self._owned:
            raise self.refuse(f"{func.overloadpacket} changes a parameter or buffer", "one that stays")
        if not used:
            if torch.Tag.nondeterministic_seeded in func.tags:
                raise self.refuse(
                    f"{func.overloadpacket} draws random numbers", "model.eval(), no noise"
                )
            return func(*args, **kwargs)
        if func.overloadpacket in CONSTANTS:
            return func(*_values(args), **_values(kwargs))
        self.check(used)
        if func._schema.is_mutable:
            return self._in_place(func, args, kwargs)
        out = func(*_values(args), **_values(kwargs))
        return self._result(func, args, kwargs, used, out)

    def _result(self, func: Any, args: Any, kwargs: Any, used: list[Followed], out: Any) -> Any:
        several = isinstance(out, (tuple, list))
        first = out[0] if several else out
        if not isinstance(first, Tensor):
            raise self.refuse(f"{func.overloadpacket} reads the value of an entry", "no branching")
        step = Step(func, args, kwargs, used, first, self.norm, self.refuse)
        factor, value = constant_of(step)
        name = func.overloadpacket.__name__
        if value != used[0].bound:
            theorem = f"{tuple(step.x.shape[1:])} -> {tuple(first.shape[1:])}"
            if func.overloadpacket in JOINS:
                theorem = "from the input to here"
            self.rows.append(Bound(factor, theorem, path=self._ask(self._inside[-1]).path, kind=name))
        if not several:
            return self.follow(first, value)
        why = f"it uses an output of {name} that is no number"
        return type(out)(
            self.follow(t, value) if t.is_floating_point() else self.follow(t, None, why) for t in out
        )

    def _in_place(self, func: Any, args: Any, kwargs: Any) -> Any:
        """x.add_(y) as x = x + y: views of x are no longer used."""
        name = func.overloadpacket.__name__
        plain = getattr(aten, name.removesuffix("_"), None) if name.endswith("_") else None
        target = args[0] if args else None
        if not isinstance(target, Followed) or plain is None or "out" in kwargs:
            raise self.refuse(f"{func.overloadpacket} writes into a tensor", "operations not in place")
        overload = getattr(plain, func._overloadname, None)
        if overload is None:
            raise self.refuse(f"{func.overloadpacket} writes into a tensor", "operations not in place")
        used = _followed((args, kwargs))
        out = overload(*_values(args), **_values(kwargs))
        made = self._result(overload, args, kwargs, used, out)
        if made.shape != target.shape or made.dtype != target.dtype:
            raise self.refuse(f"{func.overloadpacket} writes into a tensor", "operations not in place")
        self._written[_storage(target.value)] = made.born
        target.value, target.bound, target.born = made.value, made.bound, made.born
        return target

    # --- modules ------------------------------------------------------------------------------

    @contextlib.contextmanager
    def intercepting(self) -> Iterator[None]:
        """Context in which calls of modules come here first, those of this thread."""
        walk = self

        def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if walk._plain or threading.get_ident() != walk._thread:
                return walk._call(module, *args, **kwargs)
            return walk._module(module, args, kwargs)

        # What is compiled runs as it was written.
        compiler = "torch._dynamo" in sys.modules
        eager = torch.compiler.set_stance("force_eager") if compiler else contextlib.nullcontext()
        with mock.patch.object(nn.Module, "__call__", call), eager, self:
            yield

    def _run(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Runs a module as it is."""
        self._plain = True
        try:
            return self._call(module, *args, **kwargs)
        finally:
            self._plain = False

    def _module(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        if isinstance(module, nn.Embedding) and any(map(self._is_input, (*args, *kwargs.values()))):
            return self._embedding(module, args, kwargs)
        used = _followed((args, kwargs))
        if not used:
            return self._enter(module, args, kwargs)
        self.check(used)
        ask = self._ask(module, used[0])
        name = wrapped(module, ask.refuse)
        if name is not None:
            inner = module._modules[name]
            assert inner is not None
            return self._module(inner, args, kwargs)
        rule = refusal = None
        with contextlib.suppress(NotCertifiable):  # not the forward that its rule is about
            rule = bound_rules.find(module, ask.refuse)
        parts = module.modules() if rule is sequential_bound else (module,)
        if rule is not None and not any(isinstance(part, _SHAPED) for part in parts):
            try:
                bound = bound_of(module, ask)
            except NotCertifiable as error:
                refusal = error
            else:
                return self._leaf(module, bound, used, args, kwargs)
        try:
            return self._enter(module, args, kwargs)
        except NotCertifiable as error:
            # What a rule says of its module says more than a line inside it.
            if refusal is not None and error is self.refused and error.path == ask.path:
                self.refused = refusal
                raise refusal from error
            raise

    def _enter(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Goes on into the forward of a module, with its hooks."""
        self._inside.append(module)
        try:
            return self._call(module, *args, **kwargs)
        finally:
            self._inside.pop()

    def _leaf(
        self, module: nn.Module, bound: Bound, used: list[Followed], args: Any, kwargs: Any
    ) -> Any:
        """A module with a bound: of its first argument, or of attention's query, key and value."""
        x = used[0]
        given = inspect.signature(module.forward).bind(*args, **kwargs).arguments
        taking = [name for name, value in given.items() if _followed(value)]
        first = next(iter(given.values()))
        direct = first is x or (isinstance(first, tuple) and first[0] is x)
        same = set(taking) <= {"query", "key", "value"} and all(value is x for value in used)
        if not direct or not (len(used) == 1 or same):
            raise self.refuse(
                f"{kind_of(module)} takes values that depend on the input as {', '.join(taking)}, and "
                "its bound is of its first argument",
                "one argument that depends on the input",
            )
        out = self._run(module, _values(args), _values(kwargs))
        rest = out[1:] if isinstance(out, tuple) else ()
        first = out[0] if isinstance(out, tuple) else out
        if not isinstance(first, Tensor) or first.shape[:1] != x.shape[:1]:
            raise self.refuse(
                f"{kind_of(module)} returns {type(first).__name__} "
                f"{tuple(getattr(first, 'shape', ()))} for samples {tuple(x.shape)}",
                "a module that gives one tensor, samples first",
            )
        self.rows.append(bound)
        assert x.bound is not None
        made = self.follow(first, float(product_up((x.bound, float(bound.value)))))
        if not isinstance(out, tuple):
            return made
        why = f"it uses an output of {kind_of(module)} other than the first, which has no bound"
        return (made, *(self.follow(t, None, why) if isinstance(t, Tensor) else t for t in rest))

    def _is_input(self, value: object) -> bool:
        """Whether these are the symbols of the example, in their shape."""
        ids = self.ids
        return (
            ids is not None
            and isinstance(value, Tensor)
            and not isinstance(value, Followed)
            and value.shape == ids.shape
            and _storage(value) == _storage(ids)
        )

    def _embedding(self, module: nn.Embedding, args: Any, kwargs: Any) -> Followed:
        """The lookup of the symbols, behind which the input begins."""
        if self.start is not None:
            raise self.refuse(
                f"{self._ask(module).path} looks the symbols up again, after {self.source}",
                "one embedding, or certify the rest of the model in terms of its sum",
            )
        self.source = self._ask(module).path or "the model"
        self.start = self.follow(self._run(module, args, kwargs), 1.0)
        return self.start


def follow(model: nn.Module, example: Tensor, norm: str) -> Certificate:
    """The certificate of a model with a forward of its own, for samples of the example's shape.

    Args:
        model: followed in the mode (train or eval) that it is in.
        example: samples (B, ...), or symbols of an integer dtype.
        norm: of the certificate.
    """
    refuse_sharded(model)
    model = unwrapped(model, Ask(norm, kind=kind_of(model)).refuse)
    if example.ndim < 2 or not example.numel():
        raise ValueError(
            f"example must be a batch of samples (B, ...), got shape {tuple(example.shape)}"
        )
    with torch.inference_mode(False), torch.no_grad():
        # Two samples at least, so that no dimension of size one is taken for theirs.
        x = example.detach().repeat(2 if len(example) == 1 else 1, *[1] * (example.ndim - 1))
        plain = _first(model(torch.cat([x, x[:1]])))
        walk = _Walk(model, norm, None if x.is_floating_point() else x)
        given = walk.follow(x, 1.0) if walk.ids is None else x
        try:
            with walk.intercepting():
                out = _first(model(given))
            walk.check(_followed(out))
        except NotCertifiable:
            raise
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
            raise walk.refuse(reason, "a forward of operations on whole tensors", error) from error
        if walk.refused is not None:
            raise walk.refused
    refuse = Ask(norm, kind=kind_of(model)).refuse
    if not isinstance(out, Followed) or out.bound is None or not isinstance(plain, Tensor):
        raise refuse(
            f"it returns {type(plain).__name__}, which does not follow from the example by known steps",
            "a model that returns one tensor, or it first",
        )
    if not bool(torch.isfinite(plain).all()):
        raise refuse("its output at the example is not finite", "an example that it takes")
    if not _same(out.value, plain[:-1]):
        raise refuse(
            "its traced output differs from that of a plain run with one more sample",
            "a deterministic forward that treats each sample for itself",
        )
    start = x if walk.start is None else walk.start
    shape = tuple(start.shape[1:])
    domain = f"for samples of shape {shape}"
    if walk.start is not None:
        domain += f" from {walk.source}, with the example's symbols wherever else they are used"
    whole = Bound(out.bound, "followed through its forward", tuple(walk.rows), kind=kind_of(model))
    if len(walk.rows) == 1 and not walk.rows[0].path:
        whole = walk.rows[0]
    return finish(whole, norm, shape[0] if len(shape) == 2 else None, domain)


def _first(out: Any) -> Any:
    """The first of several outputs, in a tuple or by name."""
    if isinstance(out, Mapping):
        out = tuple(out.values())
    return out[0] if isinstance(out, tuple) and out else out


def _same(a: Tensor, b: Tensor) -> bool:
    """Whether two runs gave the same, up to the order of sums in their kernels."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    slack = torch.finfo(a.dtype).eps ** 0.5 * float(b.abs().max() if b.numel() else 0.0)
    return bool(((a - b).abs() <= slack).all())
