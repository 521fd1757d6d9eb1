"""FlashInfer as a peer: why it takes no part, and what its kernel is given, by a stand-in for it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import distributed

from mkernel.cases import case_of, poison
from mkernel.harness import contenders
from mkernel.harness.contenders import Contender, flash_infer, symm_mem
from mkernel.harness.problem import Problem
from mkernel.plan.model import DtypeName

NAMES = ("flashinfer-one-shot", "flashinfer-two-shot")
SIZES = {
    "all_reduce": {"m": 40, "n": 64},
    "gemm_all_reduce": {"m": 40, "n": 64, "k": 24},
}
EVENTS: list[str] = []


def problem(op: str, dtype: DtypeName = "bfloat16", device: str = "cpu", **sizes: int) -> Problem:
    case = case_of(op)({**SIZES[op], **sizes}, dtype, dtype, seed=4)
    return Problem(case, 0, 2, torch.device(device))


def with_norm(plain: Problem) -> Problem:
    return replace(plain, case=plain.case.with_(options={"norm": "residual"}))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("op", SIZES)
def test_why_it_takes_no_part(name: str, op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert name in contenders.PEERS
    peer, found = contenders.named(name), problem(op, device="cuda")
    for variable, value in symm_mem.ENVIRONMENT.items():
        monkeypatch.setenv(variable, value)
    monkeypatch.setattr(flash_infer, "find_spec", lambda module: None)
    assert peer.unusable(found) == "flashinfer is not installed: pip install flashinfer-python"
    monkeypatch.setattr(flash_infer, "find_spec", lambda module: object())
    monkeypatch.setitem(sys.modules, "flashinfer.jit.comm", None)
    assert "flashinfer does not load: import of flashinfer.jit.comm" in str(peer.unusable(found))
    module = SimpleNamespace(is_compiled=False)
    jit: Any = SimpleNamespace(gen_trtllm_comm_module=lambda: module)
    monkeypatch.setitem(sys.modules, "flashinfer.jit.comm", jit)
    assert peer.unusable(found) == f"not compiled yet: {flash_infer.COMPILE}"
    module.is_compiled = True
    assert peer.unusable(found) is None
    for other, why in (
        (problem(op), "not on CPUs"),
        (replace(found, bars_libraries="would go past the NIC"), "would go past the NIC"),
        (replace(found, world=1), "needs at least 2 ranks"),
        (replace(found, world=3), "for 2, 4 or 8 ranks"),
        (problem(op, "float32", "cuda"), "for sums of 16-bit elements: the buffer of its two "
                                         "exchanges holds no others"),
        (problem(op, device="cuda", n=60), "for rows of multiples of 16 bytes"),
        (problem(op, device="cuda", n=10168),
         "for rows that up to 8 blocks of 1024 threads share evenly"),
        (problem(op, device="cuda", n=10176), None),
        (problem(op, device="cuda", m=2**17), None),
        (problem(op, device="cuda", m=2**17, n=2**13),
         "its buffer of all ranks' rows is less than 2 GiB"),
    ):  # fmt: skip
        assert peer.unusable(other) == why
    few = "for more rows than ranks" if name == "flashinfer-two-shot" else None
    assert peer.unusable(problem(op, device="cuda", m=2)) == few
    gather = case_of("all_gather_gemm")({"m": 64, "n": 32, "k": 48}, "bfloat16", "bfloat16")
    assert peer.unusable(replace(found, case=gather)) == "for sums on every rank"
    monkeypatch.setenv("TORCH_SYMM_MEM_DISABLE_MULTICAST", "0")
    assert peer.unusable(found) == "needs TORCH_SYMM_MEM_DISABLE_MULTICAST=1"


def stand_in(problem: Problem, others: Callable[[], torch.Tensor]) -> SimpleNamespace:
    """Return FlashInfer's module, with the arguments that 0.6.18 takes, on rank 0's side alone: what
    the other ranks add is ``others``'."""
    patterns = SimpleNamespace(kAllReduce=0, kARResidualRMSNorm=1)

    def create(
        tp_rank: int, tp_size: int, max_token_num: int, hidden_dim: int,
        use_fp32_lamport: bool = False, group: Any = None,
    ) -> tuple[list[list[int]], str]:  # fmt: skip
        rows, columns = problem.memory("op")["out"][0]
        assert (tp_rank, tp_size, max_token_num, hidden_dim) == (0, 2, rows, columns)
        assert not use_fp32_lamport
        EVENTS.append("created")
        return [[1000, 1001], [2000, 2001], [3000, 3001]], "pointers"

    def fusion(
        allreduce_in: torch.Tensor, world_size: int, world_rank: int, token_num: int,
        hidden_dim: int, workspace_ptrs: Any, launch_with_pdl: bool,
        trigger_completion_at_end: bool, fp32_acc: bool, pattern_code: int,
        use_oneshot: bool | None, allreduce_out: torch.Tensor | None,
        residual_in: torch.Tensor | None, residual_out: torch.Tensor | None,
        norm_out: torch.Tensor | None, quant_out: None, scale_out: None,
        rms_gamma: torch.Tensor | None, rms_eps: float | None, scale_factor: None,
        layout_code: None,
    ) -> None:  # fmt: skip
        assert (world_size, world_rank, workspace_ptrs) == (2, 0, "pointers")
        assert (token_num, hidden_dim) == tuple(allreduce_in.shape)
        assert launch_with_pdl
        assert trigger_completion_at_end
        assert fp32_acc
        EVENTS.append(f"oneshot={use_oneshot}")
        total = allreduce_in.double() + others()
        if pattern_code == patterns.kAllReduce:
            assert allreduce_out is not None
            allreduce_out.copy_(total)
            return
        assert pattern_code == patterns.kARResidualRMSNorm
        assert allreduce_out is None  # it is written, and takes time, where it is given
        assert residual_in is not None
        assert residual_out is not None
        assert norm_out is not None
        assert rms_gamma is not None
        total += residual_in
        residual_out.copy_(total)
        size = (total.square().mean(-1, keepdim=True) + (rms_eps or 0.0)).sqrt()
        norm_out.copy_(total / size * rms_gamma)

    def destroy(workspace: list[list[int]], group: Any = None) -> None:
        assert workspace[1] == [2000, 2001]
        EVENTS.append("destroyed")

    return SimpleNamespace(
        AllReduceFusionPattern=patterns,
        trtllm_create_ipc_workspace_for_all_reduce_fusion=create,
        trtllm_destroy_ipc_workspace_for_all_reduce_fusion=destroy,
        trtllm_allreduce_fusion=fusion,
    )


