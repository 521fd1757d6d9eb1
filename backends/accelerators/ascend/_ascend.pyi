"""Types of the native module (host/module.cpp)."""

class AgGemmGeometry:
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
    @property
    def chunks(self) -> int: ...
    @property
    def workspace_bytes(self) -> int: ...
    @property
    def signals(self) -> int: ...
    def flag(self, parity: int, source: int, chunk: int) -> int: ...
    def summary(self, parity: int, source: int) -> int: ...
    def released(self, rank: int) -> int: ...
    def slot_offset(self, parity: int, source: int) -> int: ...

class Launch:
    def wait(self, timeout_s: float) -> bool: ...
    @property
    def comm_seconds(self) -> float: ...
    @property
    def compute_seconds(self) -> float: ...
    def trace(self) -> bytes: ...

def launch_ag_gemm(
    *,
    geometry: AgGemmGeometry,
    rank: int,
    a: tuple[int, int, int],
    b: tuple[int, int, int],
    out: tuple[int, int, int],
    out_dtype: str,
    epoch: int,
    number: int,
    pad: int,
    workspace: int,
    signal_base: int,
    region: int,
    peers: list[tuple[int, int]],
    source_order: list[int],
    compute_blocks: int,
    comm_blocks: int,
    node: int,
    fifo: int,
    timeout_s: float,
    view: str,
    trace: bool,
) -> Launch: ...
def matrix_unit() -> str: ...
def set_slots(slots: int) -> None: ...
def slots() -> int: ...
