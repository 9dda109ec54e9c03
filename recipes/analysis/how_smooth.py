"""How smooth is the attention of a Transformer on text, and how does it change with the length?

    python -m recipes.analysis.how_smooth
    python -m recipes.analysis.how_smooth --model DIRECTORY_OR_NAME --text FILE.txt
    python -m recipes.analysis.how_smooth --adversarial
    python -m recipes.analysis.how_smooth --bound jasmin      # an upper bound beside each gain, too

Cuts sequences of n tokens out of a text, runs the model on each and measures, at the tokens that enter
each attention layer, the local gain of its pure attention (the largest singular value of the Jacobian:
no residual, no LayerNorm, no dropout, causal where the layer is). Prints the gains of each length as
they come, and writes gains.csv, gains.png and summary.md with the exponent p of gain ~ n^p for each
layer.

What to expect: the default, a random GPT-2-type model on documentation that comes with Python, takes
a minute and a half on one core. A random model looks almost evenly at all tokens, so that its gain
hardly grows; that of trained ones grows in most layers (Castin, Ablin, Peyré, ICML 2024: like n^0.24
to n^0.26 in most layers of BERT and GPT-2, n^0.51 in one). With --adversarial the tokens are not text
but one outlier among copies at the same largest norm: what the outlier does to the copies grows like
n^0.5 where logits are large, in a real layer with jumps where another head becomes the steepest.

--model takes a directory or hub name of a BERT-, RoBERTa-, DistilBERT- or GPT-2-type model (needs
transformers, and a network for names), or random-gpt2, random-bert.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from jsonargparse.typing import PositiveFloat, PositiveInt
from rich.progress import track
from torch import Tensor

from lipformer.analysis import GainRow, GainTable, adversarial_tokens, layer_gains, probe_attention
from lipformer.estimates import estimate_lipschitz
from recipes.output import exit_code, markdown, parser, usable_directory, write_text
from training.corpus import embedded_text
from training.errors import BadInput, first_line
from training.progress import print_plain

LENGTHS = (2, 3, 4, 6, 8, 11, 16, 23, 33, 48, 69, 100)
# More of a text is not needed to cut out a few hundred sequences.
MOST_CHARACTERS = 2_000_000
PAPER = "0.24 to 0.26 in most layers of BERT and GPT-2, 0.51 in layer 6 of pretrained GPT-2"


def arguments() -> argparse.ArgumentParser:
    """The command line."""
    given = parser(__doc__)
    add = given.add_argument
    add("--model", default="random-gpt2", help="directory, hub name, random-gpt2 or random-bert")
    add("--text", type=Path, help="text file (%(default)s: documentation that comes with Python)")
    add("--out", type=Path, default=Path("report/how_smooth"), help="directory of all output")
    add("--lengths", type=PositiveInt, nargs="+", default=list(LENGTHS), help="tokens of a sequence")
    add("--sequences", type=PositiveInt, default=10, help="for each length")
    add("--depth", type=PositiveInt, default=6, help="layers of a random model (BERT and GPT-2: 12)")
    add("--width", type=PositiveInt, default=384, help="of a random model (BERT and GPT-2: 768)")
    add("--heads", type=PositiveInt, default=6, help="of a random model (BERT and GPT-2: 12)")
    add("--special", action="store_true", help="begin with the tokenizer's [CLS], end with its [SEP]")
    add("--heads-only", action="store_true", help="attention without its output projection")
    bounds = ["none", "jasmin", "min"]
    add("--bound", choices=bounds, default="none", help="above each gain; min takes much longer")
    add("--adversarial", action="store_true", help="steep tokens instead of text, at the norms of text")
    add("--tol", type=PositiveFloat, default=1e-4, help="relative tolerance of a gain")
    add("--seed", type=int, default=0, help="of random weights, sequences and starts")
    return given


def random_model(options: argparse.Namespace) -> torch.nn.Module:
    """A model at initialisation with an entry of its vocabulary for each byte."""
    import transformers

    config = transformers.AutoConfig.for_model(options.model.removeprefix("random-"))
    sizes = {"hidden_size": options.width, "intermediate_size": 4 * options.width}
    sizes |= {"num_hidden_layers": options.depth, "num_attention_heads": options.heads}
    sizes |= {"max_position_embeddings": max(options.lengths), "vocab_size": 256}
    config.update({**sizes, "bos_token_id": 0, "eos_token_id": 0})
    return transformers.AutoModel.from_config(config)


def load(options: argparse.Namespace) -> tuple[torch.nn.Module, Tensor, list[int]]:
    """The model, the text as ids (T,), and the ids to put around each sequence (none, or two)."""
    try:
        import transformers
    except ImportError:
        raise BadInput("this recipe needs transformers: pip install 'lipformer[hf]'") from None
    try:
        text = embedded_text() if options.text is None else options.text.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise BadInput(f"--text must be UTF-8 text, got {str(options.text)!r}: {error}") from None
    text = text[:MOST_CHARACTERS]
    if options.model in ("random-gpt2", "random-bert"):
        if options.special:
            raise BadInput(f"--special needs a tokenizer, and {options.model} has bytes")
        return random_model(options), torch.tensor(list(text.encode())), []
    # Loading bars and remarks on long inputs are not what this recipe reports.
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    try:
        model = transformers.AutoModel.from_pretrained(options.model, attn_implementation="eager")
        tokenizer = transformers.AutoTokenizer.from_pretrained(options.model)
    # What transformers raises for names and directories that it cannot use; its first line says why.
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise BadInput(f"--model {options.model} cannot be loaded: {first_line(error)}") from None
    around = [tokenizer.cls_token_id, tokenizer.sep_token_id] if options.special else []
    if None in around:
        raise BadInput(f"--special: the tokenizer of {options.model} has no [CLS] and [SEP]")
    return model, text_ids(tokenizer, text, options.model), around


def text_ids(tokenizer: Any, text: str, model: str) -> Tensor:
    """The text as ids (T,); ends the program where they would not be the text."""
    # Without tokenizer files transformers makes one up that knows nothing but its special tokens.
    if len(tokenizer) <= len(tokenizer.all_special_tokens):
        raise BadInput(f"{model} has no tokenizer")
    ids = torch.tensor(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]).long()
    unknown = 0 if tokenizer.unk_token_id is None else int((ids == tokenizer.unk_token_id).sum())
    # GPT-2's unknown token is its end of text, which real text seldom holds.
    if 2 * unknown > len(ids):
        raise BadInput(f"the tokenizer of {model} knows too little: {unknown} of {len(ids)} unknown")
    return ids


def sequences(ids: Tensor, around: list[int], options: argparse.Namespace) -> list[Tensor]:
    """Random pieces of the text, --sequences for each length; special tokens count."""
    shortest, longest = min(options.lengths) - len(around), max(options.lengths) - len(around)
    if shortest < 1 or options.sequences < 1:
        raise BadInput(f"--lengths must leave at least one token of text, got {options.lengths}")
    if len(ids) <= longest:
        raise BadInput(f"the text has {len(ids)} tokens, too few for sequences of {longest}")
    generator = torch.Generator().manual_seed(options.seed)
    cut = []
    for n in options.lengths:
        size = n - len(around)
        for start in torch.randint(len(ids) - size, (options.sequences,), generator=generator).tolist():
            piece = ids[start : start + size]
            first, last = torch.tensor(around[:1]).long(), torch.tensor(around[1:]).long()
            cut.append(torch.cat([first, piece, last]))
    return cut


def text_gains(model: torch.nn.Module, cut: list[Tensor], options: argparse.Namespace) -> GainTable:
    """Gains at the text's own tokens, length by length."""
    generator = torch.Generator().manual_seed(options.seed)
    bound = None if options.bound == "none" else options.bound
    rows: list[GainRow] = []
    for n in track(options.lengths, description="lengths"):
        first = rows[-1].sequence + 1 if rows else 0
        some = cut[first : first + options.sequences]
        found = layer_gains(
            model, some, tol=options.tol, bound=bound,
            output_projection=not options.heads_only, generator=generator,
        ).rows  # fmt: skip
        rows += [replace(row, sequence=first + row.sequence) for row in found]
        layers = sorted({row.index for row in found})
        medians = [statistics.median(r.gain for r in found if r.index == layer) for layer in layers]
        print_plain(f"n = {n}: " + "  ".join(f"{gain:.4g}" for gain in medians))
    return GainTable(tuple(rows))


