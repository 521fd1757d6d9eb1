"""Measurements that one program or command makes: its figures, its bars, and the result file.

    python bench/measurements.py NAME [--build build/native] [--devices 0,1]

  nic           the command FIFO, our own work per put, and puts on the soft provider, on this machine.
                Puts and memcpy of the same bytes take turns; medians. On a busy machine run it under
                ``chrt -r 1``.
  mover         puts of GPU memory over the software RDMA device, which reaches it by the CUDA mover:
                two processes, each with a GPU of its own, or with one GPU between them, where bytes go
                through pinned host memory. Puts follow each other in memory, or lie apart, so that no
                two can become one copy. The NIC is emulated: figures say nothing of GPUDirect.
  copied_flags  how often a flag that copy engines copy behind its data came before them, between GPUs 0
                and 1 in one process. Beside it, wrong orders (the flag before its data, or on another
                stream): how often these show says what the right one's zero is worth.
  main_job      wall time of the main job's command, from the shell's view, on 2 cores.
  topology_scale
                time and memory of `mkernel plan --json`, its start included, as worlds grow:
                AllGather+GEMM on nodes of 8 GPUs with 4 NICs next to each.

Writes ``bench/results/NAME.json``. Exit code 1 where a bar of :data:`TABLE` is missed.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import results_file
import torch

from mkernel.harness.provenance import devices
from mkernel.topology.model import Accelerator, Nic, Node, NumaNode, Topology

LIMIT_S = 240
NIC_MEGABYTES, MOVER_MEGABYTES = 2048, 1024
"""Moved per size of put."""
RAIL = {"MKERNEL_SOFTVERBS_BANDWIDTH_MBPS": "400000", "MKERNEL_SOFTVERBS_LATENCY_NS": "3000"}
LINKS: dict[str, dict[str, str]] = {"unlimited": {}, "400 Gb/s, 3 us": RAIL}
BAR_SIZES = (64 << 10, 256 << 10)
RIGHT_ITERATIONS, WRONG_ITERATIONS = 1_000_000, 20_000
WRONG_ORDERS = ("flag_before_data", "flag_on_another_stream")
SCHEDULING = {os.SCHED_RR: "real-time, round robin", os.SCHED_OTHER: "normal"}
JOBS = 3
GPUS, NICS_EACH = 8, 4
NODES = (1, 64, 1024, 4096, 8192)  # the hopper backend has flags for 114,688 ranks
PLANNED = {"m": 131072, "n": 28672, "k": 8192}
PLAN = """
import atexit, pathlib, sys
def peak_kb():  # its own: what a process had before exec counts in getrusage
    status = pathlib.Path("/proc/self/status").read_text()
    print(status.split("VmHWM:")[1].split()[0], file=sys.stderr)
