"""Cost formulas: alpha-beta links, compute with wave quantisation, signals.

Times are microseconds, sizes bytes, bandwidths GB/s (so 1 GB/s moves 1000 bytes a microsecond). The
constants of a machine are data (:class:`MachineConstants`); the formulas are here and, those of
products and exchanges, in ``cost.hpp`` beside this file, each with its source. Every result is a
*prediction*.
"""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, model_validator
from typing_extensions import Self

from mkernel.errors import ArgumentError
from mkernel.schema_version import SchemaVersion
from mkernel.topology import _cost
from mkernel.topology.defaults import defaults
from mkernel.topology.model import Model

_MOST, _MOST_BYTES = 2**31 - 1, 2**46
"""Native formulas multiply two sizes, or a number of bytes and one of ranks, in 64 bits."""


class SendingRates(Model):
    """Constants that include ``egress_gbs``, the rate at which a rank sends to all peers together."""

    egress_gbs: float = Field(gt=0, description="what one rank sends to all peers together")

    def limited_to(self, gbs: float) -> Self:
        """Return these constants for links that give a rank at most ``gbs``."""
        fields = {name: getattr(self, name) for name in type(self).model_fields}
        limited = {
            name: value.limited_to(gbs)
            for name, value in fields.items()
            if isinstance(value, SendingRates)
        }
        return self.model_copy(update={**limited, "egress_gbs": min(self.egress_gbs, gbs)})


class Tile(Model):
    """A size of output tiles that a GEMM kernel computes, the number of cores that share one, and
    the rate of one core."""

    rows: int = Field(ge=1, le=_MOST)
    columns: int = Field(ge=1, le=_MOST)
    cores: int = Field(1, ge=1, le=_MOST)
    tflops_per_core: float = Field(gt=0, description="half precision, on random data, at length")


class OneShot(Model):
    """The limits below which partial results of an all-reduce go to every rank in one exchange.
    Others are added by their owners, whose sums travel in a second exchange."""

    most_bytes: int = Field(ge=0, le=_MOST_BYTES, description="of partial results")
    most_more_bytes: int = Field(ge=0, le=_MOST_BYTES, description="of them, times W - 2")


class BriefCalls(Model):
    """Calls that end without waiting for their peers, because they have few bytes."""

    most_bytes: int = Field(
        ge=0,
        le=_MOST_BYTES,
        description="that all ranks send to one of them, and as its own count",
    )
    less_us: float = Field(ge=0, description="than other calls take")


class MailCalls(SendingRates):
    """Calls of one Lamport exchange, whose data announce their own arrival, and which are brief."""

    most_bytes: int = Field(
        ge=0,
        le=_MOST_BYTES,
        description="that all ranks send to one of them, and as its own count",
    )
    exchange_us: float = Field(ge=0, description="latency of the exchange between all ranks")


class MailTwice(SendingRates):
    """All-reduces of two Lamport exchanges, whose data announce their own arrival, in one brief
    call."""

    most_bytes: int = Field(
        ge=0,
        le=_MOST_BYTES,
        description="that all peers send to one rank, in both exchanges together",
    )
    exchanges_us: float = Field(ge=0, description="latency of both exchanges between all ranks")


class LoadedLines(Model):
    """Lines of memory that tiles load, which cores get at a limited rate: one per row of a step of
    K that is as long as a line, and ``uneven`` lines if the row does not begin with one."""

    depth: int = Field(ge=1, le=_MOST, description="elements of K in a line")
    uneven: float = Field(ge=1, le=2, description="lines of a row that touches two")
    lines_a_us: float = Field(gt=0, description="from the cache, by all cores together")


class StreamedProducts(Model):
    """Products of a library that divides steps of K among all cores, so that no wave is partly
    filled: the time is a sum of rates and has no steps."""

    tiles: tuple[Tile, ...] = Field(
        min_length=1, description="what edges are filled up to, of which the fastest is taken"
    )
    even_depth: int = Field(
        1, ge=1, le=_MOST, description="K in multiples of it is loaded by whole lines"
    )
    uneven_rate: float = Field(1.0, gt=0, le=1, description="of the tile's rate, with any other K")
    depth_us: float = Field(ge=0, description="what 1000 of K take that nothing hides")
    results_gbs: float = Field(gt=0, description="results, as all cores together write them")
    loads_gbs: float = Field(gt=0, description="operands, as all cores together read them")
    sums_gbs: float = Field(gt=0, description="float32 parts of results, written and read again")


