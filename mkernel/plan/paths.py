"""The fused and the library path: predicts the time of each from the machine's constants."""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import NamedTuple

from mkernel.plan.few_rows import COLUMNS, cut
from mkernel.plan.mailed_tiles import Tiles, tiles
from mkernel.plan.model import (
    DTYPE_BYTES,
    DtypeName,
    GemmShape,
    OpName,
    Prediction,
    ScaleMode,
    Scales,
)
from mkernel.plan.predict import gemm_call, payloads, prediction
from mkernel.topology.cost import (
    FewRowsConstants,
    MachineConstants,
    MailedTilesConstants,
    PathConstants,
    Tile,
    transfer_us,
)

FLOAT32_PARTIALS = 1 << 16
"""The most elements of a result for which the library path adds float32 partial results. They keep
small results, whose error scatters, and products that a library cuts along K within the limit of
one rounding; large ones would only take twice as long to send."""


LEAST_FUSED_SUMS = 1 << 12
"""The least elements of an owner's sum for which 16-bit partial results, of the fused path or of
experts, keep the limit of error whatever the data: in fewer the error, 2.4e-3 of 3e-3 in the mean,
scatters too far."""


def few_rows(
    op: OpName,
    shape: GemmShape,
    dtype: DtypeName,
    world: int,
    constants: MachineConstants | None,
) -> FewRowsConstants | None:
    """Return the constants of the kernel for few rows if the fused path of one node runs it; else
    None."""
    found = None if constants is None else constants.few_rows
    if found is None or op not in found.ops:
        return None
    if shape.m > found.most_rows or shape.n < found.least_columns:
        return None
    come = world * _few_rows_bytes(op, shape, dtype, world)
    return found if world == 1 or come <= found.most_bytes else None


def mailed_tiles(
    op: OpName,
    shape: GemmShape,
    dtype: DtypeName,
    world: int,
    constants: MachineConstants | None,
) -> MailedTilesConstants | None:
    """Return the constants of the kernel whose tiles leave by mail if the fused path of one node runs
    it; else None."""
    found = None if constants is None else constants.mailed_tiles
    if found is None or op != "gemm_all_reduce" or world == 1 or DTYPE_BYTES[dtype] != 2:
        return None
    if not found.least_rows <= shape.m <= found.most_rows:
        return None
    if partial_dtype(shape, dtype) != dtype or few_rows(op, shape, dtype, world, constants):
        return None
    come = (world - 1) * _few_rows_bytes(op, shape, dtype, world)
    return found if come <= found.most_bytes else None


def few_scaled_rows(
    op: OpName,
    shape: GemmShape,
    out_dtype: DtypeName,
    world: int,
    scales: Scales,
    constants: MachineConstants | None,
) -> FewRowsConstants | None:
    """Return the constants of the kernel for few rows if it takes these e4m3 operands; else None.
    It adds products with few bits and scales once a sum."""
    found = few_rows(op, shape, out_dtype, world, constants)
    takes = found is not None and found.float8 and scales.use_fast_accum and scales.mode != "block"
    return found if takes else None


def _few_rows_bytes(op: OpName, shape: GemmShape, dtype: DtypeName, world: int) -> float:
    """Return the bytes that one rank sends to another one."""
    partials = partial_dtype(shape, dtype)
    return payloads(op, shape, dtype, world, partials=partials, one_exchange=True).scatter


def fusable(
    op: OpName,
    shape: GemmShape,
    dtype: DtypeName,
    world: int,
    constants: MachineConstants | None = None,
) -> bool:
    """Return whether the fused path may be taken if there is another one. Its kernels for few and for
    medium numbers of rows send the same partial results as the library path."""
    sends_alike = few_rows, mailed_tiles
    if any(kernel(op, shape, dtype, world, constants) is not None for kernel in sends_alike):
        return True
    sums = op != "all_gather_gemm" and world > 1 and dtype != "float32"
    return not sums or shape.m * shape.n >= LEAST_FUSED_SUMS * world


