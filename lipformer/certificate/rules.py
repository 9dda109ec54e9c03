"""Which function answers a question about a module: one rule for each class of modules.

There is one set of rules for each question: how steep a module is (bounds), what it becomes with plain
weights (baking), what it gives for new tokens (decoding), how a token moves itself (log-determinants),
how far a perturbation carries (robustness).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import CodeType, FunctionType
from typing import Any, Generic, TypeVar, cast

import torch
from torch import nn
from torch.nn.modules import module as torch_module

R = TypeVar("R")
F = TypeVar("F")
Refuse = Callable[[str, str], Exception]
"""Makes the exception from a reason and what to use instead."""


def kind_of(module: nn.Module) -> str:
    """The name of a module's class, without what torch's parametrizations and fully_shard add to it."""
    for cls in type(module).__mro__:
        sharded = cls.__name__.startswith("FSDP") and cls.__module__.startswith("torch.distributed.")
        if not sharded and not cls.__name__.startswith("Parametrized"):
            return cls.__name__
    raise AssertionError(f"{type(module)} is no subclass of nn.Module")


# How nn.Module gets from a call to forward, and from a name to an attribute.
_CALLING = ("__call__", "_call_impl", "_wrapped_call_impl", "__getattr__", "__getattribute__")


def _names_in(code: CodeType) -> Iterator[str]:
    """The names that a function looks up, those of the functions in it included."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names_in(constant)


def methods_behind(cls: type[nn.Module], names: Iterable[str]) -> dict[str, object]:
    """The methods and properties of a class that these methods call, directly or not, and they.

    Read from the functions' own code, so that a rule cannot forget one that its class relies on.
    """
    own = [c for c in cls.__mro__ if c not in nn.Module.__mro__]
    found: dict[str, object] = {}
    waiting = [*names]
    while waiting:
        name = waiting.pop()
        # All definitions: one may call that of its parent.
        defined = [vars(c)[name] for c in own if name in vars(c)]
        functions: list[Any] = [d.fget if isinstance(d, property) else d for d in defined]
        codes = [f.__code__ for d in functions if isinstance(f := inspect.unwrap(d), FunctionType)]
        if name not in found and codes:
            found[name] = getattr(cls, name)
            waiting += [name for code in codes for name in _names_in(code)]
    return found


class Rules(Generic[R]):
    """The rules of one question.

    A rule is about what the ``forward`` of its class computes. It serves subclasses that keep that
    forward and all methods it calls, and no module of which one was replaced or that has hooks, which
    may change what it computes.

    Args:
        what: what a rule tells, for messages: "bound".
        teach: how a user adds one: "lipformer.register_bound".
    """

    def __init__(self, what: str, teach: str) -> None:
        self.what, self.teach = what, teach
        self._rules: dict[type[nn.Module], tuple[R, dict[str, object]]] = {}
        self.otherwise: R | None = None  # answers for classes without a rule

    def register(self, module_class: type[nn.Module], *methods: str) -> Callable[[F], F]:
        """Decorator: the rule of a class, and the methods besides forward that it relies on."""
        if not (isinstance(module_class, type) and issubclass(module_class, nn.Module)):
            raise TypeError(f"{self.teach} takes a subclass of torch.nn.Module, got {module_class!r}")

        def register(rule: F) -> F:
            relied = methods_behind(module_class, ("forward", "__iter__", *methods))
            self._rules[module_class] = cast(R, rule), relied
            return rule

        return register

    def find(self, module: nn.Module, refuse: Refuse) -> R | None:
        """The rule of the nearest class of a module, None if no class of its has one.

        Raises:
            refuse(reason, instead): the module does not run the forward that the rule is about.
        """
        for cls in type(module).__mro__:
            if cls in self._rules:
                rule, relied = self._rules[cls]
                teach = f"{self.teach}({kind_of(module)})"
                check_forward(module, cls, relied, refuse, self.what, teach)
                return rule
        return None

    def of(self, module: nn.Module, refuse: Refuse) -> R:
        """The rule of a module; refuses if there is none."""
        rule = self.find(module, refuse) or self.otherwise
        if rule is None:
            raise refuse(
                f"no {self.what} is known for this class",
                f"a module from the README's table, or {self.teach}({kind_of(module)})",
            )
        return rule


def check_forward(
    module: nn.Module,
    cls: type[nn.Module],
    relied: Mapping[str, object],
    refuse: Refuse,
    what: str,
    teach: str = "the forward of its class",
) -> None:
    """Refuses a module that may not compute what its class does.

    Args:
        module: of the class.
        cls: the class that something is known about.
        relied: the methods that this rests on, by name, as from :func:`methods_behind`.
        refuse: makes the exception.
        what: is known, for the message.
        teach: what to do instead.
    """
    changed = _changed(module, relied)
    if changed is not None:
        raise refuse(
            f"it overrides the {changed} of {cls.__name__}, whose {what} may no longer hold", teach
        )
    refuse_hooks(module, refuse, teach)


def _changed(module: nn.Module, relied: Mapping[str, object]) -> str | None:
    """The first of these methods, and of those that lead to them, that is not what a module runs."""
    cls = type(module)
    if torch.compiler.is_compiling():
        # What a graph is made of was checked when it was built; each look would be a guard.
        return None if cls.forward is relied.get("forward", cls.forward) else "forward"
    for name, method in relied.items():
        if getattr(cls, name) is not method or (name != "forward" and name in module.__dict__):
            return name
    for name in _CALLING:
        if getattr(cls, name) is not getattr(nn.Module, name) or name in module.__dict__:
            return name
    compiled = module.__dict__.get("_compiled_call_impl")  # by module.compile(), of the call itself
    same = getattr(compiled, "_torchdynamo_orig_callable", compiled) in (None, module._call_impl)
    return None if same else "_compiled_call_impl"


def refuse_hooks(module: nn.Module, refuse: Refuse, teach: str = "the forward of its class") -> None:
    """Hooks and replaced forwards can change what a module computes; torch.distributed's do not."""
    if "forward" in module.__dict__:
        raise refuse(
            "its forward was replaced on the instance",
            f"the forward of its class, or a subclass with that forward and {teach}",
        )
    refuse_hooks_alone(module, refuse)


def refuse_hooks_alone(module: nn.Module, refuse: Refuse) -> None:
    """Refuses hooks, whatever the forward is."""
    for kind, hooks in (
        ("global forward pre-hook", torch_module._global_forward_pre_hooks),
        ("global forward hook", torch_module._global_forward_hooks),
        ("forward pre-hook", module._forward_pre_hooks),
        ("forward hook", module._forward_hooks),
    ):
        for hook in hooks.values():
            origin = getattr(hook, "__module__", None) or type(hook).__module__
            if not origin.startswith("torch.distributed"):
                name = getattr(hook, "__name__", type(hook).__name__)
                raise refuse(
                    f"the {kind} {name} may change its weights, input or output",
                    "the module without the hook; for weights lipformer.spectral_bound or torch's "
                    "parametrizations",
                )
