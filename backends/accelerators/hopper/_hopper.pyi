"""Kernels for GPUs of compute capability 9.0.

Addresses and streams are plain integers of this process; no stream is None.
"""

from mkernel.backends.runtime._runtime import AbortCode, Diagnosis

class CallOrder:
    def __init__(self, device: int) -> None: ...
    def begin(self, stream: int) -> None: ...
    def fork(self, stream: int) -> int: ...
    def join(self, stream: int) -> None: ...
    def end(self, stream: int) -> int: ...
    def finished(self, call: int) -> bool: ...

class ControlBlock:
    address: int
    failed: bool
    def __init__(self) -> None: ...
    def abort(self, code: AbortCode) -> None: ...
    def outcome(self) -> tuple[AbortCode, Diagnosis]: ...

class Engine:
    copy_engine: Engine
    bulk: Engine
    plain: Engine
    name: str

def copy(
    dst: int,
    src: int,
    nbytes: int,
    engine: Engine,
    blocks: int = 8,
    stage_bytes: int = 0,
    *,
    stream: int,
) -> None: ...

class Element:
    bfloat16: Element
    float16: Element
    float32_to_bfloat16: Element
    float32_to_float16: Element

class Way:
    one_shot: Way
    two_shot: Way

class Collective:
    def __init__(
        self, world: DeviceWorld, staging_bytes: int, staging: int = 0, blocks: int = 0
    ) -> None: ...
    def of_call(self, number: int, timeout_s: float) -> Collective: ...

def all_gather_staging(world: int, shard_bytes: int, symmetric: bool) -> int: ...
def reduce_scatter_staging(world: int, element: Element, part_elements: int) -> int: ...
def all_reduce_staging(
    world: int, element: Element, elements: int, way: Way, symmetric: bool
) -> int: ...
def all_gather(
    call: Collective, src: int, shard_bytes: int, out: list[int], stream: int
) -> None: ...
def reduce_scatter(
    call: Collective, element: Element, src: int, part_elements: int, out: int, stream: int
) -> None: ...
def all_reduce(
    call: Collective,
    element: Element,
    src: int,
    elements: int,
    out: list[int],
    way: Way,
    stream: int,
) -> None: ...

class Tiling:
    wide: Tiling
    deep: Tiling
    narrow: Tiling

class DeviceWorld:
    def __init__(
        self, workspaces: list[int], rank: int, control: int, timeout_s: float, call: int
    ) -> None: ...
    def of_call(self, number: int, timeout_s: float) -> DeviceWorld: ...

class Product:
    def __init__(
        self,
        *,
        a: int = 0,
        b: int = 0,
        out: int = 0,
        bias: int = 0,
        n: int,
        k: int,
        half: bool,
        n_major: bool,
        tiling: Tiling,
        band: int,
        blocks: int = 0,
    ) -> None: ...
    def of(self, a: int, b: int, out: int) -> Product: ...

class AllGatherSchedule:
    push_blocks: int
    count: int
    def __init__(
        self,
        rows: int,
        chunk_rows: int,
        push_blocks: int = 0,
        columns_ahead: int = 0,
        slices: int = 1,
    ) -> None: ...

class ReduceSchedule:
    def __init__(
        self,
        *,
        m: int,
        rows: int,
        panel_rows: int,
        panel_columns: int,
        pace: int = 0,
        by_outbox: bool = False,
        everywhere: bool,
        outs: list[int] = ...,
        alone: bool = False,
    ) -> None: ...

class PipelinedGather:
    def __init__(
        self,
        device: int,
        order: CallOrder,
        world: DeviceWorld,
        product: Product,
        schedule: AllGatherSchedule,
    ) -> None: ...
    def start(
        self, number: int, timeout_s: float, a: int, b: int, out: int, stream: int
    ) -> None: ...

class PipelinedReduce:
    def __init__(
        self, device: int, world: DeviceWorld, product: Product, schedule: ReduceSchedule
    ) -> None: ...
    def start(
        self,
        number: int,
        timeout_s: float,
        a: int,
        b: int,
        out: int,
        stream: int,
        outs: list[int],
    ) -> None: ...

MAX_FLAGS: int
MAX_COPIED_CHUNKS: int
DATA_OFFSET: int

def all_gather_gemm_bytes(world: int, schedule: AllGatherSchedule, k: int) -> int: ...
def gemm_reduce_bytes(world: int, rows: int, n: int, by_outbox: bool, gathers: bool) -> int: ...
def push_rows(
    device: int,
    world: DeviceWorld,
    rows: int,
    row_bytes: int,
    schedule: AllGatherSchedule,
    stream: int,
) -> None: ...
def all_gather_gemm(
    device: int,
    world: DeviceWorld,
    product: Product,
    schedule: AllGatherSchedule,
    wait: bool,
    stream: int,
) -> None: ...
def gemm_reduce(
    device: int, world: DeviceWorld, product: Product, schedule: ReduceSchedule, stream: int
) -> None: ...
def rendezvous(device: int, world: DeviceWorld, stream: int) -> None: ...
