"""Kernels for GPUs of compute capability 9.0, and the memory they run on.

Addresses and streams are plain integers of this process; no stream is None.
"""

from mkernel.backends.runtime._runtime import AbortCode, Diagnosis

class CudaError(RuntimeError): ...

class DeviceInfo:
    index: int
    name: str
    major: int
    minor: int
    multiprocessors: int
    memory_bytes: int
    pci: str

def devices() -> list[DeviceInfo]: ...
def versions() -> tuple[int, int]: ...
def can_access(from_device: int, to_device: int) -> bool: ...

class DeviceMemory:
    address: int
    mapped_bytes: int
    device: int
    rdma: bool
    @staticmethod
    def create(device: int, nbytes: int) -> DeviceMemory: ...
    @staticmethod
    def attach(device: int, fd: int, mapped: int) -> DeviceMemory: ...
    def export_fd(self) -> int: ...
    def export_dmabuf(self) -> int: ...

class ControlBlock:
    address: int
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