def fuses_scaled(
    op: OpName,
    shape: GemmShape,
    out_dtype: DtypeName,
    world: int,
    scales: Scales,
    modes: Collection[ScaleMode],
    constants: MachineConstants | None = None,
) -> bool:
    """Return whether e4m3 operands may take the fused path. ``modes`` lists the scales that the
    backend's kernels take, which round results to 16 bits, if products are added with as many bits
    as ``scales`` asks for."""
    taken = scales.mode in modes and DTYPE_BYTES[out_dtype] == 2
    few = few_scaled_rows(op, shape, out_dtype, world, scales, constants)
    return taken and (few is not None or fusable(op, shape, out_dtype, world))


def partial_dtype(shape: GemmShape, dtype: DtypeName) -> DtypeName:
    """Return the dtype in which the library path sends partial results and adds them up."""
    return "float32" if shape.m * shape.n <= FLOAT32_PARTIALS else dtype


def partials_of_experts(elements: int, out_dtype: DtypeName, sums: DtypeName) -> DtypeName:
    """Return the dtype in which results of experts come home if the caller names none: that of
    ``out``; for small results that of sums, which costs no more than a message does."""
    return out_dtype if elements >= LEAST_FUSED_SUMS else sums


def predict(
    op: OpName,
    shape: GemmShape,
    dtype: DtypeName,
    world: int,
    fused_cores: int,
    cores: int,
    constants: MachineConstants,
) -> tuple[Prediction, Prediction] | None:
    """Predict a call on one node on the fused path and on the library path. None if constants of
    one path are missing.

    T_c: the product, in waves or without (``topology/cost.hpp``). T_m: latency +
    what a rank sends / rate; AllGather+GEMM (W-1)·M/W·K·s, GEMM+ReduceScatter (W-1)·M/W·N·s,
    GEMM+AllReduce the same in each of two exchanges, or (W-1)·M·N·s in one where results are small
    (``one_shot``), and what a reduce-scatter adds up behind it (``scattered_sums_gbs``), less what
    a call of few bytes does not wait at its end (``brief``). One exchange by ``mail`` has its own
    latency and rate; two have those of both (``mail_twice``), where that is faster.
    library = T_c + T_m. fused = max(T_c, T_m + one tile), since the last rows to come, or the first
    partial results to leave, are one tile's work away from the rest; and a measured share of
    min(T_c, T_m). For few rows (:func:`few_rows`) the fused path is T_c, which is the time to read
    the weights, in one or more waves (:mod:`mkernel.plan.few_rows`), + T_m of one exchange,
    (W-1)·M·N·s of AllReduce and (W-1)/W of that of ReduceScatter. Of more rows
    (:func:`mailed_tiles`) that exchange hides behind all waves of tiles but the last
    (:mod:`mkernel.plan.mailed_tiles`).
    """
    kernel, library = constants.fused, constants.library
    if kernel is None or library is None:
        return None
    ours = _fused(op, shape, dtype, world, fused_cores, kernel, constants)
    own = few_rows(op, shape, dtype, world, constants) or mailed_tiles(
        op, shape, dtype, world, constants
    )
    start_us = (own or kernel).start_us
    theirs = _library(op, shape, dtype, world, cores, library, constants)
    both = {
        "fused_us": ours.pipelined + start_us,
        "library_us": theirs.pipelined + library.start_us,
    }
    return (
        prediction(*ours, start_us, constants, **both),
        prediction(*theirs, library.start_us, constants, **both),
    )


def predict_library(
    op: OpName,
    shape: GemmShape,
    dtype: DtypeName,
    world: int,
    cores: int,
    constants: MachineConstants,
) -> Prediction | None:
    """Predict a call on one node whose op has the library path alone, as :func:`predict` does. None if
    its constants are missing."""
    path = constants.library
    if path is None:
        return None
    times = _library(op, shape, dtype, world, cores, path, constants)
    return prediction(*times, path.start_us, constants)


class Times(NamedTuple):
    """Times in microseconds, without the start of a call."""

    compute: float
    comm: float
    pipelined: float


