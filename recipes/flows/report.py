"""The report of a run: baselines of the same size on the same data, pictures and a table."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

import lipformer as lf
from recipes.flows.baselines import SetGaussian, real_nvp, train_real_nvp
from recipes.flows.data import PointSets
from recipes.flows.module import FlowModule
from recipes.flows.pictures import draw_density, draw_inversion, draw_samples, inversion_errors
from recipes.output import markdown
from recipes.report import RunReport, count


@dataclass(frozen=True)
class Row:
    """A model's held-out score.

    Attributes:
        model: what it is.
        parameters: how many numbers it learns.
        updates: of the optimiser, 0 for a fit in closed form.
        seconds: of training.
        nats_per_point: the mean of -log p over held-out sets, by the points of a set.
        error: its standard error over the sets.
    """

    model: str
    parameters: int
    updates: int
    seconds: float
    nats_per_point: float
    error: float

    @classmethod
    def of(
        cls, model: str, log_prob: Tensor, points: int, parameters: int, updates: int, seconds: float
    ) -> Row:
        """Sums up log p of the held-out sets, (B,)."""
        nats = -log_prob.double() / points
        error = nats.std().item() / len(nats) ** 0.5
        return cls(model, parameters, updates, seconds, nats.mean().item(), error)


def table(rows: list[Row], points: int, event: str = "set") -> str:
    """The table of the report."""
    return markdown(
        [
            {
                "model": row.model,
                "parameters": row.parameters,
                "updates": row.updates or "-",
                "training, s": f"{row.seconds:.0f}",
                "nats per point": f"{row.nats_per_point:.3f} ± {row.error:.3f}",
                f"nats per {event}": f"{points * row.nats_per_point:.2f}",
            }
            for row in rows
        ]
    )


def training_sets(data: PointSets) -> Iterator[Tensor]:
    """Batches (B, T, 2) for ever, as the flow gets them."""
    while True:
        for (x,) in data.train_dataloader():
            yield x


class Report(RunReport):
    """After training fits the baselines and writes pictures and the table.

    The RealNVP has as many parameters as the flow at the most, and gets as many updates of the same
    batch size with the same optimiser, gradient clipping and schedule; of some learning rates it gets
    the one that is best on the held-out sets, which favours it.

    Args:
        directory: of the report and of last.ckpt.
        lrs: of the RealNVP.
        samples: sets drawn from the flow.
        cells: of the grid of densities in each direction.
    """

    def __init__(
        self,
        directory: str = "report/flows",
        lrs: tuple[float, ...] = (1e-3, 3e-3),
        samples: int = 500,
        cells: int = 40,
    ) -> None:
        super().__init__(directory)
        self.lrs, self.samples, self.cells = lrs, samples, cells

    def write(self, module: FlowModule, data: PointSets, updates: int, seconds: float) -> str:
        """Scores, pictures and the text."""
        rows = self.score(module, data, updates, seconds)
        self.draw(module, data)
        return self.text(rows, data, "sequences" if module.flow.causal else "sets")

    @torch.no_grad()
    def score(self, module: FlowModule, data: PointSets, updates: int, seconds: float) -> list[Row]:
        """The flow and the baselines on the held-out sets."""
        held_out = data.held_out.to(module.device)
        log_prob = torch.cat([module.log_prob(x) for x in held_out.split(128)])
        name = "AttentionFlow, causal" if module.flow.causal else "AttentionFlow, sets"
        size = count(module)
        rows = [Row.of(name, log_prob, data.points, size, updates, seconds)]
        begin = time.perf_counter()
        batches = training_sets(data)
        gaussian = SetGaussian(torch.cat([next(batches) for _ in range(len(data.train_dataloader()))]))
        seconds = time.perf_counter() - begin
        log_prob = gaussian.log_prob(data.held_out)
        title = "Gaussian, full covariance"
        rows.append(Row.of(title, log_prob, data.points, gaussian.parameters, 0, seconds))
        rows.append(min(self.real_nvps(data, size, updates), key=lambda row: row.nats_per_point))
        return rows

    @torch.enable_grad()
    def real_nvps(self, data: PointSets, size: int, updates: int) -> list[Row]:
        """A RealNVP for each learning rate."""
        rows = []
        for rate in self.lrs:
            print(f"training the RealNVP, {updates} updates at learning rate {rate:g}")
            torch.manual_seed(0)
            model = real_nvp(data.points, 2, size)
            begin = time.perf_counter()
            train_real_nvp(model, training_sets(data), updates, rate)
            seconds = time.perf_counter() - begin
            model.eval()
            with torch.no_grad():
                log_prob = model.log_prob(data.held_out.flatten(1))  # type: ignore[operator]
            title = f"RealNVP (normflows), rate {rate:g}"
            rows.append(Row.of(title, log_prob, data.points, count(model), updates, seconds))
        return rows

    @torch.no_grad()
    def draw(self, module: FlowModule, data: PointSets) -> None:
        """The three pictures."""
        event = "sequence" if module.flow.causal else "set"
        generator = torch.Generator(module.device).manual_seed(0)
        held_out = data.held_out.to(module.device)
        with lf.frozen(module):
            samples = module.flow.sample(self.samples, data.points, generator=generator, tol=1e-4)
            draw_density(module.log_prob, held_out, self.directory / "density.png", self.cells)
        draw_samples(data.held_out, samples.cpu(), self.directory / "samples.png", event)
        tolerances = tuple(10.0**-k for k in range(1, 13))
        curves = inversion_errors(module.flow, held_out[:8], tolerances)
        draw_inversion(curves, self.directory / "inversion.png")

    def text(self, rows: list[Row], data: PointSets, events: str = "sets") -> str:
        """The report as Markdown; ``events`` is what the flow takes the points for."""
        one = events[:-1]
        return (
            f"# {data.name}: {events} of {data.points} points\n\n    {self.command}\n\n"
            f"Mean of -log p over {len(data.held_out)} held-out {events} with exact log-determinants; "
            f"less is better. ± is one standard error over the {events}. All models saw the same "
            f"training {events}; RealNVP got the flow's number of updates and the better of its "
            "learning rates.\n\n"
            f"{table(rows, data.points, one)}\n\n"
            "- `samples.png`: samples against held-out data.\n"
            f"- `density.png`: the density of one more point, given the others of a held-out {one}.\n"
            "- `inversion.png`: error of the slowest attention block's inverse and the bound of it that "
            "the record promises, in float64. On attention plain steps converge in a few evaluations; "
            "Anderson pays on rotation-like maps of few features, and on feed-forward ones saves "
            "evaluations but no time.\n"
            "- `last.ckpt`: the weights, `logs/`: CSV logs and the configuration.\n"
        )