class PathConstants(SendingRates):
    """Constants of one way to run a GEMM op: a fused kernel, or a library's product and a
    collective."""

    start_us: float = Field(ge=0, description="launches, and meeting the peers at the call's end")
    tiles: tuple[Tile, ...] = Field((), description="of which the fastest is taken, in waves")
    streamed: StreamedProducts | None = Field(None, description="instead of tiles in waves")
    loaded: LoadedLines | None = Field(None, description="by tiles; None: it costs nothing")
    splits: tuple[Annotated[int, Field(ge=1, le=_MOST)], ...] = Field(
        (1,), min_length=1, description="parts that K may be cut into"
    )
    tile_us: float = Field(0.0, ge=0, description="start and end of a tile that nothing hides")
    split_us: float = Field(0.0, ge=0, description="launch of what adds the parts up")
    exchange_us: float = Field(ge=0, description="latency of one exchange between all ranks")
    scattered_sums_gbs: float | None = Field(
        None,
        gt=0,
        description="parts that a reduce-scatter adds up behind its exchange; None: no time",
    )
    one_shot: OneShot | None = Field(None, description="None: all-reduces are two exchanges")
    brief: BriefCalls | None = Field(None, description="None: all calls wait for their peers' end")
    mail: MailCalls | None = Field(None, description="None: all calls wait for flags")
    mail_twice: MailTwice | None = Field(
        None, description="None: all-reduces of two exchanges wait for flags"
    )
    unhidden_gather: float = Field(
        0.0, ge=0, le=1, description="of the shorter of T_c and T_m, what overlap leaves: gathers"
    )
    unhidden_scatter: float = Field(0.0, ge=0, le=1, description="the same of reduce-scatters")
    unhidden_reduce: float = Field(0.0, ge=0, le=1, description="the same of all-reduces")

    @model_validator(mode="after")
    def _has_products(self) -> Self:
        if bool(self.tiles) == (self.streamed is not None):
            raise ValueError("a path has either tiles, at least one, or streamed")
        return self

    @cached_property
    def exchanges(self) -> _cost.Exchanges:
        """Return the closed forms of exchanges on this path."""
        once, brief, mail, twice = self.one_shot, self.brief, self.mail, self.mail_twice
        return _cost.Exchanges(
            self.egress_gbs,
            self.exchange_us,
            self.scattered_sums_gbs,
            None if once is None else (once.most_bytes, once.most_more_bytes),
            None if brief is None else (brief.most_bytes, brief.less_us),
            None if mail is None else (mail.most_bytes, mail.egress_gbs, mail.exchange_us),
            None if twice is None else (twice.most_bytes, twice.egress_gbs, twice.exchanges_us),
        )

    @cached_property
    def forms(self) -> _cost.Path:
        """Return the closed forms of calls of GEMM ops on this path."""
        unhidden = self.unhidden_gather, self.unhidden_scatter, self.unhidden_reduce
        return _cost.Path(self.exchanges, self.products, *unhidden)

    @cached_property
    def products(self) -> _cost.Products:
        """Return the closed forms of this path's products: one for each kind of tile and each cut of
        K."""
        streamed, loaded = self.streamed, self.loaded
        tiles = self.tiles if streamed is None else streamed.tiles
        return _cost.Products(
            [(each.rows, each.columns, each.cores, each.tflops_per_core) for each in tiles],
            None
            if streamed is None
            else (
                streamed.even_depth,
                streamed.uneven_rate,
                streamed.depth_us,
                streamed.results_gbs,
                streamed.loads_gbs,
                streamed.sums_gbs,
            ),
            None if loaded is None else (loaded.depth, loaded.uneven, loaded.lines_a_us),
            self.splits,
            self.tile_us,
            self.split_us,
        )


