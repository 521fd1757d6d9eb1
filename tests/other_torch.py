"""Runs the tests of what torch calls of ours, and what is called of torch, with another torch:

    python tests/other_torch.py 2.9.1

The torch goes into a virtual environment of its own, which is removed afterwards. All other packages
are those of the Python that runs this, mkernel as it is built here among them.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

import layered_environment

ROOT = Path(__file__).parents[1]
TESTS = (
    "tests/torch/test_call_path.py",
    "tests/torch/test_registered_ops.py",
    "tests/torch/test_eager_ops.py",
    "tests/torch/test_operands.py",
    "tests/multiprocess/test_known_calls.py",
    "tests/unit/ops/test_signatures_alone.py",
)


def main(version: str) -> int:
    """Return pytest's exit code."""
    with tempfile.TemporaryDirectory() as folder:
        wanted = "torch" if version == "newest" else f"torch=={version}"
        python = layered_environment.make(folder, (wanted, "numpy"))
        shown = "import torch; print('torch', torch.__version__)"
        subprocess.run([python, "-c", shown], check=True)
        return subprocess.run(
            [python, "-m", "pytest", "-n", "2", *TESTS], cwd=ROOT, check=False
        ).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
