from collections import deque
from collections.abc import Callable
from typing import Any

class CallPath:
    def __new__(
        cls,
        functions: dict[str, Any],
        failure: object,
        calls: object,
        running: deque[Any],
        turns: object,
        lock: Any,
        under_way: list[str],
        worlds: set[Any],
        last: dict[bool, Any],
        queued: type[Any],
        name: str,
        pad: int,
        record: int,
        queues: bool,
    ) -> CallPath: ...
    def first(self, prepare: Callable[[], tuple[str, Callable[..., Any], bool]], /) -> Any: ...
    def learn(
        self,
        signature: object,
        engine: CallPath,
        program: tuple[Any, ...],
        starter: object,
        start: Callable[..., Any] | None,
        launches: object,
        key: str,
        counter: bytearray,
    ) -> None: ...
    def forget(self) -> None: ...
    def add_buffer(self, address: int, nbytes: int, /) -> None: ...
    def close(self) -> None: ...

class Op:
    def __new__(
        cls,
        name: str,
        parameters: tuple[str, ...],
        defaults: tuple[Any, ...],
        group: int,
        caller: int,
        functions: dict[str, Any],
        paths: dict[str | None, CallPath],
        python: Callable[..., Any],
        profiler: dict[str, Any],
        profiling: dict[str, Any],
        named: Callable[..., Any],
        any_rows: frozenset[int],
        family: frozenset[int],
    ) -> Op: ...
    def __call__(self, *arguments: Any, **keywords: Any) -> Any: ...
    def records(self, record: Callable[..., Any], /) -> None: ...
