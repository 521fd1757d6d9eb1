from collections import deque
from typing import Any

INTERFACE: int

class KnownCalls:
    def __new__(
        cls,
        functions: dict[str, Any],
        failure: object,
        calls: object,
        running: deque[Any],
        lock: Any,
        under_way: list[str],
        worlds: set[Any],
        last: dict[bool, Any],
        queued: type[Any],
        name: str,
        pad: int,
    ) -> KnownCalls: ...
    def call(
        self,
        op: str,
        a: object,
        b: object,
        bias: object,
        out: object,
        a_scale: object,
        b_scale: object,
        out_dtype: object,
        chunk: object,
        use_fast_accum: bool,
        /,
    ) -> Any: ...
    def learn(
        self,
        signature: bytes,
        starter: object,
        launches: object,
        key: str,
        allocate: object,
        arguments: tuple[Any, ...],
        counter: bytearray,
    ) -> None: ...
    def forget(self) -> None: ...
    def add_buffer(self, address: int, nbytes: int, /) -> None: ...
    def close(self) -> None: ...
