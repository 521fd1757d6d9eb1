"""Which kernels compute-sanitizer has watched, and by which of its tools.

``python tests/gpu/sanitized_kernels.py --output FILE`` runs what ``test_sanitizer`` runs, without a
tool, and notes the kernels that each program launches; the tests say what the tools found in those."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path += [
    str(ROOT / folder) for folder in ("bench", "tests")
]  # where it is no test that imports this

import checked_kernels  # noqa: E402
import results_file  # noqa: E402
import torch  # noqa: E402
from checked_kernels import CHECKED, compiled, function_of  # noqa: E402

from mkernel.harness.provenance import devices, provenance  # noqa: E402

NVCC = shutil.which("nvcc") or "/usr/local/cuda/bin/nvcc"
SANITIZER = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
FOUND = 86
"""Exit status of a program in which a tool has found something."""
TOOLS = ("memcheck", "initcheck", "racecheck", "synccheck")
AT_A_TIME = 6
"""Programs: most of what one takes is the start of its processes."""
NAMES = "names"
"""In a tool's place: nothing watches."""
OF_OTHERS = "it reads what other ranks wrote, which initcheck takes for what nobody wrote"
BESIDE_CUBLAS = "it runs beside cuBLAS' kernels alone, where racecheck itself fails"
_TAKING = (
    "cuda::attention::await_part_kernel", "cuda::attention::put_kernel",
    "hopper::attention::ring_attention", "cuda::attention::sum_kernel",
    "cuda::attention::watch_kernel", "cuda::collectives::all_gather_kernel",
    "cuda::collectives::all_reduce_one_shot_kernel",
    "cuda::collectives::mail_all_gather_kernel",
    "cuda::collectives::mail_all_reduce_twice_kernel", "cuda::collectives::mail_reduce_kernel",
    "cuda::collectives::reduce_kernel", "cuda::collectives::sum_parts_kernel",
    "cuda::land_kernel", "hopper::mailed_tiles", "cuda::moe::land_lists_kernel",
    "cuda::moe::list_leaving_kernel", "cuda::moe::push_wanted_kernel", "cuda::moe::put_lists_kernel",
    "cuda::moe::sum_ranks_kernel", "cuda::moe::sum_rows_kernel", "cuda::put_kernel",
    "cuda::rendezvous_kernel", "cuda::scale_results_kernel", "cuda::sum_rows_kernel",
    "cuda::sum_rows_twice_kernel",
)  # fmt: skip
_BESIDE = (
    "cuda::collectives::sum_parts_kernel",
    "cuda::rendezvous_kernel",
    "cuda::scale_results_kernel",
)
UNWATCHED: dict[tuple[str, str], str] = {
    **{(f"mkernel::{name}", "initcheck"): OF_OTHERS for name in _TAKING},
    **{(f"mkernel::{name}", "racecheck"): BESIDE_CUBLAS for name in _BESIDE},
}
"""Why a tool does not watch a kernel: it runs in worlds of several ranks only, and ..."""


def run_sanitized(tool: str, program: list[str], world: int, folder: Path) -> list[tuple[int, str]]:
    """What each rank ends with under the tool, and all that was printed; :data:`FOUND` where the tool
    has found something. :data:`NAMES`: without one."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    # torch's kernels are not ours to judge, but what they write is initialised.
    ours = [] if tool == "initcheck" else ["--kernel-name", "kernel_substring=mkernel"]
    watched = [SANITIZER, "--tool", tool, "--error-exitcode", str(FOUND), *ours]
    command = [*(watched if tool in TOOLS else ()), sys.executable, *program]
    logs = [folder / f"rank{rank}" for rank in range(world)]
    ranks = []
    try:
        for rank, log in enumerate(logs):
            environment = {
                "RANK": rank, "WORLD_SIZE": world, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": world,
                "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port,
                "PYTHONPATH": os.pathsep.join(sys.path),
            }  # fmt: skip
            with log.open("w") as file:
                ranks.append(
                    subprocess.Popen(
                        command,
                        stdout=file,
                        stderr=subprocess.STDOUT,
                        env={**os.environ, **{k: str(v) for k, v in environment.items()}},
                    )
                )
        for process in ranks:
            process.wait(350)
    finally:
        for process in ranks:
            process.kill()
            process.wait()
    return [(process.returncode, log.read_text()) for process, log in zip(ranks, logs, strict=True)]


Seen = dict[str, dict[str, dict[str, list[str]]]]
"""Kernels by name, then tools, then programs: those of its instances that were launched."""


def seen(folder: Path) -> Seen:
    """What each program launches in worlds of as many ranks as its tools take. AssertionError where one
    of them is wrong."""
    found: Seen = {name: {} for name in compiled()}
    asked = [
        (what, world)
        for what, program in CHECKED.items()
        for world in sorted(set(program.ranks.values()))
    ]
    with ThreadPoolExecutor(AT_A_TIME) as pool:
        launched = pool.map(partial(_launched, folder), *zip(*asked, strict=True))
        for (what, world), names in zip(asked, launched, strict=True):
            for tool in (tool for tool, ranks in CHECKED[what].ranks.items() if ranks == world):
                for name in names:
                    kernel = found.setdefault(function_of(name), {})
                    kernel.setdefault(tool, {}).setdefault(what, []).append(name)
    return found


def _launched(folder: Path, what: str, world: int) -> list[str]:
    here = folder / f"{what}-{world}"
    here.mkdir()
    ran = run_sanitized(NAMES, [checked_kernels.__file__, what, NAMES], world, here)
    for status, text in ran:
        assert status == 0, f"{what} of {world} ranks: {text[:3000]}\n[..]\n{text[-2000:]}"
    lines = {line for _, text in ran for line in text.splitlines()}
    return sorted(line.removeprefix("kernel ") for line in lines if line.startswith("kernel "))


def missing(found: Seen) -> list[str]:
    """Kernels that a tool has not watched, though nothing says why not; and the other way round."""
    every = {(name, tool) for name in found for tool in TOOLS}
    unwatched = {(name, tool) for name, tool in every if not found[name].get(tool)}
    lost = [f"{tool} has not seen {name}" for name, tool in unwatched - UNWATCHED.keys()]
    needless = [f"{tool} sees {name}" for name, tool in UNWATCHED.keys() - unwatched]
    return sorted(lost + needless)


def main() -> int:
    """1 where a kernel is missing."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, required=True, metavar="FILE")
    parser.add_argument("--commit", help="of this tree, where there is no git to ask")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = seen(Path(folder))
    instances = compiled()
    kernels: dict[str, Any] = {
        name: {
            "instances": instances.get(name, 0),
            "watched": {
                tool: {
                    "instances": len({each for names in programs.values() for each in names}),
                    "programs": sorted(programs),
                }
                for tool, programs in sorted(tools.items())
            },
            "not watched": {t: why for (kernel, t), why in UNWATCHED.items() if kernel == name},
        }
        for name, tools in sorted(found.items())
    }
    lost = missing(found)
    written = {"format": results_file.FORMAT, "benchmark": "sanitized_kernels"}
    written |= provenance(ROOT, asked.commit)
    written["hardware"] = {**written["hardware"], **devices(torch.device("cuda"))}
    written["figures"] = {"kernels": kernels, "missing": lost}
    asked.output.write_text(json.dumps(written, indent=1) + "\n")
    print(*lost or ["every kernel is watched by every tool that can"], sep="\n")
    return 1 if lost else 0


if __name__ == "__main__":
    sys.exit(main())
