"""Defines what ranks of test_models_on_gpus run: training steps in bfloat16, also with FSDP2."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from nccl_ranks import over_nccl
from torch.distributed.device_mesh import init_device_mesh

import mkernel

MODELS = Path(__file__).parents[1] / "torch"
sys.path += [str(MODELS), str(MODELS / "models")]

from model_ranks import (  # noqa: E402
    FAULTS,
    eager,
    fsdp,
    llama,
    parallel,
    qwen3_moe,
    seeded,
    tokens_of,
    torchtitan,
)
from models_judged import Found, Judge, shards_of  # noqa: E402

BATCH, SEQUENCE = 4, 64
SIZES: dict[str, Any] = {
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
}
ALL_EXPERTS = {"num_experts_per_tok": 8}
"""Rounding to bfloat16 must not choose other experts."""
FAULT = "columns are swapped"
DEADLINE_S = 100.0


def steps(folder: str, tensor_parallel: int) -> dict[str, Found]:
    """Return what is found of each model, whose layers are cut by so many ranks and whose batch by the
    others; and of a planted fault."""
    with over_nccl(folder) as (_, ranks):
        shape = ranks // tensor_parallel, tensor_parallel
        mesh = init_device_mesh("cuda", shape, mesh_dim_names=("dp", "tp"))
        tp, dp = mesh["tp"], mesh["dp"]
        # Kernels of hopper have no backward pass of experts, which goes through torch.
        mkernel.init(tp, accelerator="hopper,streams", timeout_s=DEADLINE_S)
        each = BATCH // dp.size()
        part = slice(each * dp.get_local_rank(), each * (dp.get_local_rank() + 1))
        found = {}
        for make in (llama, qwen3_moe, torchtitan):
            sizes = {} if make is torchtitan else SIZES
            if make is qwen3_moe:
                sizes = {**sizes, **ALL_EXPERTS}
            cast: Any = {"device": "cuda", "dtype": torch.bfloat16}
            judge = Judge(seeded(make, **sizes).to(**cast), tokens_of(BATCH, SEQUENCE).cuda())
            for way in (eager, fsdp) if dp.size() == 1 else (fsdp,):
                model = parallel(make, tp, cast=cast, **sizes)
                shards = shards_of(model)
                name = f"{make.__name__}, {way.__name__}"
                found[name] = judge.found(way(model, dp), tp, shards, part)
            of, plant = FAULTS[FAULT]
            if of is make and tp.size() > 1:
                model = parallel(make, tp, cast=cast, **sizes)
                with torch.no_grad():
                    plant(model, tp)
                found[FAULT] = judge.found(model, tp, shards_of(model))
        mkernel.synchronize()
        return found
