"""The report of a run: certified accuracy for one token and for all, beside attacks."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from jsonargparse.typing import NonNegativeInt, PositiveFloat, PositiveInt
from torch import Tensor, nn

import lipformer as lf
from lipformer.analysis import certified_radius
from lipformer.models import EncoderClassifier
from recipes.classify.data import TextBatch, TextData
from recipes.classify.module import TextModule
from recipes.output import markdown, write_csv
from recipes.pgd import logit_margin, pgd_accuracy
from recipes.report import RunReport, count, draw_accuracy

# Tokens that may move, and what a column is called.
FEW = {"one token": 1, "all tokens": 10**6}


class Padded(nn.Module):
    """A model with its mask: embedded texts (B, N, D) -> (B, K)."""

    def __init__(self, model: EncoderClassifier, padding: Tensor) -> None:
        super().__init__()
        self.model, self.padding = model, padding

    def forward(self, x: Tensor) -> Tensor:
        """Logits."""
        return self.model(x, self.padding)


@torch.no_grad()
def distances(model: EncoderClassifier, symbols: Tensor) -> tuple[float, Tensor]:
    """The median distance of the vectors of two symbols drawn from a text, and the largest of each.

    Args:
        model: of symbols.
        symbols: of texts, (M,).

    Returns:
        a number, and (V,): how far the farthest symbol is.
    """
    assert model.config.vocab_size is not None
    every = torch.arange(model.config.vocab_size, device=symbols.device)
    table = model.embed(every[None])[0]
    drawn = symbols[torch.randperm(len(symbols), generator=torch.Generator().manual_seed(0))]
    half = len(drawn) // 2
    typical = (table[drawn[:half]] - table[drawn[half : 2 * half]]).norm(dim=-1)
    farthest = torch.cat([torch.cdist(some, table).amax(1) for some in table.split(512)])
    return typical[drawn[:half] != drawn[half : 2 * half]].median().item(), farthest


@torch.no_grad()
def exchanged_accuracy(model: EncoderClassifier, batch: TextBatch, tries: int) -> float:
    """The share of texts that stay right when any one token becomes one of some random symbols."""
    assert model.config.vocab_size is not None
    generator = torch.Generator().manual_seed(0)
    right = logit_margin(model(batch.tokens, batch.padding), batch.labels) > 0
    for place in range(batch.tokens.shape[1]):
        there = right & ~batch.padding[:, place]
        for _ in range(tries):
            tokens = batch.tokens.clone()
            drawn = torch.randint(model.config.vocab_size, (len(tokens),), generator=generator)
            tokens[:, place] = drawn.to(tokens.device)
            stays = logit_margin(model(tokens, batch.padding), batch.labels) > 0
            right &= stays | ~there
    return right.double().mean().item()


class Report(RunReport):
    """After training: certifies and attacks the test texts and writes what came out.

    Args:
        directory: of the report, the model and last.ckpt.
        eps: radii of the table; default 0.1, 0.25, 0.5, 1 and 2.
        attacked_texts: attack the first so many test texts.
        attack_steps: of PGD.
        attack_restarts: of PGD.
        exchanges: random symbols that are tried at each place of an attacked text.
        local_texts: certify the first so many by Theorem L, too, which takes a second each.
    """

    def __init__(
        self,
        directory: str = "report/classify",
        eps: list[PositiveFloat] | None = None,
        attacked_texts: PositiveInt = 100,
        attack_steps: PositiveInt = 10,
        attack_restarts: PositiveInt = 2,
        exchanges: PositiveInt = 3,
        local_texts: NonNegativeInt = 5,
    ) -> None:
        super().__init__(directory)
        self.eps = sorted(eps or [0.1, 0.25, 0.5, 1.0, 2.0])
        self.attacked_texts, self.exchanges, self.local_texts = attacked_texts, exchanges, local_texts
        self.attack = {"steps": attack_steps, "restarts": attack_restarts}

    def write(self, module: TextModule, data: TextData, updates: int, seconds: float) -> str:
        """The model with its tokenizer, the table, the picture and the text."""
        model = module.model
        model.save_pretrained(self.directory / "model")
        data.tokenizer.model_max_length = model.config.max_len  # what truncation=True cuts at
        data.tokenizer.save_pretrained(self.directory / "model")
        every = self.texts(data, module.device)
        with lf.frozen(model), torch.no_grad():
            right = logit_margin(model(every.tokens, every.padding), every.labels) > 0
            radius = {"all together": self.radii(model, every, None)}
            radius.update({name: self.radii(model, every, k) for name, k in FEW.items()})
            first = TextBatch(*(part[: self.attacked_texts] for part in every))
            rows = list(self.table(model, first, radius, right))
            swaps = self.swaps(model, every, first, radius["one token"])
            local = TextBatch(*(part[: self.local_texts] for part in every))
            better = self.radii(model, local, 1, theorem_l=True) if self.local_texts else None
        write_csv(self.directory / "accuracy.csv", rows)
        attacked = {row["eps"]: row["pgd"] for row in rows}
        path = self.directory / "accuracy.png"
        draw_accuracy(radius["all together"].cpu(), attacked, path, "eps, l2 norm of the embedded text")
        return self.text(rows, radius, swaps, better, module, data, updates, seconds)

    def texts(self, data: TextData, device: torch.device) -> TextBatch:
        """The test texts in one batch."""
        rows = list(zip(data.codes["test"], data.parts["test"].labels, strict=True))
        return TextBatch(*(column.to(device) for column in data.collate(rows)))

    def radii(
        self, model: EncoderClassifier, batch: TextBatch, tokens: int | None, theorem_l: bool = False
    ) -> Tensor:
        """Certified radii (B,), 0 where the answer is wrong or, of dot products, always."""
        if model.config.variant != "l2":
            return torch.zeros(len(batch.labels), dtype=torch.float64)
        options = {"key_padding_mask": batch.padding, "tokens": tokens, "theorem_l": theorem_l}
        return certified_radius(model, model.embed(batch.tokens), batch.labels, **options).cpu()  # type: ignore[arg-type]

    def table(
        self, model: EncoderClassifier, first: TextBatch, radius: dict[str, Tensor], right: Tensor
    ) -> Iterator[dict[str, float]]:
        """A row for each eps, first 0; the attacked texts are the first of all."""
        x = model.embed(first.tokens)
        padded = Padded(model, first.padding)
        for eps in (0.0, *self.eps):
            stands = {name: (found > eps).double() for name, found in radius.items()}
            if eps == 0.0:
                stands = dict.fromkeys(radius, right.double().cpu())
            attack = self.attack if eps else {"steps": 0, "restarts": 1}
            yield {
                "eps": eps,
                **{name: each.mean().item() for name, each in stands.items()},
                "pgd": pgd_accuracy(padded, x, first.labels, eps, len(x), box=None, **attack),
                "attacked": stands["all together"][: len(x)].mean().item(),
            }

    def swaps(
        self, model: EncoderClassifier, every: TextBatch, first: TextBatch, radius: Tensor
    ) -> dict[str, float]:
        """What one token can do: the typical distance, and shares of texts."""
        typical, farthest = distances(model, every.tokens[~every.padding])
        reach = farthest[every.tokens].masked_fill(every.padding, 0.0).amax(1).cpu()
        return {
            "typical distance": typical,
            "certified at the typical distance": (radius > typical).double().mean().item(),
            "certified against every exchange": (radius > reach).double().mean().item(),
            "right under random exchanges": exchanged_accuracy(model, first, self.exchanges),
        }

    def text(
        self,
        rows: list[dict[str, float]],
        radius: dict[str, Tensor],
        swaps: dict[str, float],
        better: Tensor | None,
        module: TextModule,
        data: TextData,
        updates: int,
        seconds: float,
    ) -> str:
        """The report as Markdown."""
        model = module.model
        names = {name: f"certified, {name}" for name in radius}
        names |= {"pgd": "PGD, attacked texts", "attacked": "certified, attacked texts"}
        shown = [
            {"eps": f"{row['eps']:g}", **{names[k]: f"{row[k]:.1%}" for k in names}} for row in rows
        ]
        one = radius["one token"]
        how = "no certificate"
        if model.config.variant == "l2":
            how = f"certified constant {lf.certify(model).bound:.6g} from embedded text to logits"
        local = ""
        if better is not None and model.config.variant == "l2":
            local = (
                f"Theorem L around each of the first {len(better)} texts: median radius of one token "
                f"{better.median().item():.3g}, without it {one[: len(better)].median().item():.3g}.\n\n"
            )
        classes = ", ".join(f"{number} is {name}" for number, name in enumerate(data.class_names))
        return (
            f"# {data.described}: a classifier of texts ({model.config.variant})\n\n"
            f"    {self.command}\n\n"
            f"{data.vocab_size:,} symbols, {count(module):,} parameters ({count(model.body):,} without "
            f"the symbols' vectors), {updates} updates in {seconds:.0f} s; {len(one)} test texts, "
            f"{how}. Classes: {classes}. eps is the l2 norm of the whole change (all together), or the "
            "distance that each of so many tokens moves. PGD changes all of the first "
            f"{min(len(one), self.attacked_texts)} texts, by {self.attack['steps']} steps from each of "
            f"{self.attack['restarts']} starts.\n\n"
            f"{markdown(shown)}\n\n"
            f"A certified radius above zero: {(one > 0).double().mean().item():.1%} of the texts; "
            f"median {one.median().item():.3g} for one token. The vectors of two symbols are typically "
            f"{swaps['typical distance']:.3g} apart. One token that moves so far cannot turn the answer "
            f"in {swaps['certified at the typical distance']:.1%} of the texts, one that becomes any "
            f"other symbol in {swaps['certified against every exchange']:.1%} (certified); "
            f"{swaps['right under random exchanges']:.1%} of the attacked texts stay right under "
            f"{self.exchanges} random symbols at each place.\n\n{local}"
            "- `accuracy.png`, `accuracy.csv`: the table; `model/`: the model, for\n"
            "  `lipformer.models.EncoderClassifier.from_pretrained`, and its tokenizer.\n"
            "- `last.ckpt`: the state at the end; one that an interrupted run leaves is finished by\n"
            "  `fit --ckpt_path` with the same settings. `logs/`: CSV logs and the configuration.\n"
        )
