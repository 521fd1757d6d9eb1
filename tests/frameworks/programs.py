"""Runs the programs of examples/frameworks with the packages that they are for, on CPUs:

    python tests/frameworks/programs.py                 # all of them
    python tests/frameworks/programs.py torchtitan      # one

Each has a virtual environment of its own, in a temporary folder that is removed afterwards, with the
versions that are named here and torch and mkernel of the Python that runs this. It needs the package
index, and 2 GB of disk for the largest. The exit code is that of the first program that failed.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "tests"))

import layered_environment  # noqa: E402

EXAMPLES = "examples/frameworks"
TORCHRUN = "-m torch.distributed.run --standalone --local-addr 127.0.0.1 --nproc-per-node"
LIMIT_S = 900
"""Seconds that a command may take; each takes a minute or two on two idle CPUs."""


class Framework(NamedTuple):
    """A program: what pip installs for it, call after call, and what Python runs then."""

    installs: tuple[str, ...]
    commands: tuple[str, ...]


MEGATRON = f"{TORCHRUN} 2 {EXAMPLES}/megatron_core_gpt.py"
FRAMEWORKS = {
    "transformers": Framework(
        ("transformers==5.24.0 accelerate==1.15.0",),
        (
            f"{TORCHRUN} 2 {EXAMPLES}/transformers_fp8.py",
            f"{TORCHRUN} 4 examples/transformers_models.py --tp 2",
        ),
    ),
    "torchtitan": Framework(
        (
            "--no-deps torchtitan==0.2.2 torchdata==0.11.0 triton==3.7.0",
            "datasets==5.2.0 einops==0.8.2 tensorboard==2.21.0 tomli==2.5.0 tyro==1.0.17",
        ),
        (
            f"{TORCHRUN} 2 {EXAMPLES}/torchtitan_llama.py",
            f"{TORCHRUN} 4 {EXAMPLES}/torchtitan_llama.py --tp 2 --steps 10",
        ),
    ),
    "megatron-core": Framework(("--no-deps megatron-core==0.16.1",), (MEGATRON,)),
    # It names Python 3.12 as the oldest, and its wheel for 3.11 is there; triton is imported only.
    "megatron-core-0.19": Framework(
        ("--no-deps --ignore-requires-python megatron-core==0.19.2 triton==3.7.0",), (MEGATRON,)
    ),
    "ray": Framework(("ray[train]==2.60.0",), (f"{EXAMPLES}/ray_train.py",)),
}


def run(name: str) -> int:
    """Make the environment and run the programs in it. Return the first exit code that is not 0."""
    with tempfile.TemporaryDirectory() as folder:
        framework = FRAMEWORKS[name]
        installs = [words.split() for words in framework.installs]
        python = layered_environment.make(f"{folder}/environment", *installs, reuse=True)
        environment = {
            **os.environ,
            "HOME": folder, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1",
            "RAY_TMPDIR": folder, "PYTHONPATH": "", "PYTHONWARNINGS": "ignore",
        }  # fmt: skip
        for command in framework.commands:
            print(f"== {name}: python {command}", flush=True)
            process = subprocess.Popen(
                [python, *command.split()], cwd=ROOT, env=environment, start_new_session=True
            )
            try:
                code = process.wait(LIMIT_S)
            finally:
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)
                    process.wait()
            if code:
                return code
    return 0


def main(names: list[str]) -> int:
    codes = {name: run(name) for name in names or FRAMEWORKS}
    print("\n".join(f"{name}: {'failed' if code else 'passed'}" for name, code in codes.items()))
    return next((code for code in codes.values() if code), 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