def steep_gains(model: torch.nn.Module, cut: list[Tensor], options: argparse.Namespace) -> GainTable:
    """Gains at the adversarial tokens whose norm is the largest that the text leads to in each layer."""
    longest = max(cut, key=len)
    probes = probe_attention(model, longest, output_projection=not options.heads_only)
    rows = []
    for probe in track(probes, description="layers"):
        maps = probe.maps()
        if maps is None:
            raise BadInput(f"{probe.name}: no adversarial tokens for logits that depend on positions")
        radius = float(probe.tokens.norm(dim=-1).max())
        for number, n in enumerate(options.lengths):
            x = adversarial_tokens(maps, n, radius).float()
            found = estimate_lipschitz(probe.attention, x, tol=options.tol, max_iter=500, restarts=2)
            rows.append(
                GainRow(number, probe.name, probe.index, n, radius, found.value, None,
                        found.iterations, found.converged)
            )  # fmt: skip
        gains = [row.gain for row in rows if row.index == probe.index]
        print_plain(f"{probe.name}: " + "  ".join(f"{gain:.4g}" for gain in gains))
    return GainTable(tuple(rows))


def name(options: argparse.Namespace) -> str:
    """The model's name, or the end of its path."""
    return "/".join(Path(options.model).parts[-2:])


