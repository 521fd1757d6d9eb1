"""Puts of GPU memory over the software RDMA device, which reaches it by the CUDA mover.

    python bench/mover.py [--build build/native] [--devices 0,1] [--megabytes 1024]

Two processes, each with a GPU of its own, or with one GPU between them, where bytes go through pinned
host memory. Sizes of 4 KiB to 16 MiB, on `cx7` and on `efa`, as fast as copies go and over a rail of
400 Gb/s and 3 us. Puts follow each other in memory, or lie apart, so that no two can become one copy.
Figures are of an emulated NIC: they say what the emulation can carry, nothing of GPUDirect.
Bar: 48 GB/s at puts of 64 and 256 KiB that follow each other, on `cx7`, between two GPUs.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import results_file
import torch
from nic import run

from mkernel.harness.provenance import devices

BAR_GBS, BAR_SIZES = 48.0, (64 << 10, 256 << 10)
RAIL = {"MKERNEL_SOFTVERBS_BANDWIDTH_MBPS": "400000", "MKERNEL_SOFTVERBS_LATENCY_NS": "3000"}
LINKS: dict[str, dict[str, str]] = {"unlimited": {}, "400 Gb/s, 3 us": RAIL}


def measure(build: Path, ids: tuple[int, int], megabytes: int) -> list[dict[str, Any]]:
    """A row for every NIC backend, link and size. SystemExit: not built, failed, or wrong bytes."""
    program = build / "backends" / "cuda" / "tests" / "mover_benchmark"
    library = build / "backends" / "nics" / "libmkernel_softverbs.so"
    rows = []
    for nic in ("cx7", "efa"):
        for link, settings in LINKS.items():
            os.environ.update(settings)
            try:
                found = run(program, str(library), nic, *map(str, ids), str(megabytes))
            except subprocess.TimeoutExpired as late:
                raise SystemExit(f"{nic} over {link}: no end within {late.timeout} s") from late
            finally:
                for name in settings:
                    del os.environ[name]
            if not found["right"]:
                raise SystemExit(f"{nic} over {link}: wrong bytes")
            half = found["half_round_trip_us"]
            said = {"nic": nic, "link": link, "half_round_trip_us": half}
            rows.extend({**said, **row} for row in found["puts"])
    return rows


def main() -> int:
    """Measure, write the result; 1 where a bar is missed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--build", type=Path, default=results_file.ROOT / "build" / "native")
    parser.add_argument("--devices", default="0,1" if torch.cuda.device_count() > 1 else "0,0")
    parser.add_argument("--megabytes", type=int, default=1024, help="moved per size of put")
    options = parser.parse_args()
    one, other = (int(device) for device in options.devices.split(","))
    rows = measure(options.build, (one, other), options.megabytes)
    bars = {
        f"{row['nbytes'] >> 10} KiB": row["gbs"] >= BAR_GBS
        for row in rows
        if (row["nic"], row["link"]) == ("cx7", "unlimited") and row["nbytes"] in BAR_SIZES
    }
    gpus = len({one, other})
    results_file.write(
        f"mover_{gpus}",
        {
            **devices(torch.device("cuda")),
            "gpus_used": gpus,
            "nic": "emulated",
            "bar_gbs": BAR_GBS,
            "bars_held": bars if gpus == 2 else "of two GPUs only",
            "puts": rows,
        },
    )
    return 0 if gpus == 1 or all(bars.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
