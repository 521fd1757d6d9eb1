"""The ops around one matrix product: AllGather+GEMM, GEMM+ReduceScatter, GEMM+AllReduce."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from mkernel.backends.accelerators.ascend.op import Blocks, Matrix, Prepared, matrix, native
from mkernel.backends.accelerators.ascend.schedule import (
    GemmSchedule,
    ProductSchedule,
    ReduceSchedule,
    check_steps,
)
from mkernel.backends.contracts.accelerator import Call
from mkernel.plan.model import LaunchPlan

if TYPE_CHECKING:
    from mkernel.backends.accelerators.ascend import _ascend

    _Geometry = _ascend.AgGemmGeometry | _ascend.GemmReduceGeometry


class GemmOp:
    """All three ops. Those that reduce share their compute kernel and their kernels' arguments."""

    def geometry(self, plan: LaunchPlan) -> _Geometry:
        """Return the kernels' geometry. ValueError for tiles that the on-chip buffers cannot hold,
        and for steps and roundings that invariant results do not have."""
        how: ProductSchedule = plan.part(GemmSchedule if _gathers(plan) else ReduceSchedule)
        shape, chunking, world = plan.gemm, how.chunking, plan.world_size
        cut = chunking.model_dump(exclude={"chunks_per_rank"})
        promise = plan.invariant
        check_steps(plan, chunking)
        geometry: _Geometry
        if not isinstance(how, ReduceSchedule):
            geometry = native().AgGemmGeometry(
                world=world,
                m_local=shape.m // world,
                n=shape.n,
                k=shape.k,
                dtype=plan.dtype,
                **cut,
            )
        else:
            if promise is not None and promise.partial_dtype != how.partial_dtype:
                raise ValueError(f"partial_dtype = {how.partial_dtype}, but the plan has {promise}")
            geometry = native().GemmReduceGeometry(
                world=world,
                m=shape.m,
                n=shape.n,
                k=shape.k,
                dtype=plan.dtype,
                out_dtype=plan.out_dtype,
                partial_dtype=how.partial_dtype,
                band=how.band,
                segments=promise.segments if promise else 0,
                replicated=plan.op == "gemm_all_reduce",
                **cut,
            )
        if geometry.chunks != chunking.chunks_per_rank:
            raise ValueError(
                f"plan.schedule.chunking.chunks_per_rank = {chunking.chunks_per_rank}, but {chunking} "
                f"cuts {shape} of {plan.op} on {world} ranks into {geometry.chunks} chunks a rank"
            )
        return geometry

    def blocks(self, plan: LaunchPlan) -> Blocks:
        """Return the cores: cube cores compute, vector cores communicate."""
        how: ProductSchedule = plan.part(GemmSchedule if _gathers(plan) else ReduceSchedule)
        return Blocks(comm=how.comm_cores, cube=how.cube_cores)

    def prepare(self, call: Call) -> Prepared:
        """Build the kernels of a call, which also fills the gathered A if the call has a tensor for
        it."""
        plan = call.plan
        shapes = _shapes(plan)
        geometry = self.geometry(plan)
        kernels = _kernels(
            plan,
            call.rank,
            geometry,
            a=matrix(call, "a", shapes.a, plan.dtype),
            b=matrix(call, "b", shapes.b, plan.dtype, column_major=plan.b_layout == "column"),
            out=matrix(call, "out", shapes.out, plan.out_dtype),
        )
        if "gathered" not in call.tensors:
            return Prepared(kernels)
        assert isinstance(geometry, native().AgGemmGeometry), "no other op has this output"
        return Prepared(kernels, partial(_gather, call, geometry))

    def record(self, plan: LaunchPlan, rank: int) -> Prepared:
        """Build the kernels without tensors; every tensor is assumed to be dense."""
        (_, k), (_, n) = _shapes(plan).a, _shapes(plan).b
        return Prepared(
            _kernels(
                plan,
                rank,
                self.geometry(plan),
                a=(0, k, 1),
                b=(0, 1, k) if plan.b_layout == "column" else (0, n, 1),
                out=(0, n, 1),
            )
        )


def _gather(call: Call, geometry: _ascend.AgGemmGeometry) -> Mapping[str, Any]:
    """Fill ``call.tensors["gathered"]`` [M, K]: own rows from ``a``, others from their slots.

    May run after the kernels have released the slots: a peer writes them again in epoch e + 2 at
    the earliest, which it reaches only after epoch e + 1, and for that it needs data that this rank
    sends after this call has returned, whatever the op. (Callers that make calls without
    communication make them between barriers.)
    """
    own, cut = call.tensors["a"], call.plan.part(GemmSchedule).chunking
    for source, part in enumerate(torch.split(call.tensors["gathered"], len(own))):
        if source == call.rank:
            part.copy_(own)
            continue
        inbox = call.areas[call.epoch % 2]
        address = call.workspace + inbox + geometry.slot_offset(call.rank, source)
        memory = (ctypes.c_byte * part.nbytes).from_address(address)
        slot, done = torch.frombuffer(memory, dtype=part.dtype), 0
        for rows in torch.split(part, cut.tile_m):
            for tile in torch.split(rows, cut.tile_k, dim=1):  # each dense, one after another
                tile.copy_(slot[done : done + tile.numel()].view_as(tile))
                done += tile.numel()
    return {}


class _Shapes(NamedTuple):
    """Rows and columns of a call's tensors on one rank."""

    a: tuple[int, int]
    b: tuple[int, int]
    out: tuple[int, int]


def _gathers(plan: LaunchPlan) -> bool:
    return plan.op == "all_gather_gemm"


def _shapes(plan: LaunchPlan) -> _Shapes:
    shape, world = plan.gemm, plan.world_size
    part = shape.m // world
    rows_of_a = part if _gathers(plan) else shape.m
    rows_of_out = part if plan.op == "gemm_reduce_scatter" else shape.m
    return _Shapes((rows_of_a, shape.k), (shape.k, shape.n), (rows_of_out, shape.n))


def _kernels(
    plan: LaunchPlan, rank: int, geometry: Any, *, a: Matrix, b: Matrix, out: Matrix
) -> _ascend.Kernels:
    kernels: _ascend.Kernels
    every = plan.order("node")
    if _gathers(plan):
        kernels = native().ag_gemm(
            geometry=geometry,
            a=a,
            b=b,
            out=out,
            out_dtype=plan.out_dtype,
            order=list(every[rank]),
        )
    else:
        order = list(every.consumers(rank))
        kernels = native().gemm_reduce(geometry=geometry, a=a, b=b, out=out, order=order)
    return kernels