def summary(table: GainTable, options: argparse.Namespace) -> str:
    """What was measured, as Markdown."""
    first, last = min(options.lengths), max(options.lengths)
    source = "Python's documentation" if options.text is None else options.text.name
    kind = "adversarial tokens at the norms of " if options.adversarial else ""
    head = (
        f"# Local gain of the attention of {name(options)}\n\n"
        f"On {kind}{source}, n = {first}..{last} tokens, {len(table)} gains, relative tolerance "
        f"{options.tol:g} ({sum(row.converged for row in table.rows)} met it), "
        f"output projection {'excluded' if options.heads_only else 'included'}"
        f"{', with special tokens' if options.special else ''}.\n"
        "Gain: the largest singular value of the Jacobian of pure attention, a lower estimate.\n"
        f"The paper's exponents of n: {PAPER}; adversarial tokens 0.5.\n\n"
    )
    lines = []
    for fit in table.exponents():
        rows = [row for row in table.rows if row.index == fit.index]
        gains = {n: statistics.median(row.gain for row in rows if row.n == n) for n in (first, last)}
        shares = [row.gain / row.bound for row in rows if row.bound]
        error = "" if math.isnan(fit.error) else f" ± {fit.error:.3f}"
        lines.append(
            {
                "layer": f"{fit.index} {fit.layer}",
                "exponent of n": f"{fit.exponent:.3f}{error}",
                **{f"gain at n={n}": gain for n, gain in gains.items()},
                "radius": statistics.median(row.radius for row in rows),
                "gain/bound": f"{statistics.median(shares):.3f}" if shares else "-",
            }
        )
    return head + markdown(lines) + "\n"


def run(options: argparse.Namespace) -> None:
    """Measures, writes the three files and prints the summary."""
    if len(set(options.lengths)) < 2:
        raise BadInput(f"--lengths needs two different lengths to fit a growth, got {options.lengths}")
    if options.adversarial and options.bound != "none":
        raise BadInput(f"--adversarial has no bounds: leave out --bound, got {options.bound}")
    torch.manual_seed(options.seed)
    model, ids, around = load(options)
    cut = sequences(ids, around, options)
    usable_directory(options.out)
    print_plain(
        "gain of each length, layer by layer"
        if options.adversarial
        else f"gain of each layer, the median of {options.sequences} sequences"
    )
    table = (steep_gains if options.adversarial else text_gains)(model, cut, options)
    table.to_csv(options.out / "gains.csv")
    table.plot(options.out / "gains.png", title=f"attention of {name(options)}")
    text = summary(table, options)
    write_text(options.out / "summary.md", text)
    print(text)


def main(given: list[str] | None = None) -> int:
    """Runs the command line; returns the exit code."""
    options = arguments().parse_args(given)
    return exit_code(lambda: run(options))


if __name__ == "__main__":
    sys.exit(main())
