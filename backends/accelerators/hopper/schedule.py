"""What a launch on Hopper does that is no common part of a plan: the schedules of its kernels."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from mkernel.backends.accelerators.hopper.transfer.engines import Engine
from mkernel.plan.model import DtypeName
from mkernel.plan.pipeline import Exchange, Returns
from mkernel.plan.schedule import Schedule

TilingName = Literal["wide", "medium", "deep", "narrow", "promoted"]
ExpertTiling = Literal["wide", "deep"]
Way = Literal["one_shot", "two_shot"]
ScaledBy = Literal["library", "kernel"]
AttentionLibrary = Literal["cudnn", "flash"]
AttentionCore = Literal["mkernel"]
"""Our own kernel (kernels/attention_core.hpp)."""

FLAGS = 114_688
"""Of a workspace, one a chunk of each rank; as in device/workspace.cuh."""
MOST_NORMED_COLUMNS = 48 << 10
"""Of rows that the kernel which sums them normalises; as in kernels/sum_rows.hpp."""


class GatherSchedule(Schedule):
    """How the fused AllGather+GEMM runs. A rank's rows travel in chunks of ``chunk_rows``, moved by
    the kernel's first ``push_blocks`` blocks or, where that is 0, by copy engines; these move the
    chunk that comes last in ``slices`` of K. ``columns_ahead`` tile columns of the own rows are
    computed before the others' rows; 0: all. ``band`` rows of clusters share columns of B in L2.
    ``blocks``: of the kernel, at most one a multiprocessor. ``last_splits``: parts along K of each tile
    of a last wave that has fewer tiles than there are clusters. Where a call wants the gathered rows
    too, ``gathered_engine`` copies them, on ``gathered_blocks`` blocks (1 for copy engines).
    ``exchange``: between nodes; hierarchical: the pushing blocks also share what comes with the
    node."""

    kind: Literal["hopper.all_gather_gemm"] = "hopper.all_gather_gemm"
    tiling: TilingName
    chunk_rows: int = Field(ge=1)
    push_blocks: int = Field(ge=0)
    columns_ahead: int = Field(0, ge=0)
    slices: int = Field(1, ge=1)
    band: int = Field(ge=1)
    blocks: int = Field(ge=1)
    last_splits: int = Field(1, ge=1)
    gathered_engine: Engine
    gathered_blocks: int = Field(ge=1)
    exchange: Exchange = "direct"

    @property
    def copy_engines(self) -> bool:
        """Return whether copy engines carry the rows, as they do where no blocks push."""
        return self.push_blocks == 0


class ReduceSchedule(Schedule):
    """How a fused GEMM with a reduction runs. One rank owns ``rows`` rows of the sum. An owner's
    tiles are cut into panels of ``panel_rows`` rows of clusters and ``panel_columns`` columns of
    tiles; the own tiles of a panel are computed after the other owners' tiles of the next.
    ``pace``: least clock cycles between two puts of a block. ``by_outbox``: puts come from memory,
    not straight from the block that made the tile: smoother, and worth its memory traffic where the
    link is nearly full. ``band``, ``blocks`` and ``last_splits`` are as above.
    ``product_tiling``: of the whole product by itself, which the sequential view computes first.
    ``network_blocks``: the first ones, whole clusters, which hear of other nodes instead of
    computing tiles; 0 where there are none. ``exchange``: between nodes; hierarchical: a rank adds
    its node's parts up before they leave."""

    kind: Literal["hopper.gemm_reduce"] = "hopper.gemm_reduce"
    tiling: TilingName
    rows: int = Field(ge=1)
    panel_rows: int = Field(ge=1)
    panel_columns: int = Field(ge=1)
    pace: int = Field(ge=0)
    by_outbox: bool
    band: int = Field(ge=1)
    blocks: int = Field(ge=1)
    last_splits: int = Field(1, ge=1)
    product_tiling: TilingName
    network_blocks: int = Field(0, ge=0)
    exchange: Exchange = "direct"

    @property
    def partials(self) -> str:
        """Return ``results``: each partial result is rounded to the dtype of results."""
        return "results"


