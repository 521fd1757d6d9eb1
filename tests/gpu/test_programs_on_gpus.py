"""Programs on GPUs: collectives of torch that the compiler fuses, and examples."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import program_ranks
import pytest
from device_buffers import needs_gpus

import mkernel

EXAMPLES = Path(__file__).parents[2] / "examples"
EXAMPLE, EXPERTS = EXAMPLES / "train_tensor_parallel.py", EXAMPLES / "qwen3_moe.py"
SERVER = EXAMPLES / "serving.py"
LIMIT = 0.02
"""Of a relative error: products in bfloat16 behind one another, whose sums are rounded elsewhere."""

pytestmark = [needs_gpus(2), pytest.mark.usefixtures("leaves_nothing")]


@pytest.mark.parametrize("mode", [None, "reduce-overhead"])
@pytest.mark.parametrize(
    ("sequence_dim", "rewritten"),
    [
        (None, {"gemm_all_reduce": 3}),
        (0, {"all_gather_gemm_gathered": 2, "gemm_reduce_scatter": 3}),
        (1, {"all_gather_gemm_gathered": 2, "gemm_reduce_scatter": 3}),
    ],
)
def test_collectives_of_compiled_programs_become_ops(
    sequence_dim: int | None, rewritten: dict[str, int], mode: str | None, tmp_path: Path
) -> None:
    for found, errors in mkernel.launch(
        program_ranks.rewritten, str(tmp_path), sequence_dim, mode,
        ranks_per_node=2, accelerator="hopper", timeout_s=200,
    ):  # fmt: skip
        assert found == rewritten
        assert max(errors) <= LIMIT, errors


@pytest.mark.parametrize(
    ("accelerator", "dtype", "tolerance"),
    [("streams", "float32", 1e-3), ("hopper", "bfloat16", 0.1)],
)
def test_the_training_example(
    accelerator: str, dtype: str, tolerance: float, torchrun: list[str]
) -> None:
    """In bfloat16 two orders of adding differ by more with every step that is learnt from them."""
    judge_losses(EXAMPLE, accelerator, dtype, tolerance, torchrun)


@pytest.mark.parametrize(
    ("accelerator", "dtype", "tolerance"),
    [("streams", "float32", 1e-3), ("hopper,streams", "bfloat16", 0.1)],
)
def test_the_example_of_shared_experts(
    accelerator: str, dtype: str, tolerance: float, torchrun: list[str]
) -> None:
    pytest.importorskip("transformers", reason="transformers is not installed")
    judge_losses(EXPERTS, accelerator, dtype, tolerance, torchrun)


@pytest.mark.alone
@pytest.mark.parametrize(("accelerator", "width"), [("streams", "tiny"), ("hopper", "8b")])
def test_the_serving_example(accelerator: str, width: str, torchrun: list[str]) -> None:
    """With ``hopper`` decode steps are graphs, and 64 MiB is what memory may grow by."""
    options = ["--accelerator", accelerator, "--width", width, "--dtype", "bfloat16"]
    code, said = ended(
        [*torchrun, "--nproc-per-node", "2", str(SERVER), *options, "--seconds", "20"]
    )
    assert code == 0, said
    assert len(re.findall(r"rank \d of 2 on \S+: \d+ periods, logits differ", said)) == 2
    assert re.search(r"answers: mkernel \d+, nccl \d+$", said, re.MULTILINE), said


def judge_losses(
    example: Path, accelerator: str, dtype: str, tolerance: float, torchrun: list[str]
) -> None:
    """Both ranks' losses are the unsharded model's."""
    options = ["--accelerator", accelerator, "--dtype", dtype, "--tolerance", str(tolerance)]
    code, said = ended([*torchrun, "--nproc-per-node", "2", str(example), *options])
    assert code == 0, said
    assert len(re.findall(r"rank \d of 2 on \S+: losses differ", said)) == 2


def ended(command: list[str]) -> tuple[int, str]:
    """The exit code of a program, and what it printed."""
    done = subprocess.run(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=280,
        check=False,
    )
    return done.returncode, done.stdout