atexit.register(peak_kb)
from mkernel.cli.main import main
main()
"""

Figures = dict[str, Any]


class Place(NamedTuple):
    """Where programs lie, and the GPUs that they may use."""

    build: Path
    gpus: tuple[int, int]


class Measurement(NamedTuple):
    """One row: what measures, and its bars by their words, which are held or not."""

    measure: Callable[[Place], Figures]
    bars: Mapping[str, Callable[[Figures], bool]]


def told(
    program: Path,
    *arguments: object,
    settings: Mapping[str, str] | None = None,
    codes: Collection[int] = (0,),
) -> Figures:
    """Return what a program printed. SystemExit: it is not built, failed, or did not end."""
    if not program.is_file():
        raise SystemExit(f"{program} is not built; `make test` builds it, or name --build")
    command = [str(program), *map(str, arguments)]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=LIMIT_S, check=False,
            env={**os.environ, **(settings or {})},
        )  # fmt: skip
    except subprocess.TimeoutExpired as late:
        raise SystemExit(f"{' '.join(command)}: no end within {late.timeout} s") from late
    if done.returncode not in codes:
        said = done.stderr or done.stdout
        raise SystemExit(f"{' '.join(command)} returned {done.returncode}: {said}")
    figures: Figures = json.loads(done.stdout)
    return figures


def nic(place: Place) -> Figures:
    """Run both benchmarks of ``tests/native/nics``."""
    nics = place.build / "backends" / "nics"
    load = round(os.getloadavg()[0], 2)  # of the machine: other work on it makes figures noisy
    own = told(nics / "tests" / "own_work_benchmark", nics / "tests" / "libnull_verbs.so")
    soft = nics / "libmkernel_softverbs.so"
    puts = told(nics / "tests" / "put_benchmark", soft, NIC_MEGABYTES)
    scheduling = SCHEDULING.get(os.sched_getscheduler(0), "other")
    return {"load_before": load, "scheduling": scheduling, **own, **puts}


def mover(place: Place) -> Figures:
    """Return a row for every NIC backend, link and size. SystemExit: wrong bytes."""
    program = place.build / "backends" / "accelerators" / "cuda" / "tests" / "mover_benchmark"
    library = place.build / "backends" / "nics" / "libmkernel_softverbs.so"
    rows = []
    for name in ("cx7", "efa"):
        for link, settings in LINKS.items():
            found = told(program, library, name, *place.gpus, MOVER_MEGABYTES, settings=settings)
            if not found["right"]:
                raise SystemExit(f"{name} over {link}: wrong bytes")
            half = found["half_round_trip_us"]
            said = {"nic": name, "link": link, "half_round_trip_us": half}
            rows.extend({**said, **row} for row in found["puts"])
    gpus = len({*place.gpus})
    return {**devices(torch.device("cuda")), "gpus_used": gpus, "nic": "emulated", "puts": rows}


def fast_puts(figures: Figures) -> bool:
    """Return whether puts that follow each other are as fast as they are to be, on `cx7` between two
    GPUs; one GPU between both ranks has no bar."""
    rates = [
        row["gbs"]
        for row in figures["puts"]
        if (row["nic"], row["link"]) == ("cx7", "unlimited") and row["nbytes"] in BAR_SIZES
    ]
    return figures["gpus_used"] == 1 or min(rates) >= 48.0


def copied_flags(place: Place) -> Figures:
    """Run the check, which returns 1 where a word was wrong, and the wrong orders."""
    program = place.build / "backends" / "accelerators" / "cuda" / "tests" / "copied_flags"
    right = told(program, "check", RIGHT_ITERATIONS, codes=(0, 1))
    wrong = {
        order: told(program, "unheld", WRONG_ITERATIONS, order, codes=(0, 1))
        for order in WRONG_ORDERS
    }
    return {**devices(torch.device("cuda")), "data_then_flag": right, "wrong_orders": wrong}


def main_job(place: Place) -> Figures:
    """Run the command several times outside of the tree."""
    command = [str(Path(sys.executable).parent / "mkernel"), "run", "all_gather_gemm", "--json"]
    command += ["--accelerator", "ascend"]
    seconds, reports = [], []
    for _ in range(JOBS):
        start = time.perf_counter()
        done = subprocess.run(
            command, capture_output=True, text=True, check=True, cwd=tempfile.gettempdir()
        )
        seconds.append(time.perf_counter() - start)
        reports.append(json.loads(done.stdout))
    keys = ("wall", "modelled", "modelled_machine", "nic_bytes")
    return {
        "command": " ".join(["mkernel", *command[1:]]),
        "seconds": {"all": seconds, "median": statistics.median(seconds)},
        "passed": all(report["passed"] for report in reports),
        "error": max(report["verification"]["error"] for report in reports),
        "last_report": {key: reports[-1][key] for key in keys},
    }


def machine() -> Topology:
    """Return a node of switches with a GPU and EFA devices each."""
    paths = [(f"pci0000:{i:02x}", f"0000:{i:02x}:01.0", f"0001:{i:02x}:00.0") for i in range(GPUS)]
    gpus = tuple(
        Accelerator(
            id=f"cuda{i}", kind="cuda", name="H100", index=i, pci=f"0002:{i:02x}:00.0",
            pci_path=(*paths[i], f"0003:{i:02x}:00.0"), pcie_gbs=63.0, numa_node=i // 4,
        )
        for i in range(GPUS)
    )  # fmt: skip
    nics = tuple(
        Nic(
            id=f"efa{n}", kind="efa", name=f"efa{n}", pci=f"0004:{n:02x}:00.0", speed_gbps=100.0,
            pci_path=(*paths[i], f"0003:{i:02x}:{1 + n % NICS_EACH:02x}.0"), numa_node=i // 4,
        )
        for n in range(NICS_EACH * GPUS)
        for i in (n // NICS_EACH,)
    )  # fmt: skip
    numa = tuple(NumaNode(id=i, cpus=tuple(range(48 * i, 48 * i + 48))) for i in range(2))
    return Topology(
        nodes=(Node(id=0, hostname="machine", numa=numa, accelerators=gpus, nics=nics),)
    )


def topology_scale(place: Place) -> Figures:
    """Plan for more and more nodes, each time in a process of its own."""
    sizes = [text for name, size in PLANNED.items() for text in (f"--{name}", str(size))]
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "machine.json"
        file.write_text(machine().model_dump_json())
        command = [sys.executable, "-c", PLAN, "plan", "ag_gemm", "--accelerator", "hopper", *sizes]
        command += ["--topology", str(file), "--ranks-per-node", str(GPUS), "--json", "--nodes"]
        for nodes in NODES:
            start, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN)
            run = subprocess.run(
                [*command, str(nodes)],
                check=True, capture_output=True, text=True, cwd=folder, timeout=LIMIT_S,
            )  # fmt: skip
            took_s, used = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_CHILDREN)
            cpu_s = used.ru_utime + used.ru_stime - before.ru_utime - before.ru_stime
            row = {"nodes": nodes, "command_s": round(took_s, 2), "command_cpu_s": round(cpu_s, 2)}
            rows.append(row | {"command_peak_mb": round(int(run.stderr.split()[-1]) / 1024, 1)})
    return {"sizes": PLANNED, "load_after": round(os.getloadavg()[0], 2), "commands": rows}


TABLE = {
    "nic": Measurement(
        nic,
        {
            "FIFO on one core >= 2000000 commands/s": lambda found: (
                found["fifo_one_core_commands_per_s"] >= 2e6
            ),
            "own work per put, from the FIFO to its completion and its signal, <= 200 ns": (
                lambda found: found["own_ns_per_put"] <= 200
            ),
            "1 MiB puts >= 0.8 of a single-threaded memcpy": lambda found: (
                found["put_1MiB_vs_memcpy"] >= 0.8
            ),
        },
    ),
    "mover": Measurement(mover, {"puts of 64 and 256 KiB >= 48 GB/s": fast_puts}),
    "copied_flags": Measurement(
        copied_flags,
        {
            "no wrong word, of copies that wait for each other": lambda found: (
                found["data_then_flag"]["waits"]
                and not any(found["data_then_flag"]["wrong_iterations"].values())
            )
        },
    ),
    "main_job": Measurement(
        main_job, {"median <= 20 s": lambda found: found["seconds"]["median"] <= 20}
    ),
    "topology_scale": Measurement(topology_scale, {}),
}


def main() -> int:
    """Measure, write the result; 1 where a bar is missed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("name", choices=TABLE)
    parser.add_argument("--build", type=Path, default=results_file.ROOT / "build" / "native")
    parser.add_argument("--devices", default="0,1" if torch.cuda.device_count() > 1 else "0,0")
    given = parser.parse_args()
    one, other = (int(device) for device in given.devices.split(","))
    chosen = TABLE[given.name]
    figures = chosen.measure(Place(given.build, (one, other)))
    held = {words: bar(figures) for words, bar in chosen.bars.items()}
    results_file.write(given.name, {"bars_held": held, **figures})
    return 0 if all(held.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
