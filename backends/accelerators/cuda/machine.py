"""Constants of machines with CUDA devices, fitted on Hopper GPUs: all of ``machine.json``.

They are rates, and the limits by which ways are chosen; they change times, never results.
"""

from __future__ import annotations

from functools import cache, cached_property
from pathlib import Path
from typing import Literal

from pydantic import Field
from typing_extensions import Self

from mkernel.backends.accelerators.cuda import _closed_forms
from mkernel.backends.accelerators.cuda.chips import ChipMachine
from mkernel.backends.accelerators.cuda.schedule import TilingName, Way
from mkernel.backends.accelerators.cuda.transfer.engines import Engines
from mkernel.plan.model import DTYPE_BYTES, CommonPart, DtypeName, GemmShape
from mkernel.topology.cost import MachineConstants, PathConstants, transfer_us
from mkernel.topology.defaults import Sourced
from mkernel.topology.model import Model

FILE = Path(__file__).with_name("machine.json")
_MOST_LINKS = 64


class Tilings(Sourced):
    """The menu of output tiles. ``clusters``: rows and columns of the output that a cluster of
    blocks, one for each ``block_rows`` rows, computes at a time. ``promoted`` is for e4m3 operands
    whose products are added in float32, and for no others."""

    block_rows: int = Field(ge=1)
    clusters: dict[TilingName, tuple[int, int]]
    band: int = Field(ge=1, description="rows of clusters that share columns of B in L2")


class Pushing(Sourced):
    """The parameters by which blocks of the kernel push a shard."""

    blocks: int = Field(ge=1)
    threads_of_a_block: int = Field(ge=1, description="that push, each a chunk of its own")
    most_rows: int = Field(ge=1)
    least_bytes: int = Field(ge=1)


class Network(Sourced):
    """The parameters of sends to other nodes by blocks of the kernel."""

    blocks: int = Field(ge=2, multiple_of=2, description="that send, whole clusters")
    band: int = Field(ge=1, description="as of tilings, where rows come from other nodes")
    put_bytes: int = Field(ge=1, description="of a put, at least, where a rank has so many")
    relay_blocks: float = Field(
        gt=0, description="for each rank of the node that a relay writes to, itself included"
    )


class Slicing(Sourced):
    """The conditions under which copies are cut into slices of K."""

    slices: int = Field(ge=1)
    from_share: float = Field(ge=0, description="of the product's time, that the copies take")
    slice_us: float = Field(ge=0, description="what each further slice costs")


class Partials(Sourced):
    """The products of the library that are rounded by a separate copy."""

    scattered_elements: int = Field(ge=0, description="whole products of up to so many elements")


class CallTimes(Model):
    """The time of a library's call on a part: call_us + flop / rate."""

    work: float = Field(gt=0, description="flop a pair of a query and a key that meet, and element")
    tflops: float = Field(
        gt=0, description="all multiprocessors, random half precision, heads of 128"
    )
    of_width: dict[int, float] = Field({}, description="of that rate, by another width of heads")
    call_us: float = Field(ge=0, description="what a call costs beside that")
    causal_call_us: float = Field(ge=0, description="the same of a causal one")


class Attention(Sourced):
    """Ring attention by a library: calls on parts, and the merge of their results."""

    head_dims: tuple[int, ...] = Field(min_length=1)
    positions: int = Field(
        ge=1, description="of which a rank's piece of the sequence is a multiple"
    )
    forward: CallTimes
    backward: CallTimes
    core: CallTimes = Field(description="of a part by our own kernel")
    kernel: CallTimes = Field(description="of all parts by one kernel, its begin and end included")
    kernel_waits: float = Field(
        ge=0, description="for keys, of the time that their copies take, within that kernel"
    )
    kernel_ranks: int = Field(ge=1, description="of a world, up to which that kernel was judged")
    chunk_bytes: int = Field(
        ge=1, description="of keys, and of values, that travel at a time for that kernel, at least"
    )
    # Estimates, never measured.
    far_bytes: int = Field(
        1 << 20,
        ge=1,
        description="of keys and values of a head that travel at a time between nodes, at least",
    )
    put_blocks: int = Field(8, ge=1, description="that send them")
    land_blocks: int = Field(
        4, ge=1, description="that copy what other nodes sent to where it is read, or to neighbours"
    )
    merge_us: float = Field(
        ge=0, description="start and end of the merge, the peers' last word included"
    )
    merge_gbs: float = Field(gt=0, description="what it reads and writes")
    merge_blocks_a_core: int = Field(ge=1)
    whole_bytes: int = Field(ge=0, description="that parts take at most beside a call's tensors")
    pieces_bytes: int = Field(ge=0, description="the same of pieces, where parts would take more")
    slots: int = Field(ge=2, description="of pieces, for each peer")
    core_rows: int = Field(
        ge=1, description="of a rank from which on our own kernel computes attention, where it can"
    )