class FewRowsConstants(SendingRates):
    """Constants of GEMM+AllReduce and GEMM+ReduceScatter of few rows by one kernel: it reads
    weights, then exchanges sums at once."""

    ops: tuple[Literal["gemm_all_reduce", "gemm_reduce_scatter"], ...] = Field(
        ("gemm_all_reduce",), description="that run it"
    )
    float8: bool = Field(
        False, description="whether e4m3 operands do, where products are added with few bits"
    )
    most_rows: int = Field(ge=1)
    least_columns: int = Field(1, ge=1)
    most_bytes: int = Field(
        ge=1, description="that ranks send to one of them, and as its own count"
    )
    start_us: float = Field(ge=0, description="launch, and what comes before and after the weights")
    weights_gbs: float = Field(gt=0, description="of device memory, as the kernel reads weights")
    block_gbs: float = Field(gt=0, description="the same, of one block of it")
    wave_us: float = Field(
        ge=0, description="between a cluster's tiles: exchange, and the next weights' latency"
    )
    exchange_us: float = Field(ge=0, description="latency of the exchange")
    block_sums_gbs: float | None = Field(
        None,
        gt=0,
        description="sums that one block adds up, of its cluster's and of each peer's bytes; None: "
        "faster than they travel",
    )
    normalises: Literal[False] = Field(False, description="of files of earlier versions")


class MailedTilesConstants(SendingRates):
    """Constants of GEMM+AllReduce by one kernel whose tiles leave for the peers as they are finished:
    for more rows than the kernel of few rows takes."""

    least_rows: int = Field(ge=1)
    most_rows: int = Field(ge=1)
    most_bytes: int = Field(ge=1, description="that all peers send to one rank")
    tiles: tuple[Tile, ...] = Field(min_length=1, description="of which the fastest is taken")
    loads_gbs: float = Field(gt=0, description="operands, as all cores together load them")
    uneven: float = Field(
        1.0, ge=1, description="how much longer that takes where K, or N, is no whole lines"
    )
    start_us: float = Field(ge=0, description="launch, and start and end of the product")
    tile_us: float = Field(ge=0, description="start and end of a tile that nothing hides")
    exchange_us: float = Field(ge=0, description="latency of the exchange")


class LinkConstants(Model):
    """Rates and latencies of the links between devices. Values that a file omits come from
    ``topology/data/links.json``."""

    p2p_gbs: float | None = Field(
        None, gt=0, description="one scale-up link to one peer, one direction; None: as it is rated"
    )
    p2p_latency_us: float = Field(default_factory=lambda: defaults().fabric.latency_us, ge=0)
    signal_us: float = Field(
        default_factory=lambda: defaults().fabric.signal_us,
        ge=0,
        description="fence and notify after one chunk, by one block",
    )
    egress_gbs: float | None = Field(
        None, gt=0, description="what a rank sends to all of its node together; None: a link a peer"
    )
    p2p_most_gbs: float | None = Field(
        None, gt=0, description="what any link between devices of a node carries, at most"
    )
    nic_gbs: float = Field(
        default_factory=lambda: defaults().nic.gbs,
        gt=0,
        description="a NIC of unknown speed, one direction",
    )
    nic_most_gbs: float | None = Field(
        None, gt=0, description="measured: what NICs give, whatever their ports are rated"
    )
    nic_latency_us: float = Field(
        default_factory=lambda: defaults().nic.latency_us,
        ge=0,
        description="command to visible signal, proxies included",
    )
    group_gbs: float | None = Field(
        None, gt=0, description="a process group between nodes, one direction; None: as a NIC"
    )
    group_latency_us: float | None = Field(None, ge=0, description="likewise")
    host_gbs: float = Field(
        default_factory=lambda: defaults().host.gbs,
        gt=0,
        description="staging through host memory",
    )
    host_latency_us: float = Field(
        default_factory=lambda: defaults().host.latency_us,
        ge=0,
        description="of each such stop",
    )
    cross_rail_share: float = Field(
        default_factory=lambda: defaults().rails.cross_share,
        ge=0,
        le=1,
        description="of a NIC's rate towards NICs of other rails; 0: not joined",
    )
    cross_rail_latency_us: float = Field(
        default_factory=lambda: defaults().rails.cross_latency_us,
        ge=0,
        description="what crossing rails adds",
    )


class ConstantsFile(Model):
    """The beginning of a file of constants, by which a file of another version is refused."""

    schema_version: Annotated[Literal[1], SchemaVersion] = 1


_SENDING = ("fused", "library", "few_rows", "mailed_tiles")
"""Constants of ways to run an op, which know how fast ranks send."""


