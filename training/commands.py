"""The commands that use a trained model: certify, sample and export."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import get_args

import torch
from jsonargparse.typing import NonNegativeFloat, PositiveInt

import lipformer as lf
from training.checkpoints import load_model
from training.corpus import decode, encode
from training.errors import BadInput
from training.monitors import Norm, attacked_estimate


def certify(arguments: list[str]) -> int:
    """Prints the certificate and the result of an attack; returns 1 if there is no certificate."""
    parser = _parser("certify", "Print the certificate table and an attacked lower estimate.")
    parser.add_argument("--norm", default="l2", choices=get_args(Norm))
    parser.add_argument("--seq-len", type=PositiveInt, help="tokens, where the bound depends on them")
    parser.add_argument("--length", type=PositiveInt, default=32, help="tokens of the attacked sequence")
    parser.add_argument("--steps", type=PositiveInt, default=20, help="of the attack")
    parser.add_argument("--restarts", type=PositiveInt, default=8, help="of the attack")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    model = load_model(options.checkpoint)
    config = model.config
    default = None if config.any_length else config.max_len
    failed = False
    try:
        print(lf.certify(model, seq_len=options.seq_len or default, norm=options.norm))
    except lf.NotCertifiable as reason:
        failed = True
        print(f"no certificate: {reason}")
    generator = torch.Generator().manual_seed(options.seed)
    length = options.length if config.any_length else min(options.length, config.max_len)
    tokens = torch.randint(config.vocab_size, (1, length), generator=generator)
    gain = attacked_estimate(model, tokens, options.norm, options.steps, options.restarts, options.seed)
    print(f"\nattack reaches {gain:.6g} in the {options.norm} norm (a lower estimate)")
    return int(failed)


def sample(arguments: list[str]) -> int:
    """Continues a text."""
    parser = _parser("sample", "Let a model continue a text.")
    parser.add_argument("--prompt", default="\n", help="what it continues (default: a new line)")
    parser.add_argument("--max-new", type=PositiveInt, default=400, help="characters to write")
    parser.add_argument(
        "--temperature", type=NonNegativeFloat, default=0.8, help="0 takes the likeliest"
    )
    parser.add_argument("--top-k", type=PositiveInt, help="draw among the k likeliest only")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    model = load_model(options.checkpoint)
    vocabulary = model.config.vocabulary
    if vocabulary is None:
        raise BadInput(f"the model in {options.checkpoint} has no vocabulary: it cannot write text")
    if not options.prompt:
        raise BadInput("--prompt must have at least one character, got ''")
    prompt = encode(options.prompt, vocabulary, "--prompt")
    generator = torch.Generator().manual_seed(options.seed)
    try:
        tokens = model.generate(
            prompt[None], options.max_new, options.temperature, options.top_k, generator
        )
    except ValueError as error:
        raise BadInput(str(error)) from error
    print(decode(tokens[0], vocabulary))
    return 0


def export(arguments: list[str]) -> int:
    """Saves the model of a checkpoint as safetensors and JSON."""
    parser = _parser("export", "Save a model with save_pretrained: safetensors and JSON.")
    parser.add_argument("directory", help="a new or empty directory")
    parser.add_argument("--force", action="store_true", help="overwrite a model in the directory")
    options = parser.parse_args(arguments)
    folder = Path(options.directory)
    if folder.is_dir() and any(folder.iterdir()) and not options.force:
        raise BadInput(f"{options.directory!r} is not empty; --force overwrites a model in it")
    model = load_model(options.checkpoint)
    try:
        model.save_pretrained(folder)
    except OSError as error:
        raise BadInput(f"{options.directory!r} cannot be written: {error}") from error
    print(f"saved in {folder}: lipformer.models.LanguageModel.from_pretrained({str(folder)!r})")
    return 0


def _parser(name: str, description: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(f"python -m training {name}", description=description)
    parser.add_argument("checkpoint", metavar="CKPT", help="a checkpoint, or a saved model's directory")
    return parser