class Experts(Sourced):
    """The grouped product of MoE. Rates are those of all multiprocessors, for random half
    precision."""

    gathered_tflops: float = Field(gt=0, description="each block gathers its rows")
    permuted_tflops: float = Field(gt=0, description="rows are put in order beside the product")
    ready_tflops: float = Field(gt=0, description="rows are in order")
    deep_k: tuple[int, int] = Field(
        description="lengths of a row from and up to which tiles of many rows are deep"
    )
    permute_us: float = Field(ge=0, description="until the first rows have been put so")
    memory_gbs: float = Field(gt=0, description="of weights and rows that are read or written once")
    route_us: float = Field(45.0, ge=0, description="until ids are sorted")
    push_blocks: int = Field(
        8, ge=2, multiple_of=2, description="that send tokens where they are wanted"
    )
    e4m3_times: float = Field(
        gt=0,
        description="these rates of e4m3 operands with scales by blocks, by those of half precision",
    )
    far_early_rows: int = Field(
        256, ge=64, multiple_of=64, description="of moe_tuning.early_rows, between nodes"
    )


class Scaled(Sourced):
    """Products of e4m3 operands by a library."""

    product: PathConstants
    unscaled: PathConstants = Field(description="products with one scale an operand")
    fast: PathConstants | None = Field(
        None, description="as product, added with fewer bits; None: not measured, as product"
    )
    fused: PathConstants | None = Field(
        None, description="the fused kernels, which add with fewer bits; None: not measured"
    )
    promoted: PathConstants | None = Field(
        None, description="the fused kernels that add up in float32; None: not measured"
    )
    by_blocks: float = Field(ge=1, description="of a product's time, what it is with such scales")
    scale_us: float = Field(ge=0, description="start and end of the kernel that scales products")
    scale_gbs: float = Field(gt=0, description="what it reads and writes")


class Parts(Sourced):
    """The costs between a library's products if rows travel in parts."""

    gap_us: float = Field(ge=0, description="of a further product, and the wait before it")
    sum_us: float = Field(ge=0, description="start and end of the kernel that adds parts up")
    sum_gbs: float = Field(gt=0, description="what it reads and writes")
    sum_cached_gbs: float = Field(gt=0, description="the same of what L2 still has")
    sum_cached_bytes: int = Field(ge=0, description="that L2 still has, at most")
    sum_blocks_a_core: int = Field(ge=1)
    end_us: float = Field(ge=0, description="until all ranks have ended a call")
    chunks: tuple[int, ...] = Field(min_length=1, description="of a rank's rows, to choose from")
    chunks_of_16_bits: tuple[int, ...] = Field(
        min_length=1, description="the same of 16-bit operands"
    )
    least_rows: int = Field(ge=1, description="of a chunk")
    least_gain: float = Field(
        ge=1,
        description="predicted time of one chunk / of more, whose launches eager calls wait for",
    )


class Spread(Model):
    """The way a reduction spreads its transfers over the call, for shares of K from ``from_k`` on.

    ``wave_of``: an owner's tiles are cut into panels, and the own tiles of a panel are computed
    after the other owners' tiles of the next. A panel is so large that its tiles of all owners, or
    of the others, are one wave; None: there is one panel. ``pace``: least clock cycles between two
    puts of a block. ``by_outbox``: puts come from memory, not straight from the block that made the
    tile. That is smoother, and worth its memory traffic if the link is nearly full.
    """

    from_k: int = Field(ge=0)
    wave_of: Literal["all", "others"] | None
    pace: int = Field(ge=0)
    by_outbox: bool = False


class Spreads(Sourced):
    """The spreads by op, ordered by ``from_k``, the largest first; the last is for all."""

    gemm_reduce_scatter: tuple[Spread, ...] = Field(min_length=1)
    gemm_all_reduce: tuple[Spread, ...] = Field(min_length=1)


class Prefetching(Sourced):
    """The weight of the next product, which kernels bring to L2 while ranks exchange, and only for as
    long as they do."""

    most_bytes: int = Field(ge=0, le=1 << 30, description="of a call")
    fill_gbs: float = Field(gt=0, description="at which they come to L2")
    exchange_us: float = Field(ge=0, description="of an exchange of few bytes, while they come")
    egress_gbs: float = Field(gt=0, description="of an exchange, to each peer")

    def nbytes(self, sent: int) -> int:
        """Return the bytes that come while a rank sends ``sent`` bytes to each peer, at most."""
        return min(
            self.most_bytes,
            int(transfer_us(sent, self.egress_gbs, self.exchange_us) * self.fill_gbs * 1e3),
        )