class MachineConstants(LinkConstants, ConstantsFile):
    """Rates and latencies of one kind of machine, with those of its links.

    They come from the data file of the backend that runs there, or from a measured one. Those of a
    simulated device follow from the machine description of its timed model, so that a plan predicts
    and a simulation models the same machine.
    """

    name: str
    source: str = Field(description="where the numbers come from, in words")
    fitted_to: tuple[str, ...] = Field(
        (), description="shape lists of `mkernel bench` that they were fitted to"
    )
    architectures: tuple[str, ...] = Field(
        (), description="of the chips that the rates are of; empty: whatever the world has"
    )
    products: tuple[str, ...] = Field(
        (), description="words of the names of devices that they are of; empty: of any name"
    )
    card: str | None = Field(
        None, description="a card that the accelerator knows, which has what is not among these"
    )
    cores: int | None = Field(None, ge=1, description="of a device whose number nobody states")
    measured: bool = Field(True, description="False: they follow from public figures alone")
    float16_tflops_per_core: float = Field(gt=0)
    bfloat16_tflops_per_core: float = Field(gt=0)
    float32_tflops_per_core: float = Field(gt=0)
    float8_tflops_per_core: float | None = Field(
        None, gt=0, description="of e4m3 operands; None: unknown, and that of float32 stands for it"
    )
    memory_gbs: float = Field(gt=0, description="device memory, all cores together")
    p2p_gbs: float = Field(gt=0, description="one scale-up link to one peer, one direction")
    p2p_latency_us: float = Field(ge=0)
    comm_block_gbs: float = Field(gt=0, description="copy rate of one communication block")
    signal_us: float = Field(ge=0, description="fence and notify after one chunk, by one block")
    launch_us: float = Field(ge=0, description="starting the kernels of one call")
    copy_engine_gbs: float | None = Field(
        None, gt=0, description="to one destination, where transfers need no communication block"
    )
    fused: PathConstants | None = Field(
        None, description="of the fused kernels, where a backend also has a library path"
    )
    library: PathConstants | None = Field(None, description="of that path")
    few_rows: FewRowsConstants | None = Field(
        None, description="of the fused path's kernel for few rows, where a backend has one"
    )

    mailed_tiles: MailedTilesConstants | None = Field(
        None, description="of the fused path's kernel for medium numbers of rows"
    )

    def limited_to(self, egress_gbs: float | None) -> Self:
        """Return these constants on links that give a rank ``egress_gbs`` to all of its node together;
        themselves if the links are as fast as those that they were fitted on, or there are none."""
        if egress_gbs is None or egress_gbs >= (self.egress_gbs or self.p2p_gbs):
            return self
        paths = {name: getattr(self, name) for name in _SENDING}
        limited = {name: path.limited_to(egress_gbs) for name, path in paths.items() if path}
        return self.model_copy(update=limited)

    def by_flags(self) -> Self:
        """Return these constants where no exchange is a Lamport exchange, whose order was argued for
        some devices and links only: without what takes one."""
        without = {"mail": None, "mail_twice": None}
        library = None if self.library is None else self.library.model_copy(update=without)
        return self.model_copy(update={"library": library, "few_rows": None, "mailed_tiles": None})

    def knows_rate(self, dtype: str) -> bool:
        """Return whether the rate of a dtype is its own: for e4m3, float32's rate stands in if it
        is unknown."""
        return dtype != "float8_e4m3fn" or self.float8_tflops_per_core is not None

    def tflops_per_core(self, dtype: str) -> float:
        """Return the matrix rate of one core in TFLOP/s. ArgumentError for a dtype without a rate."""
        rates = {
            "float16": self.float16_tflops_per_core,
            "bfloat16": self.bfloat16_tflops_per_core,
            "float32": self.float32_tflops_per_core,
            "float64": self.float32_tflops_per_core / 2,  # the ratio of vector units
            "float8_e4m3fn": self.float8_tflops_per_core or self.float32_tflops_per_core,
        }
        if dtype not in rates:
            raise ArgumentError("dtype", repr(dtype), f"one of: {', '.join(rates)}")
        return rates[dtype]


def load_constants(path: Path) -> MachineConstants:
    """Load constants from a JSON file. InputFileError if it is missing or does not validate."""
    return MachineConstants.from_file(path, "constants file")


def transfer_us(nbytes: float, bandwidth_gbs: float, latency_us: float) -> float:
    """Return the time of one message: alpha + n/beta (the alpha-beta or Hockney model)."""
    return latency_us + nbytes / (bandwidth_gbs * 1e3)


GemmCall = _cost.GemmCall
"""A call of a GEMM op on one node, as closed forms of its bytes and times take it."""
gemm_tile_us = _cost.gemm_tile_us
"""Returns the time of one output tile on one core."""
gemm_us = _cost.gemm_us
"""Returns the time of a product on one device, in whole waves of tiles."""
