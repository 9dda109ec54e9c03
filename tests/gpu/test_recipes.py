"""Every YAML file under recipes/ trains on a GPU, without a wait of the host in a step."""

from __future__ import annotations

import functools
import tempfile
from typing import Any

import pytest

from tests.gpu.log import ROOT
from tests.gpu.results import lines

FILES = sorted(str(path.relative_to(ROOT)) for path in (ROOT / "recipes").rglob("*.yaml"))
# In `make test`: all commands of the quickstart, one fit for each variant and each kind of recipe.
QUICK = [
    "recipes/quickstart.yaml",
    "recipes/finetune.yaml:fit",
    *(f"recipes/ptb/{name}.yaml:fit" for name in ("contractive", "contractive_kim2021", "dot_product")),
    *(f"recipes/ptb/{name}.yaml:fit" for name in ("l2_untied", "l2", "lipschitz")),
    "recipes/vision/digits_l2.yaml:fit",
    "recipes/sets/ball.yaml:fit",
    "recipes/classify/opinions_l2.yaml:fit",
    "recipes/flows/moons.yaml:fit",
    "recipes/series/regimes.yaml:fit",
    "recipes/classify/pretrained.yaml:fit",
    "recipes/ptb/l2.yaml:float16",
    "recipes/ptb/l2.yaml:offering",
]
COMMANDS = ["fit", "validate", "test", "certify", "sample", "export"]
# Variants without a certificate, for which `certify` ends with 1.
UNCERTIFIED = {"dot_product.yaml", "l2_untied.yaml"}


@functools.cache
def runs(device: str, *files: str) -> dict[str, Any]:
    """What became of the files, all run by one process."""
    with tempfile.TemporaryDirectory() as folder:
        found = lines("tests.gpu.recipe_runs", device, folder, *files)
    return {run["file"]: run for run in found}


def check(run: dict[str, Any], codes: dict[str, int]) -> None:
    """All commands ended as they should, the optimiser was the GPU's, no step made the host wait.

    Waits are noted on the pretend GPU alone.
    """
    assert run["error"] == ""
    assert run["codes"] == codes
    own = any(f"/{name}/" in run["file"] for name in ("flows", "series"))
    assert run["fused"] == (not own), "recipes/flows has torch's own Adam, and so has recipes/series"
    # transformers looks at a padding mask once, whether it hides anything at all.
    assert len(run["reads"]) <= ("pretrained" in run["file"]), run["reads"]


def expected(file: str) -> dict[str, int]:
    """Exit codes of all commands of a file."""
    if any(f"/{name}/" in file for name in ("classify", "flows", "series", "sets", "vision")):
        return dict.fromkeys(COMMANDS[:3], 0)
    return {
        **dict.fromkeys([*COMMANDS, "resume"], 0),
        "certify": int(file.rpartition("/")[2] in UNCERTIFIED),
    }


@pytest.mark.parametrize("file", [file for file in QUICK if ":" not in file or file.endswith(":fit")])
def test_it_trains(file: str, device: str) -> None:
    check(runs(device, *QUICK)[file], {"fit": 0} if ":" in file else expected(file))


@pytest.mark.slow
@pytest.mark.parametrize("file", FILES)
def test_all_its_commands_run(file: str, device: str) -> None:
    """The quickstart's model, exported, is what is fine-tuned: it comes first."""
    files = sorted(FILES, key=lambda file: file != "recipes/quickstart.yaml")
    check(runs(device, *files)[file], expected(file))


def test_float16_is_scaled_clipped_and_fused(device: str) -> None:
    run = runs(device, *QUICK)["recipes/ptb/l2.yaml:float16"]
    assert (run["error"], run["codes"], run["fused"]) == ("", {"fit": 0}, True)
    # A scaler has to look whether gradients are finite.
    assert all("item" in read and "training/" not in read.split(" < ")[0] for read in run["reads"])


def test_a_fused_step_that_offers_to_unscale_is_refused(device: str) -> None:
    """The negative control: what training.optimisers takes back is what Lightning refuses to clip."""
    assert (
        "does not allow for gradient clipping"
        in (runs(device, *QUICK)["recipes/ptb/l2.yaml:offering"]["error"])
    )