def cleared(pointer: Any, value: int, count: int) -> None:
    """Stand in for the driver's memset of this rank's flags: 256 of 4 bytes for each rank."""
    assert (pointer.value, value, count) == (2000, 0, 2 * 256 * 4)
    EVENTS.append("cleared")


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("op", SIZES)
@pytest.mark.parametrize("norm", [False, True])
def test_its_kernel_gets_what_the_op_takes(
    name: str, op: str, norm: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The stand-in computes in float64, so each tensor in another's place makes a wrong result; all
    outputs are poisoned before, and two turns have inputs of their own."""
    found, turn = with_norm(problem(op)) if norm else problem(op), 0

    def others() -> torch.Tensor:
        given = {each: tensor.double() for each, tensor in found.case.inputs(1, 2, turn).items()}
        return given["x"] if op == "all_reduce" else given["a"] @ given["b"]

    EVENTS.clear()
    inside: Any = SimpleNamespace(BarrierFlagCount=256, cudart=SimpleNamespace(cudaMemset=cleared))
    module: Any = stand_in(found, others)
    monkeypatch.setitem(sys.modules, "flashinfer.comm", module)
    monkeypatch.setitem(sys.modules, "flashinfer.comm.trtllm_ar", inside)
    monkeypatch.setattr(distributed, "barrier", lambda: EVENTS.append("barrier"))
    made: Contender = contenders.named(name)(found)
    assert EVENTS == ["created", "cleared", "barrier"]
    inputs, outputs = made.inputs(), made.outputs()
    for turn in (1, 2):
        found.fill("op", inputs, turn)
        poison.fill(outputs["out"])
        results = made.call(inputs, outputs)
        assert results["out"] is outputs["out"]
        judged = found.compared("op", results, turn)
        assert (
            judged.keys() == made.limits().keys() == ({"out", "residual_out"} if norm else {"out"})
        )
        for output, each in judged.items():
            assert 0 < each.error < made.limits()[output]
    made.close()
    assert EVENTS[3:] == [f"oneshot={name == 'flashinfer-one-shot'}"] * 2 + ["destroyed"]
