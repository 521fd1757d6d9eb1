"""No op of a GPU backend is predicted to be faster than the links of the description allow, and
plans show the rates of pairs that no scale-up link joins."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
from commands import run
from devices import gpu, node
from devices import world as worlds

from mkernel.backends import registry
from mkernel.cli.plan import command
from mkernel.plan.arguments import Around
from mkernel.plan.model import OpName, Scales
from mkernel.plan.planner import explain
from mkernel.plan.predict import payloads
from mkernel.topology.model import Bridge, FabricLink
from mkernel.topology.world_map import world_map

RANKS, PCIE_GBS = 4, 15.754
GEMM = {"m": 8192, "n": 4096, "k": 4096}
EXPERTS = {"experts": 64, "top_k": 8}
SIZES: dict[str, dict[str, Any]] = {
    "all_gather_gemm": GEMM,
    "gemm_reduce_scatter": GEMM,
    "gemm_all_reduce": GEMM,
    "all_reduce": {"m": 8192, "n": 4096},
    "moe_dispatch_gemm": {"tokens": 4096, "hidden": 4096, "features": 1024, **EXPERTS},
    "moe_combine": {"tokens": 4096, "features": 4096, **EXPERTS},
    "moe_gemm_combine": {"tokens": 4096, "hidden": 4096, "features": 1024, **EXPERTS},
    "ring_attention": {
        "batch": 1, "heads": 16, "kv_heads": 16, "sequence": 16384, "head_dim": 128, "causal": False
    },
}  # fmt: skip
CASES = [
    (accelerator, op, path, dtype)
    for accelerator in ("hopper", "streams")
    for op in SIZES
    for path in (
        ("fused", "library") if accelerator == "hopper" and "k" in SIZES[op] else ("auto",)
    )
    for dtype in ("bfloat16", "float8_e4m3fn")
    if dtype == "bfloat16" or path != "auto"
]


@pytest.mark.parametrize(("accelerator", "op", "path", "dtype"), CASES)
def test_bytes_travel_no_faster_than_the_slots_are(
    accelerator: str, op: OpName, path: str, dtype: str
) -> None:
    devices = tuple(
        gpu(i, i, pcie_gbs=PCIE_GBS, name="NVIDIA H100 PCIe", cores=114) for i in range(RANKS)
    )
    backend = registry.accelerator(accelerator)
    claims = backend.capabilities_on(devices[0])
    scales = Scales(mode="row", use_fast_accum=True) if "e4m3" in dtype else None
    found = explain(
        op, SIZES[op], dtype=dtype, around=Around(scales=scales), accelerator=accelerator,
        b_layout="column" if scales else "row",
        capabilities=claims, nic=None, verbs=None, schedule=backend.schedule, path=path,
        world=world_map(
            worlds(node(devices, fabric_known=True)), RANKS, claims.constants,
            group=claims.process_group,
        ),
    )  # fmt: skip
    plan = found.plan
    assert plan.prediction is not None
    sent = payloads(op, plan.shape, plan.dtype, RANKS, found.pipeline.returns)
    least_us = (RANKS - 1) * sum(sent) / (PCIE_GBS * 1e3)
    assert plan.prediction.comm_us >= 0.99 * least_us
    assert plan.prediction.pipelined_us >= 0.99 * least_us


SWITCH = ("pci0000:00", "0000:00:01.0", "0000:01:00.0")
BOX = tuple(
    gpu(
        i,
        name="NVIDIA H100 PCIe",
        pci=f"0000:{16 + i:02x}:00.0",
        pci_path=(*SWITCH, f"0000:02:0{i}.0") if i < 2 else (f"pci0000:{32 + i}",),
        pcie_gbs=63.015 if i < 3 else 15.754,
        numa_node=int(i == 3),
    )
    for i in range(4)
)
"""Two GPUs below a switch, one beside it, and one on another socket in a slot of PCIe 3."""
IN_SLOT = BOX[3].model_copy(update={"pcie_gbs": 7.877})
"""The last one, in a slot of half as many lanes."""
APART = tuple((one.id, other.id) for one, other in itertools.combinations(BOX, 2))
LINK = FabricLink(kind="nvlink", ends=("cuda0", "cuda1"), count=12, gbs=300.0)


@pytest.mark.parametrize(
    ("arguments", "more", "shown"),
    [
        (
            ("gemm_rs", "--accelerator", "hopper"),
            {"fabric_known": True},
            "12 directly over PCIe at 10.3 to 49.8 GB/s (modelled)",
        ),
        (
            ("gemm_rs", "--accelerator", "hopper"),
            {"fabric": (LINK,)},
            "2 directly, 10 directly over PCIe at 10.3 to 41.3 GB/s (modelled)",
        ),
        (
            ("gemm_rs", "--accelerator", "hopper"),
            {"fabric": (LINK,), "no_p2p": (("cuda0", "cuda2"), ("cuda0", "cuda3"))},
            "8 by the NIC through host memory at 12 GB/s (modelled), 2 directly, "
            "2 directly over PCIe at 10.3 GB/s (modelled)",
        ),
        (
            ("gemm_rs", "--accelerator", "cuda"),
            {"fabric": (LINK,), "no_p2p": APART},
            "12 by the NIC through host memory at 12 GB/s (modelled)",
        ),
        (
            ("gemm_rs", "--accelerator", "cuda"),
            {"accelerators": (*BOX[:3], IN_SLOT), "no_p2p": APART},
            "12 by the NIC through host memory at 6.22 to 12 GB/s (modelled)",
        ),
        (
            ("ring_attention", "--accelerator", "streams"),
            {"fabric": (LINK,)},
            "2 by torch.distributed (nccl), "
            "10 by torch.distributed (nccl) over PCIe at 10.3 to 41.3 GB/s (modelled)",
        ),
    ],
)
def test_plans_show_rates_over_pcie(
    arguments: tuple[str, ...], more: dict[str, Any], shown: str, tmp_path: Path
) -> None:
    bridges = (Bridge(id="0000:01:00.0", pcie_gbs=63.015),)
    machine = worlds(node(**{"accelerators": BOX, "bridges": bridges, **more}))
    file = tmp_path / "box.json"
    file.write_text(machine.model_dump_json())
    printed = run(command, *arguments, "--topology", str(file), "--nodes", "1")
    assert f"pairs of ranks: {shown} " in " ".join(printed.split())