class FewRowsSchedule(Schedule):
    """How a GEMM op of few rows runs. Clusters of ``splits`` blocks, at most ``blocks`` in all, take
    128 columns at a time, each block a part of K. ``product``: the dtype in which a rank's sums
    travel. ``normalises``: where rows of the sum are normalised, the kernel does that too, else another
    one behind it."""

    kind: Literal["hopper.few_rows"] = "hopper.few_rows"
    splits: int = Field(ge=1)
    blocks: int = Field(ge=1)
    product: DtypeName
    normalises: bool = False

    @property
    def one_exchange(self) -> bool:
        """Always."""
        return True

    @property
    def partials(self) -> str:
        """Return the dtype of the products, in which partial results travel."""
        return self.product


class AttentionSchedule(Schedule):
    """How ring attention runs. Each rank's keys and values travel whole, by copy engines; ``library``,
    or our own kernel, computes attention on the own ones and, beside that, on each peer's as they come,
    the rank before this one first; a kernel of ``merge_blocks`` blocks merges what was found."""

    kind: Literal["hopper.ring_attention"] = "hopper.ring_attention"
    library: AttentionLibrary | AttentionCore
    merge_blocks: int = Field(ge=1)

    @property
    def copy_engines(self) -> bool:
        """Always."""
        return True


class AttentionKernelSchedule(Schedule):
    """How ring attention runs as one kernel, of at most ``blocks`` blocks. Each rank's keys and values
    travel by copy engines, ``chunk_rows`` rows at a time with a flag behind; the kernel takes the own
    ones first and then each peer's as flags come, the rank before this one first."""

    kind: Literal["hopper.ring_attention_kernel"] = "hopper.ring_attention_kernel"
    chunk_rows: int = Field(ge=128, multiple_of=128)
    blocks: int = Field(ge=1)

    @property
    def copy_engines(self) -> bool:
        """Always."""
        return True


class AttentionInPiecesSchedule(Schedule):
    """How ring attention of a long sequence runs. Some rows of queries come after others, at most
    ``piece_rows``; for each of these, keys and values of the peers travel again, in pieces of as many
    rows, into ``slots`` slots for each peer. A kernel of ``merge_blocks`` blocks merges what was found
    with what was found before."""

    kind: Literal["hopper.ring_attention_in_pieces"] = "hopper.ring_attention_in_pieces"
    library: AttentionLibrary
    merge_blocks: int = Field(ge=1)
    piece_rows: int = Field(ge=1)
    slots: int = Field(ge=2)

    @property
    def copy_engines(self) -> bool:
        """Always."""
        return True


class AttentionBackwardSchedule(Schedule):
    """How the backward of ring attention runs. Keys and values travel as in :class:`AttentionSchedule`,
    and what each part gives to their gradients travels home, by copy engines; ``library`` computes what
    the parts give, on the own keys beside the peers' parts. Each of these is computed in ``lots`` of
    heads, one after another, whose gradients travel as soon as they are there. A kernel of
    ``sum_blocks`` blocks adds a lot's parts up."""

    kind: Literal["hopper.ring_attention_backward"] = "hopper.ring_attention_backward"
    library: AttentionLibrary
    lots: int = Field(1, ge=1, le=2)
    sum_blocks: int = Field(ge=1)

    @property
    def copy_engines(self) -> bool:
        """Always."""
        return True


class ProductSchedule(Schedule):
    """A library multiplies. ``product``: the dtype that products are rounded to, in which partial
    results travel; the output keeps its own. ``scaled_by``: what scales products of e4m3 operands; a
    kernel does it behind the library's product without scales. None: there are none."""

    product: DtypeName
    scaled_by: ScaledBy | None = None

    @property
    def partials(self) -> str:
        """Return the dtype of the products, in which partial results travel."""
        return self.product


class LibrarySchedule(ProductSchedule):
    """How a library's product and a collective run. ``way``: of an all-reduce, everything to everyone
    at once, or sums in an exchange of their own; None: there is none. ``by_mail``: what the collective
    sends says itself that it has come, instead of by flags. Two exchanges into symmetric results go by
    flags all the same. ``normalises``: where rows of the sum are normalised, what sums them at once
    does that too, else a kernel behind it."""

    kind: Literal["hopper.library"] = "hopper.library"
    way: Way | None = None
    by_mail: bool = False
    normalises: bool = False

    @property
    def one_exchange(self) -> bool:
        """Return whether ``way`` sends everything to everyone at once."""
        return self.way == "one_shot"


