"""Signal pads in host memory (see signal_pad.hpp)."""

import enum

class AbortCode(enum.Enum):
    none = 0
    timeout = 1
    peer_failure = 2
    nic_error = 3
    cancelled = 4

class Waiter(enum.Enum):
    none = 0
    comm_kernel = 1
    compute_kernel = 2
    proxy = 3
    host = 4

class WaitResult(enum.Enum):
    ok = 0
    aborted = 1
    timed_out = 2

class Diagnosis:
    waiter: Waiter
    core: int
    signal: int
    peer: int
    chunk: int
    op: int
    seen: int
    wanted: int

def pad_bytes(capacity: int) -> int: ...
def pad_format(address: int, capacity: int) -> None: ...
def pad_load(address: int, index: int) -> int: ...
def pad_add(address: int, index: int, value: int) -> None: ...
def pad_wait(
    address: int, index: int, wanted: int, timeout_s: float, who: Diagnosis = ...
) -> WaitResult: ...
def pad_abort(address: int, code: AbortCode, who: Diagnosis = ...) -> bool: ...
def pad_aborted(address: int) -> bool: ...
def pad_outcome(address: int) -> tuple[AbortCode, Diagnosis]: ...