def _fused(
    op: OpName,
    shape: GemmShape,
    dtype: DtypeName,
    world: int,
    cores: int,
    path: PathConstants,
    constants: MachineConstants,
) -> Times:
    few = few_rows(op, shape, dtype, world, constants)
    if few is not None:
        return of_few_rows(op, shape, dtype, dtype, world, cores, few)
    mailed = mailed_tiles(op, shape, dtype, world, constants)
    if mailed is not None:
        return of_mailed_tiles(op, shape, dtype, world, cores, mailed, constants.memory_gbs)
    return fused(op, shape, dtype, dtype, world, cores, path, constants)[0]


def fused(
    op: OpName,
    shape: GemmShape,
    dtype: DtypeName,
    out_dtype: DtypeName,
    world: int,
    cores: int,
    path: PathConstants,
    constants: MachineConstants,
) -> tuple[Times, Tile | None]:
    """Predict one kernel that overlaps, as :func:`predict` says; sums travel in the results' dtype.
    Returns the call's times with the product, of those that the path offers, that makes the call
    fastest, and this product's tile if it has waves of them."""
    call = gemm_call(op, shape, dtype, out_dtype, out_dtype, world)
    *times, tile = path.forms.fused(call, cores, constants.memory_gbs)
    return Times(*times), None if tile < 0 else path.tiles[tile]


def of_few_rows(
    op: OpName,
    shape: GemmShape,
    dtype: DtypeName,
    out_dtype: DtypeName,
    world: int,
    cores: int,
    few: FewRowsConstants,
) -> Times:
    """Predict the kernel for few rows. T_c is that of :func:`cut`. T_m follows it once: latency +
    what is sent / rate, or what a block adds up / rate: its part of the rows of a tile for its
    cluster, and those that it keeps for each peer."""
    how = cut(shape.n, shape.k, DTYPE_BYTES[dtype], cores, few)
    compute = how.total_us(few)
    if world == 1:
        return Times(compute, 0.0, compute)
    sent = (world - 1) * _few_rows_bytes(op, shape, out_dtype, world)
    comm = transfer_us(sent, few.egress_gbs, few.exchange_us)
    if few.block_sums_gbs is not None:
        row_bytes = COLUMNS * DTYPE_BYTES[partial_dtype(shape, out_dtype)]
        rows = math.ceil(shape.m / how.splits)
        kept = rows / world if op == "gemm_reduce_scatter" else rows
        added = (rows + (world - 1) * kept) * row_bytes
        comm = max(comm, transfer_us(added, few.block_sums_gbs, few.exchange_us))
    return Times(compute, comm, compute + comm)


def tiles_by_mail(
    op: OpName,
    shape: GemmShape,
    dtype: DtypeName,
    world: int,
    cores: int,
    mailed: MailedTilesConstants,
    memory_gbs: float,
) -> Tiles:
    """Return the tiles with which a call of that kernel is predicted to end first."""
    sent = (world - 1) * _few_rows_bytes(op, shape, dtype, world)
    return tiles(shape.m, shape.n, shape.k, sent, cores, memory_gbs, mailed)


def of_mailed_tiles(
    op: OpName,
    shape: GemmShape,
    dtype: DtypeName,
    world: int,
    cores: int,
    mailed: MailedTilesConstants,
    memory_gbs: float,
) -> Times:
    """Predict the kernel whose tiles leave by mail, as :func:`mkernel.plan.mailed_tiles.tiles` does."""
    how = tiles_by_mail(op, shape, dtype, world, cores, mailed, memory_gbs)
    return Times(how.compute, how.sent + mailed.exchange_us, how.total)


def _library(
    op: OpName,
    shape: GemmShape,
    dtype: DtypeName,
    world: int,
    cores: int,
    path: PathConstants,
    constants: MachineConstants,
) -> Times:
    call = gemm_call(op, shape, dtype, partial_dtype(shape, dtype), dtype, world)
    return Times(*path.forms.apart(call, cores, constants.memory_gbs)[:3])