SumWay = Literal["mail", "mail_twice", "two_shot"]


class SumSchedule(Schedule):
    """How AllReduce runs: everything to everyone at once, by mail, in a kernel of ``blocks`` blocks
    that normalises the rows that it sums; or sums in an exchange of their own, by mail too or by flags,
    in a kernel of twice as many, and a norm in a kernel behind them."""

    kind: Literal["hopper.all_reduce"] = "hopper.all_reduce"
    way: SumWay
    blocks: int = Field(ge=1)

    @property
    def one_exchange(self) -> bool:
        """Return whether ``way`` sends everything to everyone at once."""
        return self.way == "mail"


class PartsSchedule(ProductSchedule):
    """How a library's products run beside copy engines that carry rows. A rank multiplies the rows of
    each rank by themselves, and cuts those that travel into ``chunks``, each a product and a copy of
    its own."""

    chunks: int = Field(ge=1)

    @property
    def copy_engines(self) -> bool:
        """Always."""
        return True


class GatherPartsSchedule(PartsSchedule):
    """AllGather+GEMM in parts."""

    kind: Literal["hopper.gather_parts"] = "hopper.gather_parts"


class ReducePartsSchedule(PartsSchedule):
    """GEMM+ReduceScatter and GEMM+AllReduce in parts. A kernel of at most ``sum_blocks`` blocks adds
    partial results up."""

    kind: Literal["hopper.reduce_parts"] = "hopper.reduce_parts"
    sum_blocks: int = Field(ge=1)


class DispatchSchedule(Schedule):
    """How MoE dispatch+GEMM runs. While the device sorts their ids, tokens travel: all of them to
    every rank, by copy engines; or, by a kernel of ``push_blocks`` blocks where that is not 0, each
    once to each rank that has an expert of it. Then a kernel of ``blocks`` blocks multiplies the rows
    of all experts, tile by tile: first up to ``early_tiles`` that need own tokens alone, which have a
    multiple of ``early_rows`` of each expert. ``permutes``: the same
    blocks first copy the tokens of a tile into rows that lie one below the other, for tiles of
    ``tiling``; else each block gathers them for itself, and tiles are deep. Plans that do
    not say ``early_rows`` were made when early tiles were whole ones."""

    kind: Literal["hopper.moe_dispatch"] = "hopper.moe_dispatch"
    blocks: int = Field(ge=2, multiple_of=2)
    push_blocks: int = Field(0, ge=0, multiple_of=2)
    early_tiles: int = Field(ge=0)
    early_rows: int = Field(256, ge=1)
    permutes: bool
    tiling: ExpertTiling

    @property
    def copy_engines(self) -> bool:
        """For the tokens, where no blocks push."""
        return self.push_blocks == 0

    @property
    def whole_tokens(self) -> bool:
        """Return whether all tokens travel to every rank, as they do where no blocks push."""
        return self.push_blocks == 0


class CombineSchedule(Schedule):
    """How the MoE combine runs. Rows go to their places at home, where they are added; each by a kernel
    of ``sum_blocks`` blocks."""

    kind: Literal["hopper.moe_combine"] = "hopper.moe_combine"
    sum_blocks: int = Field(ge=1)


class GemmCombineSchedule(Schedule):
    """How MoE GEMM+combine runs. A kernel of ``blocks`` blocks multiplies, in tiles of ``tiling``.
    ``returns``: it writes each result to its place at home (``slots``); or a token's results of one
    rank are added there, and their sum goes home (``ranks``). Sums are made by kernels of
    ``sum_blocks`` blocks."""

    kind: Literal["hopper.moe_gemm_combine"] = "hopper.moe_gemm_combine"
    tiling: ExpertTiling
    blocks: int = Field(ge=2, multiple_of=2)
    sum_blocks: int = Field(ge=1)
    returns: Returns
