"""Which function answers a question about a module: one rule for each class of modules.

There is one set of rules for each question: how steep a module is (bounds), what it becomes with plain
weights (baking), what it gives for new tokens (decoding), how a token moves itself (log-determinants),
how far a perturbation carries (robustness).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar, cast

from torch import nn

R = TypeVar("R")
F = TypeVar("F")
Refuse = Callable[[str, str], Exception]
"""Makes the exception from a reason and what to use instead."""


def kind_of(module: nn.Module) -> str:
    """The name of a module's class, without what torch's parametrizations add to it."""
    return next(c.__name__ for c in type(module).__mro__ if not c.__name__.startswith("Parametrized"))


class Rules(Generic[R]):
    """The rules of one question.

    A rule is about the ``forward`` of its class. It serves subclasses that keep that forward, and no
    module whose forward was replaced or has hooks, which may change what it computes.

    Args:
        what: what a rule tells, for messages: "bound".
        teach: how a user adds one: "lipformer.register_bound".
    """

    def __init__(self, what: str, teach: str) -> None:
        self.what, self.teach = what, teach
        self._rules: dict[type[nn.Module], R] = {}

    def register(self, module_class: type[nn.Module]) -> Callable[[F], F]:
        """Decorator: the rule of a class."""
        if not (isinstance(module_class, type) and issubclass(module_class, nn.Module)):
            raise TypeError(f"{self.teach} takes a subclass of torch.nn.Module, got {module_class!r}")

        def register(rule: F) -> F:
            self._rules[module_class] = cast(R, rule)
            return rule

        return register

    def find(self, module: nn.Module, refuse: Refuse) -> R | None:
        """The rule of the nearest class of a module, None if no class of its has one.

        Raises:
            refuse(reason, instead): the module does not run the forward that the rule is about.
        """
        for cls in type(module).__mro__:
            if cls in self._rules:
                kind = kind_of(module)
                if type(module).forward is not cls.forward:
                    raise refuse(
                        f"it overrides the forward of {cls.__name__}, whose {self.what} may no longer "
                        "hold",
                        f"{self.teach}({kind})",
                    )
                refuse_hooks(module, refuse, f"{self.teach}({kind})")
                return self._rules[cls]
        return None

    def of(self, module: nn.Module, refuse: Refuse) -> R:
        """The rule of a module; refuses if there is none."""
        rule = self.find(module, refuse)
        if rule is None:
            raise refuse(
                f"no {self.what} is known for this class",
                f"a module from the README's table, or {self.teach}({kind_of(module)})",
            )
        return rule


def refuse_hooks(module: nn.Module, refuse: Refuse, teach: str = "the forward of its class") -> None:
    """Hooks and replaced forwards can change what a module computes; torch.distributed's do not."""
    if "forward" in module.__dict__:
        raise refuse("its forward was replaced on the instance", teach)
    for hook in (*module._forward_pre_hooks.values(), *module._forward_hooks.values()):
        origin = getattr(hook, "__module__", None) or type(hook).__module__
        if not origin.startswith("torch.distributed"):
            name = getattr(hook, "__name__", type(hook).__name__)
            raise refuse(
                f"the forward hook {name} may change its weights, input or output",
                "removing the hook; for weights lipformer.spectral_bound or torch's parametrizations",
            )
