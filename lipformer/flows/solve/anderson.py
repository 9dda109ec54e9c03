r"""Anderson acceleration (type II): the next point from the points so far, for many problems at once.

Source: Anderson 1965; Walker, Ni 2011. For a linear contraction it is GMRES in disguise: it finds the
combination of past points whose residual is smallest. It has no guarantee of its own for others;
:mod:`lipformer.flows.solve.fixed_point` gives it one.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

MEMORY = 25


@dataclass(frozen=True)
class History:
    r"""The latest m differences of images :math:`g(x)` and residuals :math:`g(x) - x`, by problem.

    Each pair is kept in units of its residual difference, so that old, large ones do not drown the
    recent ones. Problems that have not filled all m slots have zeros there.

    Attributes:
        image: latest image (b, n).
        residual: latest residual (b, n).
        moves: differences of images (b, m, n).
        steps: differences of residuals (b, m, n).
        gram: inner products of the steps (b, m, m).
        memory: the largest m; it grows as differences come, since most solves are short.
        count: differences taken so far.
    """

    image: Tensor
    residual: Tensor
    moves: Tensor
    steps: Tensor
    gram: Tensor
    memory: int
    count: int = 0

    @classmethod
    def start(cls, image: Tensor, residual: Tensor, memory: int = MEMORY) -> History:
        """A history of one point; no more differences are kept than a problem has unknowns."""
        b, n = image.shape
        wide = torch.float64 if image.device.type == "cpu" else image.dtype
        none = image.new_zeros(b, 0, n)
        return cls(image, residual, none, none, none.new_zeros(b, 0, 0, dtype=wide), min(memory, n))

    def _with_room(self) -> History:
        """The history with a slot for one more difference, if it may have one."""
        m = self.steps.shape[1]
        if self.count < m or m == self.memory:
            return self
        extra = min(max(4, m), self.memory - m)
        steps, moves = (F.pad(part, (0, 0, 0, extra)) for part in (self.steps, self.moves))
        return replace(self, steps=steps, moves=moves, gram=F.pad(self.gram, (0, extra, 0, extra)))

    def select(self, kept: Tensor) -> History:
        """The problems of an index or mask."""
        names = ("image", "residual", "moves", "steps", "gram")
        return replace(self, **{name: getattr(self, name)[kept] for name in names})

    def add(self, image: Tensor, residual: Tensor) -> History:
        """The history with one more point; steps that are not finite are left out as zeros."""
        step, move = residual - self.residual, image - self.image
        size = step.norm(dim=-1, keepdim=True)
        usable = torch.isfinite(size) & (size > torch.finfo(step.dtype).tiny)
        size = torch.where(usable, size, 1.0)
        step, move = torch.where(usable, step / size, 0.0), torch.where(usable, move / size, 0.0)
        grown = self._with_room()
        slot = grown.count % grown.memory
        # In place: nobody else holds these buffers, and copying them would cost more than the rest.
        grown.steps[:, slot], grown.moves[:, slot] = step, move
        products = (grown.steps @ step.unsqueeze(-1)).squeeze(-1).to(grown.gram.dtype)
        grown.gram[:, slot], grown.gram[:, :, slot] = products, products
        return replace(grown, image=image, residual=residual, count=grown.count + 1)

    def clear(self, cleared: Tensor) -> History:
        """Forgets the differences of the problems of a mask (b,)."""
        if not bool(cleared.any()):
            return self
        kept = (~cleared)[:, None, None]
        return replace(self, moves=self.moves * kept, steps=self.steps * kept, gram=self.gram * kept)

    def next_point(self) -> tuple[Tensor, Tensor]:
        r"""Anderson's next point (b, n) and the residual (b, n) of its combination.

        With :math:`\gamma` minimising :math:`\|r - \sum_i \gamma_i \Delta r_i\|` the point is
        :math:`g - \sum_i \gamma_i \Delta g_i` and the residual what is minimised.
        """
        used = min(self.count, self.steps.shape[1])
        steps, moves, gram = self.steps[:, :used], self.moves[:, :used], self.gram[:, :used, :used]
        right = (steps @ self.residual.unsqueeze(-1)).to(gram.dtype)
        # Nearly dependent steps carry rounding only; empty slots must not make the matrix singular.
        ridge = 16.0 * torch.finfo(self.image.dtype).eps
        eye = torch.eye(used, dtype=gram.dtype, device=gram.device)
        gamma, _ = torch.linalg.solve_ex(gram + ridge * eye, right)
        gamma = gamma.to(moves.dtype)
        return self.image - (gamma * moves).sum(1), self.residual - (gamma * steps).sum(1)
