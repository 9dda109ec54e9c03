"""The certificate: a bound, its norm and domain, and the tree it was composed from."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Certificate:
    """A proven upper bound on a module's Lipschitz constant.

    Attributes:
        bound: the bound, rounded up.
        norm: "l2" (Frobenius over tokens), "token" (largest token), "self" (a token's effect on
            itself) or "linf".
        domain: the inputs it holds for.
        seq_len: the largest number of tokens it holds for, or None if that does not matter.
        path: the module's path inside the certified model, "" for the model itself.
        kind: the module's class.
        theorem: where the number comes from.
        parts: the certificates it was composed from.
    """

    bound: float
    norm: str
    domain: str
    seq_len: int | None
    path: str
    kind: str
    theorem: str
    parts: tuple[Certificate, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """The whole tree as plain dicts, lists, strings and numbers (JSON-ready)."""
        return {
            "path": self.path,
            "kind": self.kind,
            "bound": self.bound,
            "norm": self.norm,
            "domain": self.domain,
            "seq_len": self.seq_len,
            "theorem": self.theorem,
            "parts": [part.to_dict() for part in self.parts],
        }

    def __float__(self) -> float:
        """The bound."""
        return self.bound

    def __str__(self) -> str:
        """A table of the tree: module path, kind, bound, theorem."""
        rows = [("module", "kind", "bound", "theorem")]
        for depth, cert in self._walk(0):
            name = (cert.path or "(all)") if cert.kind else "·"
            rows.append(("  " * depth + name, cert.kind, f"{cert.bound:.6g}", cert.theorem))
        widths = [max(len(row[i]) for row in rows) for i in range(3)]
        lines = [
            f"{row[0]:<{widths[0]}}  {row[1]:<{widths[1]}}  {row[2]:>{widths[2]}}  {row[3]}".rstrip()
            for row in rows
        ]
        lines.insert(1, "-" * max(len(line) for line in lines))
        head = f"Lipschitz bound {self.bound:.6g} in the {self.norm} norm, {self.domain}"
        return "\n".join([head, *lines])

    def _walk(self, depth: int) -> Iterator[tuple[int, Certificate]]:
        yield depth, self
        for part in self.parts:
            yield from part._walk(depth + 1)


class NotCertifiable(Exception):
    """Raised for a module without a known finite bound in the requested norm.

    Attributes:
        path: the module's path inside the model, "" for the model itself.
        reason: why there is no bound.
        instead: what to use instead.
    """

    def __init__(self, path: str, kind: str, reason: str, instead: str) -> None:
        self.path = path
        self.kind = kind
        self.reason = reason
        self.instead = instead
        where = f"'{path}' ({kind})" if path else f"the module ({kind})"
        super().__init__(f"{where} cannot be certified: {reason}. Instead: {instead}.")
