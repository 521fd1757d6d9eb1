"""Types of the native module (host/module.cpp)."""

from typing import Literal

class _Geometry:
    """What every op's geometry shows (host/bind.hpp); not a class of the module."""

    @property
    def chunks(self) -> int: ...
    @property
    def workspace_bytes(self) -> int: ...
    @property
    def signals(self) -> int: ...
    def arrived(self, parity: int, source: int, chunk: int) -> int: ...
    def released(self, rank: int) -> int: ...

class AgGemmGeometry(_Geometry):
    def __init__(
        self,
        *,
        world: int,
        m_local: int,
        n: int,
        k: int,
        dtype: str,
        tile_m: int,
        tile_n: int,
        tile_k: int,
        step_k: int,
        tiles_per_chunk: int,
    ) -> None: ...
    def summary(self, parity: int, source: int) -> int: ...
    def slot_offset(self, parity: int, source: int) -> int: ...

class GemmReduceGeometry(_Geometry):
    def __init__(
        self,
        *,
        world: int,
        m: int,
        n: int,
        k: int,
        dtype: str,
        out_dtype: str,
        replicated: bool,
        tile_m: int,
        tile_n: int,
        tile_k: int,
        step_k: int,
        tiles_per_chunk: int,
    ) -> None: ...
    def summed(self, tile: int) -> int: ...

MAX_HEAD_DIM: int

class RingAttentionGeometry(_Geometry):
    def __init__(
        self,
        *,
        world: int,
        batch: int,
        heads: int,
        kv_heads: int,
        rows: int,
        head_dim: int,
        causal: bool,
        dtype: str,
        rows_per_chunk: int,
        cubes: int,
    ) -> None: ...
    def needs(self, reader: int, source: int, chunk: int) -> bool: ...

class Strict:
    """Options of strict simulation (sim/strict.hpp). ``skip``: a planted fault, numbers of flags,
    barriers, fences and signals that core ``skip_core`` of ``skip_role`` leaves out; ``skip_waits``:
    of its waits for signals."""

    def __init__(
        self,
        *,
        seed: int | None = None,
        skip_role: Literal["cube", "comm", "vector"] = "cube",
        skip_core: int = 0,
        skip: list[int] = ...,
        skip_waits: list[int] = ...,
    ) -> None: ...

class Launch:
    def wait(self, timeout_s: float) -> bool: ...
    @property
    def comm_seconds(self) -> float: ...
    @property
    def compute_seconds(self) -> float: ...
    @property
    def at_deadline(self) -> str: ...
    def trace(self) -> bytes: ...

class MoeDispatchGeometry(_Geometry):
    def __init__(
        self,
        *,
        world: int,
        tokens: int,
        top_k: int,
        experts: int,
        hidden: int,
        features: int,
        rows_per_chunk: int,
        far: bool,
        dtype: str,
        tile_m: int,
        tile_n: int,
        tile_k: int,
        step_k: int,
    ) -> None: ...
    @property
    def hidden(self) -> int: ...
    @property
    def features(self) -> int: ...
    @property
    def table_words(self) -> int: ...
    @property
    def most_rows(self) -> int: ...
    def ids(self, parity: int, source: int) -> int: ...

class MoeCombineGeometry(_Geometry):
    def __init__(
        self,
        *,
        world: int,
        tokens: int,
        top_k: int,
        experts: int,
        features: int,
        rows_per_chunk: int,
        far: bool,
        dtype: str,
        out_dtype: str,
    ) -> None: ...

class Kernels:
    """What a launch or a record runs: of one call on one rank."""

_Matrix = tuple[int, int, int]
_Blocks = tuple[int, int, int]

def ag_gemm(
    *,
    geometry: AgGemmGeometry,
    a: _Matrix,
    b: _Matrix,
    out: _Matrix,
    out_dtype: str,
    order: list[int],
) -> Kernels: ...
def gemm_reduce(
    *, geometry: GemmReduceGeometry, a: _Matrix, b: _Matrix, out: _Matrix, order: list[int]
) -> Kernels: ...
def moe_dispatch(
    *,
    geometry: MoeDispatchGeometry,
    x: int,
    topk_ids: tuple[int, int],
    w: _Matrix,
    grouped: int,
    out: int,
    out_dtype: str,
    tables: int,
    routing: int,
    order: list[int],
) -> Kernels: ...
def moe_combine(
    *,
    geometry: MoeCombineGeometry,
    y: int,
    rows: int,
    weights: int,
    tables: int,
    out: int,
    order: list[int],
) -> Kernels: ...
def ring_attention(
    *,
    geometry: RingAttentionGeometry,
    q: int,
    k: int,
    v: int,
    out: int,
    lse: int,
    scale: float,
    order: list[int],
) -> Kernels: ...
def launch(
    *,
    kernels: Kernels,
    rank: int,
    epoch: int,
    number: int,
    pad: int,
    workspace: int,
    signal_base: int,
    region: int,
    peers: list[tuple[int, int]],
    blocks: _Blocks,
    node: int,
    fifo: int,
    timeout_s: float,
    view: str,
    trace: bool,
    strict: Strict | None = None,
) -> Launch: ...
def record(
    *, kernels: Kernels, rank: int, same_node: list[bool], blocks: _Blocks, node: int
) -> bytes: ...
def matrix_unit() -> str: ...
def set_slots(slots: int) -> None: ...
def slots() -> int: ...

class Machine:
    launch_ns: float
    issue_ns: float
    signal_ns: float
    scalar_ns: float
    macs_per_ns_16: float
    macs_per_ns_32: float
    matmul_ns: float
    extract_rate: float
    extract_ns: float
    vector_rate: float
    load_rate: float
    store_rate: float
    put_rate: float
    memory_ns: float
    memory_rate: float
    link_rate: float
    link_ns: float
    egress_rate: float
    ingress_rate: float
    proxy_ns: float
    nic_rate: float
    nic_ns: float

def replay(
    traces: list[bytes], machine: Machine, view: str, keep_spans: bool
) -> tuple[float, list[tuple[int, str, float, float]], bytes]: ...
