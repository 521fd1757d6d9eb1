"""The schedules of library products, copy engines and exchanges on CUDA devices: the part of a plan
that only launches of ``cuda``, and of backends upon it, follow."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from mkernel.plan.model import DtypeName, KeysTravel, Schedule
from mkernel.plan.pipeline import Exchange, Returns

Way = Literal["one_shot", "two_shot"]
SumWay = Literal["mail", "mail_twice", "two_shot"]
ScaledBy = Literal["library", "kernel"]
TilingName = Literal["wide", "medium", "deep", "narrow", "promoted"]
"""The output tiles of kernels with wgmma. ``deep``: of plans of earlier versions, and run as
``wide``."""
AttentionLibrary = Literal["cudnn", "flash"]
AttentionCore = Literal["mkernel"]
"""The name of our own kernel (kernels/attention/core.hpp)."""

FLAGS = 114_688
"""Flags of a workspace, one for each chunk of each rank; as in device/workspace.cuh."""
MOST_PIECES = 16
"""The most pieces of a rank's tokens for another node; as in kernels/moe/crossing_lists.hpp."""
MOST_NORMED_COLUMNS = 48 << 10
"""The most columns of rows that are normalised by the kernel which sums them; as in
kernels/collectives/sum_rows.hpp."""


class KeysSchedule(Schedule):
    """The part of schedules of ring attention that is about keys and values between nodes, where a
    kernel sends them to all ranks: ``far_rows`` rows of one head at a time, by ``put_blocks``
    blocks. ``land_blocks`` others bring those of other nodes to where they are read. ``exchange``:
    they go to each rank of another node, or once to each node, whose rank in the same place passes
    them on. In one node all numbers are 0. Keys that no query of a rank sees are not sent there."""

    exchange: Exchange = "direct"
    far_rows: int = Field(0, ge=0, multiple_of=128)
    put_blocks: int = Field(0, ge=0)
    land_blocks: int = Field(0, ge=0)

    @property
    def keys_travel(self) -> KeysTravel:
        """The value ``seen``."""
        return "seen"


class AttentionSchedule(KeysSchedule):
    """The schedule of ring attention by parts. In a node each rank's keys and values travel whole, by
    copy engines. ``library``, or our own kernel, computes attention on the own ones and, beside
    that, on each peer's as they arrive, the rank before this one first. A kernel of
    ``merge_blocks`` blocks merges the results."""

    kind: Literal["hopper.ring_attention"] = "hopper.ring_attention"
    library: AttentionLibrary | AttentionCore
    merge_blocks: int = Field(ge=1)

    @property
    def copy_engines(self) -> bool:
        """Always True."""
        return True


class AttentionInPiecesSchedule(Schedule):
    """The schedule of ring attention of a long sequence. Queries are taken in cuts of at most
    ``piece_rows`` rows; for each cut, the peers' keys and values travel again, in pieces of as many
    rows, into ``slots`` slots for each peer. A kernel of ``merge_blocks`` blocks merges new results
    with earlier ones."""

    kind: Literal["hopper.ring_attention_in_pieces"] = "hopper.ring_attention_in_pieces"
    library: AttentionLibrary
    merge_blocks: int = Field(ge=1)
    piece_rows: int = Field(ge=1)
    slots: int = Field(ge=2)

    @property
    def copy_engines(self) -> bool:
        """Always True."""
        return True


class AttentionBackwardSchedule(Schedule):
    """The schedule of the backward of ring attention. Keys and values travel as in
    :class:`AttentionSchedule`, and each part's contribution to their gradients travels to the
    owner, by copy engines. ``library`` computes the contributions, on the own keys beside the
    peers' parts. Each of these is computed in ``lots`` of heads, one after another, whose gradients
    travel as soon as they are computed. A kernel of ``sum_blocks`` blocks adds a lot's parts."""

    kind: Literal["hopper.ring_attention_backward"] = "hopper.ring_attention_backward"
    library: AttentionLibrary
    lots: int = Field(1, ge=1, le=2)
    sum_blocks: int = Field(ge=1)

    @property
    def copy_engines(self) -> bool:
        """Always True."""
        return True


class ProductSchedule(Schedule):
    """A schedule in which a library multiplies. ``product``: the dtype that products are rounded
    to, in which partial results travel; the output keeps its own. ``scaled_by``: what scales
    products of e4m3 operands, the library or a kernel after the library's product without scales.
    None: there are no scales."""

    product: DtypeName
    scaled_by: ScaledBy | None = None

    @property
    def partials(self) -> str:
        """The dtype of the products, in which partial results travel."""
        return self.product


class LibrarySchedule(ProductSchedule):
    """The schedule of a library's product and a collective.

    ``way``: the way of an all-reduce, either everything to everyone at once, or an exchange of
    partial results and one of sums; None: there is no all-reduce. ``by_mail``: the collective is a
    Lamport exchange, whose data announces its own arrival, instead of using flags. Two exchanges
    into symmetric results use flags all the same. ``normalises``: if rows of the sum are
    normalised, the kernel that takes them by mail does that too; otherwise one that follows."""

    kind: Literal["hopper.library"] = "hopper.library"
    way: Way | None = None
    by_mail: bool = False
    normalises: bool = False

    @property
    def one_exchange(self) -> bool:
        """True if ``way`` sends everything to everyone at once."""
        return self.way == "one_shot"