class NormTime(Model):
    """The time that residual and RMSNorm add to a call: a fixed one, and that of their rows."""

    us: float = Field(ge=0)
    rows_gbs: float = Field(gt=0, description="rows that are summed")

    def of(self, nbytes: int) -> float:
        """Return microseconds for ``nbytes`` of sums."""
        return transfer_us(nbytes, self.rows_gbs, self.us)


class Norms(Sourced):
    """The time that residual and RMSNorm add to a call that sums rows."""

    behind: NormTime = Field(description="by a kernel behind")
    inside: NormTime = Field(description="by the kernel that sums them")


class CudaMachine(ChipMachine):
    """The contents of the whole file."""

    constants: MachineConstants
    tilings: Tilings
    pushing: Pushing
    network: Network
    slicing: Slicing
    partials: Partials
    norms: Norms
    prefetch: Prefetching
    scaled: Scaled
    parts: Parts
    attention: Attention
    experts: Experts
    spreads: Spreads
    copies: Engines

    def way(self, shape: GemmShape, product: DtypeName, world: int) -> Way:
        """Return the way in which partial results of that dtype are added on every rank."""
        nbytes = shape.m * shape.n * DTYPE_BYTES[product]
        return "one_shot" if self.in_one(nbytes, world) else "two_shot"

    def in_one(self, nbytes: int, world: int) -> bool:
        """Return whether our collectives add ``nbytes`` on every rank in one exchange."""
        library = self.constants.library
        assert library is not None
        return library.exchanges.in_one(nbytes, world)

    @staticmethod
    def by_mail(nbytes: int, world: int, constants: MachineConstants | None) -> bool:
        """Return whether a collective of one exchange, in which a rank sends ``nbytes`` to each
        peer, is a Lamport exchange. ``constants``: of the plan; None: it is not."""
        library = None if constants is None else constants.library
        return library is not None and library.exchanges.by_mail(nbytes, world)

    @staticmethod
    def twice_by_mail(
        part: float, sums: float, world: int, constants: MachineConstants | None
    ) -> bool:
        """Return whether an all-reduce of two exchanges uses Lamport exchanges. ``part``, ``sums``:
        bytes that a rank sends to each peer, to be added up and as sums; ``constants``: as of
        :meth:`by_mail`."""
        library = None if constants is None else constants.library
        return library is not None and library.exchanges.twice_by_mail(part, sums, world)

    @cached_property
    def in_parts(self) -> _closed_forms.Parts:
        """Return the closed forms of calls whose rows travel in parts."""
        how = self.parts
        return _closed_forms.Parts(
            how.gap_us,
            how.sum_us,
            how.sum_gbs,
            how.sum_cached_gbs,
            how.sum_cached_bytes,
            how.end_us,
            self.copies.copies["put"],
        )

    def of_plan(self, plan: CommonPart) -> Self:
        """Return the machine with the plan's card, on which no rank sends more than the plan's links
        carry; itself if it was measured on that card and on links that are not faster."""
        machine = self if plan.card is None else self.on_card(plan.card)
        return machine._on_links(plan.egress_gbs)

    def with_card(self, name: str) -> Self:
        """Make the machine with a card that exists."""
        made = super().with_card(name)
        times = made.constants.p2p_gbs / self.constants.p2p_gbs
        return made.model_copy(update={"copies": self.copies.on_links(times)})

    @cached_property
    def _on(self) -> dict[float, Self]:
        """The machines on slower links, as far as they were made."""
        return {}

    def _on_links(self, egress_gbs: float | None) -> Self:
        if egress_gbs in self._on:
            return self._on[egress_gbs]
        constants = self.constants.limited_to(egress_gbs)
        if egress_gbs is None or constants is self.constants:
            return self
        paths = {
            name: path.limited_to(egress_gbs)
            for name, path in dict(self.scaled).items()
            if isinstance(path, PathConstants)
        }
        if len(self._on) == _MOST_LINKS:
            self._on.clear()
        self._on[egress_gbs] = made = self.model_copy(
            update={
                "constants": constants,
                "scaled": self.scaled.model_copy(update=paths),
                "copies": self.copies.model_copy(update={"most_gbs": egress_gbs}),
            }
        )
        return made


@cache
def machine() -> CudaMachine:
    """Return the constants that come with mkernel; the file is read once."""
    return CudaMachine.from_file(FILE, "constants of CUDA devices")
