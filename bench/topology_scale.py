"""How long planning takes, and how much memory, as worlds grow; and what the simulator predicts there.

    python bench/topology_scale.py [--topology FILE] [--nodes 16384]

AllGather+GEMM of 131072 x 28672 x 8192 with 8 ranks a node, each size in a process of its own: the plan
alone, a plan where one node in a hundred has lost a NIC, a simulation, and the whole command
`mkernel plan --json` with its start. The machine: 8 GPUs, 4 NICs next to
each, or the one in FILE. Beside it the predicted time over ranks, with N = 1024.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

import results_file

from mkernel.backends import registry
from mkernel.backends.accelerators.hopper.machine import machine
from mkernel.plan.planner import Planned, explain
from mkernel.plan.scaling import points
from mkernel.plan.simulate import simulate
from mkernel.plan.standard import by_rows
from mkernel.topology.discover import load
from mkernel.topology.model import Accelerator, Nic, Node, NumaNode, Topology
from mkernel.topology.reshape import replicate
from mkernel.topology.world_map import world_map

RANKS = 8
SIZES = {"m": 131072, "n": 28672, "k": 8192}
GROWTH = {"m": 131072, "n": 1024, "k": 8192}
CONSTANTS = machine().constants
HURT_EVERY = 100
BY_ROWS = partial(by_rows, chunks=1)


def machine() -> Topology:
    """8 switches with a GPU and 4 EFA devices each."""
    paths = [(f"pci0000:{i:02x}", f"0000:{i:02x}:01.0", f"0001:{i:02x}:00.0") for i in range(RANKS)]
    gpus = tuple(
        Accelerator(
            id=f"cuda{i}", kind="cuda", name="H100", index=i, pci=f"0002:{i:02x}:00.0",
            pci_path=(*paths[i], f"0003:{i:02x}:00.0"), pcie_gbs=63.0, numa_node=i // 4,
        )
        for i in range(RANKS)
    )  # fmt: skip
    nics = tuple(
        Nic(
            id=f"efa{n}", kind="efa", name=f"efa{n}", pci=f"0004:{n:02x}:00.0", speed_gbps=100.0,
            pci_path=(*paths[n // 4], f"0003:{n // 4:02x}:{1 + n % 4:02x}.0"), numa_node=n // 16,
        )
        for n in range(4 * RANKS)
    )  # fmt: skip
    numa = tuple(NumaNode(id=i, cpus=tuple(range(48 * i, 48 * i + 48))) for i in range(2))
    node = Node(id=0, hostname="machine", numa=numa, accelerators=gpus, nics=nics)
    return Topology(nodes=(node,))


def hurt(world: Topology) -> Topology:
    """With one NIC down on every hundredth node."""
    first = world.nodes[0]
    fewer = (first.nics[0].model_copy(update={"active": False}), *first.nics[1:])
    nodes = tuple(
        node.model_copy(update={"nics": fewer}) if node.id % HURT_EVERY == 7 else node
        for node in world.nodes
    )
    return Topology(nodes=nodes)


def planned(world: Topology, sizes: dict[str, int] = SIZES) -> Planned:
    """Of several nodes a what-if: the backend has no path between nodes. Nothing is decided by
    simulation, which is timed by itself."""
    return explain(
        "all_gather_gemm",
        sizes,
        dtype="bfloat16",
        world=world_map(world, RANKS, CONSTANTS),
        accelerator="hopper",
        capabilities=registry.accelerator("hopper").capabilities(),
        nic="efa",
        verbs="system",
        schedule=BY_ROWS,
    )


def one(file: Path, nodes: int) -> dict[str, Any]:
    """The figures of one size, from this process."""
    topology = load(file)
    planned(topology)  # whatever is done once
    start = time.perf_counter()
    world = replicate(topology, nodes)
    made, _, pipeline = planned(world)
    plan_s = time.perf_counter() - start
    pairs = sum(route.pairs for route in made.routes.classes)
    assert pairs == made.world_size * (made.world_size - 1), "every pair has its route"
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    start = time.perf_counter()
    found = simulate(made, pipeline, CONSTANTS)
    simulate_s = time.perf_counter() - start
    start = time.perf_counter()
    mixed = planned(hurt(world)).plan
    return {
        "nodes": nodes,
        "ranks": made.world_size,
        "plan_s": round(plan_s, 4),
        "plan_us_a_node": round(1e6 * plan_s / nodes, 1),
        "plan_with_nics_down_s": round(time.perf_counter() - start, 4),
        "kinds_of_nodes_then": len(mixed.placement.sites),
        "simulate_s": round(simulate_s, 4),
        "peak_mb": round(memory / 1024, 1),
        "json_kb": round(len(made.model_dump_json()) / 1024, 1),
        "route_classes": len(made.routes.classes),
        "pairs": pairs,
        "predicted_us": round(found.time_us, 1),
        "floor_us": round(found.floor_us, 1),
    }


_COMMAND = """
import atexit, pathlib, sys
def peak_kb():  # its own: what a process had before exec counts in getrusage
    status = pathlib.Path("/proc/self/status").read_text()
    print(status.split("VmHWM:")[1].split()[0], file=sys.stderr)
atexit.register(peak_kb)
from mkernel.cli.main import main
main()
"""


def command(file: Path, nodes: int) -> dict[str, Any]:
    """Of the whole command, its start included."""
    sizes = [text for name, size in SIZES.items() for text in (f"--{name}", str(size))]
    arguments = ["plan", "ag_gemm", "--accelerator", "hopper", "--topology", str(file), "--nodes"]
    arguments += [str(nodes), *sizes]
    start, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN)
    run = subprocess.run(
        [sys.executable, "-c", _COMMAND, *arguments, "--ranks-per-node", str(RANKS), "--json"],
        check=True, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
        cwd=tempfile.gettempdir(), timeout=120,
    )  # fmt: skip
    took_s = time.perf_counter() - start
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu_s = used.ru_utime + used.ru_stime - before.ru_utime - before.ru_stime
    return {
        "nodes": nodes,
        "command_s": round(took_s, 2),
        "command_cpu_s": round(cpu_s, 2),
        "command_peak_mb": round(int(run.stderr) / 1024, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--topology", type=Path, help="default: 8 GPUs with 4 NICs each")
    parser.add_argument("--nodes", type=int, default=16384, help="of the largest world")
    parser.add_argument("--one", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        file = options.topology or Path(folder) / "machine.json"
        if options.topology is None:
            file.write_text(machine().model_dump_json())
        if options.one:
            print(json.dumps(one(file, options.one)))
            return
        counts = [4**power for power in range(10) if 4**power < options.nodes] + [options.nodes]
        rows = []
        for nodes in counts:
            run = subprocess.run(
                [sys.executable, __file__, "--topology", str(file), "--one", str(nodes)],
                check=True, capture_output=True, text=True, timeout=120,
            )  # fmt: skip
            rows.append(json.loads(run.stdout))
        world = replicate(load(file), options.nodes)
        growth = list(
            points(
                lambda count: planned(Topology(nodes=world.nodes[:count]), GROWTH),
                CONSTANTS,
                options.nodes,
            )
        )
        results_file.write(
            "topology_scale",
            {
                "sizes": SIZES,
                "machine": options.topology.name if options.topology else "8 GPUs, 4 NICs each",
                "rows": rows,
                "commands": [command(file, nodes) for nodes in counts if nodes >= 1024],
                "load_after": round(os.getloadavg()[0], 2),
                "growth_sizes": GROWTH,
                "growth": [point.model_dump() for point in growth],
            },
        )


if __name__ == "__main__":
    main()