class SumSchedule(Schedule):
    """The schedule of AllReduce: everything to everyone at once, by a Lamport exchange, in a kernel
    of ``blocks`` blocks that normalises the rows that it sums; or an exchange of partial results
    and one of sums, by Lamport exchanges in such a kernel if rows are normalised, else in one of
    twice as many blocks, or by flags in such a one, with a norm in a kernel that follows."""

    kind: Literal["hopper.all_reduce"] = "hopper.all_reduce"
    way: SumWay
    blocks: int = Field(ge=1)

    @property
    def one_exchange(self) -> bool:
        """True if ``way`` sends everything to everyone at once."""
        return self.way == "mail"


class PartsSchedule(ProductSchedule):
    """The schedule of a library's products that run beside copy engines, which carry rows. A rank
    multiplies each rank's rows separately, and cuts those that travel into ``chunks``, each with
    its own product and copy."""

    chunks: int = Field(ge=1)

    @property
    def copy_engines(self) -> bool:
        """Always True."""
        return True


class GatherPartsSchedule(PartsSchedule):
    """The schedule of AllGather+GEMM in parts."""

    kind: Literal["hopper.gather_parts"] = "hopper.gather_parts"


class ReducePartsSchedule(PartsSchedule):
    """The schedule of GEMM+ReduceScatter and GEMM+AllReduce in parts. A kernel of at most
    ``sum_blocks`` blocks adds partial results."""

    kind: Literal["hopper.reduce_parts"] = "hopper.reduce_parts"
    sum_blocks: int = Field(ge=1)


class TokenSchedule(Schedule):
    """The schedule of a MoE dispatch. While the device sorts their ids, tokens travel: all of them to
    every rank, by copy engines; or, by a kernel of ``push_blocks`` blocks if that is not 0, each once
    to each rank that has an expert for it.

    Between nodes each token crosses once to each rank that wants it, or, hierarchically, to each node
    (``exchange``), in ``pieces``; a kernel of ``land_blocks`` blocks brings them to where they are
    read.
    ``relay_bytes``: rows that a rank keeps for the relays of other nodes, at most; 0 in a direct
    exchange. In one node there are no pieces."""

    push_blocks: int = Field(0, ge=0, multiple_of=2)
    exchange: Exchange = "direct"
    pieces: int = Field(0, ge=0, le=MOST_PIECES)
    land_blocks: int = Field(0, ge=0, multiple_of=2)
    relay_bytes: int = Field(0, ge=0)

    @property
    def copy_engines(self) -> bool:
        """True if copy engines carry the tokens of a node, which they do if no blocks push."""
        return self.push_blocks == 0 and self.pieces == 0

    @property
    def whole_tokens(self) -> bool:
        """True if all tokens travel to every rank, which they do in one node if no blocks push."""
        return self.push_blocks == 0 and self.pieces == 0


class RowsSchedule(TokenSchedule):
    """The schedule of a MoE dispatch without a product: a kernel of ``blocks`` blocks copies tokens to
    the rows of their experts."""

    kind: Literal["hopper.moe_rows"] = "hopper.moe_rows"
    blocks: int = Field(ge=1)


class ReturnSchedule(Schedule):
    """The schedule of results that come home. Between nodes they do so as sums by rank, of all tokens
    of each rank of another node, in ``pieces``, each of which leaves as soon as it is summed; in one
    node there are none. Hierarchically (``exchange``) a rank adds up those of its node for the ranks
    in its place, rounds the sums, of which it keeps ``relay_bytes``, to ``node_sums``, and sends them
    instead."""

    pieces: int = Field(0, ge=0, le=MOST_PIECES)
    exchange: Exchange = "direct"
    relay_bytes: int = Field(0, ge=0)
    node_sums: DtypeName | None = None

    @property
    def whole_tokens(self) -> bool:
        """True between nodes, where sums of all tokens travel."""
        return self.pieces > 0


class CombineSchedule(ReturnSchedule):
    """The schedule of the MoE combine. Rows go to their places on the token's rank, where they are
    added; a kernel of ``sum_blocks`` blocks does each of the two. Between nodes sums are float32."""

    kind: Literal["hopper.moe_combine"] = "hopper.moe_combine"
    sum_blocks: int = Field(ge=1)

    @property
    def returns(self) -> Returns:
        """Return how results come home."""
        return "ranks" if self.pieces else "slots"


class LibraryCombineSchedule(ReturnSchedule):
    """The schedule of MoE GEMM+combine whose product is a library's. ``returns``: each result travels
    to its place on the token's rank (``slots``); or a token's results on one rank are added there, and
    their sum is returned (``ranks``). Kernels of ``sum_blocks`` blocks do either."""

    kind: Literal["cuda.moe_gemm_combine"] = "cuda.moe_gemm_combine"
    sum_blocks: int = Field(ge=1)
    returns: Returns
