"""The schedules of Hopper's kernels: the part of a plan that only this backend's launches follow."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from mkernel.backends.accelerators.cuda.schedule import (
    KeysSchedule,
    ReturnSchedule,
    TilingName,
    TokenSchedule,
)
from mkernel.plan.model import DtypeName, Schedule
from mkernel.plan.pipeline import Exchange, Returns

ExpertTiling = Literal["wide", "deep"]


class GatherSchedule(Schedule):
    """The schedule of the fused AllGather+GEMM.

    A rank's rows travel in chunks of ``chunk_rows``, moved by the kernel's first ``push_blocks``
    blocks or, if that is 0, by copy engines; these move the chunk that comes last in ``slices`` of
    K. ``columns_ahead``: of plans of earlier versions; own rows are computed before the others'.
    ``band`` rows of clusters share columns of B in L2. ``blocks``: blocks of the kernel, at most
    one per multiprocessor. ``gathered_engine``, ``gathered_blocks``: of plans of earlier versions;
    the kernel that ends a call which returns the gathered rows copies them.
    ``exchange``: the exchange between nodes; hierarchical: the pushing blocks also share arriving
    data with the node."""

    kind: Literal["hopper.all_gather_gemm"] = "hopper.all_gather_gemm"
    tiling: TilingName
    chunk_rows: int = Field(ge=1)
    push_blocks: int = Field(ge=0)
    columns_ahead: int = Field(0, ge=0, le=0)
    slices: int = Field(1, ge=1)
    band: int = Field(ge=1)
    blocks: int = Field(ge=1)
    gathered_engine: Literal["copy_engine"] = "copy_engine"
    gathered_blocks: int = Field(1, ge=1, le=1)
    exchange: Exchange = "direct"

    @property
    def copy_engines(self) -> bool:
        """True if copy engines carry the rows, which they do if no blocks push."""
        return self.push_blocks == 0


class ReduceSchedule(Schedule):
    """The schedule of a fused GEMM with a reduction.

    One rank owns ``rows`` rows of the sum. An owner's tiles are cut into panels of ``panel_rows``
    rows of clusters and ``panel_columns`` columns of tiles; the own tiles of a panel are computed
    after the other owners' tiles of the next. ``pace``: least clock cycles between two puts of a
    block. ``by_outbox``: puts come from memory, not straight from the block that made the tile.
    That is smoother, and worth its memory traffic if the link is nearly full. ``band`` and
    ``blocks`` are as in :class:`GatherSchedule`. ``product_tiling``: the tiling of the
    whole product by itself, which the sequential view computes first. ``network_blocks``: the
    number of first blocks, whole clusters, that receive from other nodes instead of computing
    tiles; 0 if there are none. ``exchange``: the exchange between nodes; hierarchical: a rank adds
    its node's parts before they leave."""

    kind: Literal["hopper.gemm_reduce"] = "hopper.gemm_reduce"
    tiling: TilingName
    rows: int = Field(ge=1)
    panel_rows: int = Field(ge=1)
    panel_columns: int = Field(ge=1)
    pace: int = Field(ge=0)
    by_outbox: bool
    band: int = Field(ge=1)
    blocks: int = Field(ge=1)
    product_tiling: TilingName
    network_blocks: int = Field(0, ge=0)
    exchange: Exchange = "direct"

    @property
    def partials(self) -> str:
        """The value ``results``: each partial result is rounded to the dtype of results."""
        return "results"


class SegmentsSchedule(Schedule):
    """The schedule of invariant results of a GEMM with a reduction: a product of ``tiling`` for each
    2^``levels`` segments of K, which add them by the lowest levels of the tree in registers, on at
    most ``blocks`` blocks, with ``band`` as in :class:`GatherSchedule`; a kernel that adds the
    products; and a collective. ``by_mail``: it is one Lamport exchange instead of using flags."""

    kind: Literal["hopper.segments"] = "hopper.segments"
    tiling: TilingName
    blocks: int = Field(ge=1)
    band: int = Field(ge=1)
    levels: int = Field(0, ge=0)
    by_mail: bool = False

    @property
    def one_exchange(self) -> bool:
        """True if everything goes to everyone at once."""
        return self.by_mail

    @property
    def partials(self) -> str:
        """The value ``results``: partial results have the dtype of results."""
        return "results"


class FewRowsSchedule(Schedule):
    """The schedule of a GEMM op of few or of medium numbers of rows, whose sums travel by mail.

    Clusters of ``splits`` blocks, at most ``blocks`` in all, take 128 columns at a time, each block
    a part of K. With a ``tiling``, for more rows, clusters take its tiles instead, and K is not cut.
    ``product``: the dtype in which a rank's sums travel; a kernel that follows normalises rows of
    the sum. ``normalises``: of plans of earlier versions."""

    kind: Literal["hopper.few_rows"] = "hopper.few_rows"
    splits: int = Field(ge=1)
    blocks: int = Field(ge=1)
    product: DtypeName
    normalises: Literal[False] = False
    tiling: TilingName | None = None

    @property
    def one_exchange(self) -> bool:
        """Always True."""
        return True

    @property
    def partials(self) -> str:
        """The dtype of the products, in which partial results travel."""
        return self.product


class AttentionKernelSchedule(KeysSchedule):
    """The schedule of ring attention as one kernel, of at most ``blocks`` blocks. In a node each
    rank's keys and values travel by copy engines, ``chunk_rows`` rows at a time, each followed by a
    flag; the kernel takes the own ones first and then each peer's as flags arrive, the rank before
    this one first, and other nodes' ranks last."""

    kind: Literal["hopper.ring_attention_kernel"] = "hopper.ring_attention_kernel"
    chunk_rows: int = Field(ge=128, multiple_of=128)
    blocks: int = Field(ge=1)

    @property
    def copy_engines(self) -> bool:
        """Always True."""
        return True


class DispatchSchedule(TokenSchedule):
    """The schedule of MoE dispatch+GEMM.

    A kernel of ``blocks`` blocks multiplies the rows of all experts, tile by tile: first up to
    ``early_tiles`` that need only own tokens, and have a multiple of ``early_rows`` rows of each
    expert. ``permutes``: the same blocks first copy the tokens of a tile into contiguous rows, for
    tiles of ``tiling``; otherwise each block gathers them for itself, and tiles are deep. Plans
    without ``early_rows`` were made when early tiles were whole ones."""

    kind: Literal["hopper.moe_dispatch"] = "hopper.moe_dispatch"
    blocks: int = Field(ge=2, multiple_of=2)
    early_tiles: int = Field(ge=0)
    early_rows: int = Field(256, ge=1)
    permutes: bool
    tiling: ExpertTiling


class GemmCombineSchedule(ReturnSchedule):
    """The schedule of MoE GEMM+combine. A kernel of ``blocks`` blocks multiplies, in tiles of
    ``tiling``. ``returns``: it writes each result to its place on the token's rank (``slots``); or
    a token's results on one rank are added there, and their sum is returned (``ranks``). Kernels of
    ``sum_blocks`` blocks make the sums."""

    kind: Literal["hopper.moe_gemm_combine"] = "hopper.moe_gemm_combine"
    tiling: ExpertTiling
    blocks: int = Field(ge=2, multiple_of=2)
    sum_blocks: int = Field(ge=1)
    returns: Returns
