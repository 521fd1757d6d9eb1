"""Every error that mkernel raises on purpose.

All derive from :class:`MkernelError`. A message names the thing, the value and what to do. Errors
that end a world (:class:`WorldError`) are raised by *every* rank of it, with the same type.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from mkernel.printable import printable

INSTALL_AGAIN = "run `pip install .` in mkernel's repository again, with this Python"
"""The remedy for an installation that lacks a part."""
_MOST_SHOWN = 400
"""The most characters of a value in a message."""


class MkernelError(Exception):
    """Base of all mkernel errors. Its message is one printable line, whatever the values in it."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*(printable(arg) if isinstance(arg, str) else arg for arg in args))

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle as the message and the fields, which constructors take by their names."""
        return self._maker(), self.args

    def _maker(self) -> partial[Any]:
        return partial(type(self), **{n: v for n, v in vars(self).items() if n != "__notes__"})


class NotBuilt(MkernelError, ImportError):
    """The package has no native modules for this Python."""

    def __init__(
        self, root: Path, python: str, installed: Path | None = None, differs: str = ""
    ) -> None:
        """Build a message that states what to do about the tree in `root`. `installed`: the folder
        where mkernel is installed for that Python, made from a version of the file `differs` other
        than the tree's."""
        if sys.platform != "linux":
            remedy = (
                f"it runs on Linux only, and this is {sys.platform}: use a Linux host or container"
            )
        elif installed is not None:
            remedy = (
                f"the mkernel that is installed in {installed} has another {differs}; run "
                f"`pip install .` in {root} again, or the program in another folder"
            )
        elif (root / "Makefile").is_file():
            remedy = (
                f"run `make` in {root}, then use {root}/.venv/bin/python; or run `pip install .` "
                "there with this Python"
            )
        else:
            remedy = INSTALL_AGAIN
        super().__init__(f"mkernel in {root} is not built for {python}: {remedy}")


class ArgumentError(MkernelError, ValueError):
    """An argument outside its legal range. Nothing was started.

    Attributes:
        argument: the argument's name as the caller wrote it.
        value: the value that was passed (shortened for tensors: shape, dtype, strides).
        legal: the legal range, in words.
    """

    def __init__(self, argument: str, value: Any, legal: str, *, why: str = "") -> None:
        self.argument = argument
        self.value = value
        self.legal = legal
        self.why = why
        reason = f" ({why})" if why else ""
        shown = printable(str(value), _MOST_SHOWN)
        super().__init__(f"{argument} = {shown} is not legal{reason}; expected {legal}")

    def __reduce__(self) -> tuple[Any, ...]:
        return self._maker(), ()


class ShapeError(ArgumentError):
    """A tensor's shape does not fit the op, another argument or the world."""


class DtypeError(ArgumentError, TypeError):
    """A dtype that the op or backend does not take, or two that do not match."""


class LayoutError(ArgumentError):
    """Strides or memory layout that the backend cannot read without a copy."""


class InputFileError(MkernelError, ValueError):
    """An input file is missing, unreadable, or lacks the wanted tensors."""


class UnknownOp(ArgumentError):
    """No op of that name."""


class UnknownBackend(ArgumentError):
    """No accelerator, NIC or verbs provider of that name is installed."""


class Unsupported(MkernelError, NotImplementedError):
    """The backend is available, but does not support this op, dtype or path; or the op was called
    where it cannot work yet, such as inside a transform of torch.func. Nothing was started."""


class BackendUnavailable(MkernelError, RuntimeError):
    """The backend is installed but cannot run here; the message states why and what to do."""


class NotInitialized(MkernelError, RuntimeError):
    """A call that needs a world was made outside one."""


class AlreadyInitialized(MkernelError, RuntimeError):
    """``init`` was called inside a live world."""


class PlanMismatch(MkernelError, RuntimeError):
    """Two ranks hold different plans for the same call. Nothing was launched.

    Attributes:
        ranks: the two ranks.
        field: dotted path of the first field that differs.
        values: that field's value on each of the two.
    """

    def __init__(
        self,
        ranks: tuple[int, int],
        field: str,
        values: tuple[Any, Any],
        advice: str = "call the same op with the same shapes, dtypes and options on every rank",
    ) -> None:
        self.ranks = ranks
        self.field = field
        self.values = values
        self.advice = advice
        super().__init__(
            f"ranks {ranks[0]} and {ranks[1]} hold different plans: {field} is {values[0]!r} on "
            f"rank {ranks[0]} and {values[1]!r} on rank {ranks[1]}; {advice}"
        )

    def __reduce__(self) -> tuple[Any, ...]:
        return self._maker(), ()


class CapacityExceeded(MkernelError, RuntimeError):
    """The experts of a rank got more rows than the ``capacity`` of the call. Nothing was written,
    and the world stays usable.

    Attributes:
        rank: the rank with the most rows; rows: its number of rows. capacity: the capacity of each
            rank.
    """

    def __init__(self, rank: int, rows: int, capacity: int) -> None:
        self.rank = rank
        self.rows = rows
        self.capacity = capacity
        super().__init__(
            f"the experts of rank {rank} got {rows} rows, and capacity is {capacity}; raise it, or "
            "drop tokens (topk_ids of -1)"
        )

    def __reduce__(self) -> tuple[Any, ...]:
        return self._maker(), ()


class NoRoute(MkernelError, RuntimeError):
    """Two ranks have no path between them; the message names both ends and what is missing."""


class WorldError(MkernelError, RuntimeError):
    """The world is broken: finalize it and make a new one. Every rank raises the same type."""


class Untrusted(WorldError, PermissionError):
    """A message in the bootstrap store is not what a rank of this world wrote there."""


_AWAITED = {
    0xFFFFFFFF: "the signal that it is done with a call",
    0xFFFFFFFE: "the signal that the command FIFO has room",
    0xFFFFFFFD: "sums that are a signal themselves",
    0xFFFFFFFC: "what other blocks of its own kernel prepare",
}
"""The things that kernels wait for and that are no numbered words (``transport/device_wait.cuh``)."""


@dataclass(frozen=True)
class Diagnosis:
    """A record of who waited for what when a world broke (one per rank, of the first failure).

    Attributes:
        rank: the rank that waited.
        waiter: ``comm_kernel``, ``compute_kernel``, ``proxy`` or ``host``.
        core: block index of the waiting kernel.
        signal: index in the rank's signal pad.
        seen: the counter's value. wanted: the least value that would have ended the wait.
        op: call number in the world. chunk: chunk index, or None.
        peer: rank that should have raised the signal.
    """

    rank: int
    waiter: str
    core: int
    signal: int
    seen: int
    wanted: int
    op: int
    chunk: int | None
    peer: int

    def __str__(self) -> str:
        chunk = "" if self.chunk is None else f" for chunk {self.chunk}"
        return (
            f"rank {self.rank} {self.waiter} (block {self.core}) waited{chunk} of rank {self.peer} "
            f"on {_AWAITED.get(self.signal, f'signal {self.signal}')}: saw {self.seen}, "
            f"wanted {self.wanted}, call {self.op}"
        )


class Timeout(WorldError, TimeoutError):
    """A wait passed its deadline."""

    def __init__(self, message: str, diagnosis: Diagnosis | None = None) -> None:
        self.diagnosis = diagnosis
        super().__init__(message)


class PeerFailure(WorldError):
    """A rank died, or raised while others depended on it.

    Attributes:
        peer: the rank that failed first.
    """

    def __init__(self, message: str, peer: int) -> None:
        self.peer = peer
        super().__init__(message)


class NicError(WorldError):
    """A NIC reported an error completion or an asynchronous event.

    Attributes:
        status: the completion status or event name, as verbs spells it (``REM_ACCESS_ERR``, …).
        qp: queue pair number. wr_id: work request id. vendor_err: the vendor's code. peer: rank.
    """

    def __init__(
        self,
        message: str,
        *,
        status: str = "",
        qp: int = 0,
        wr_id: int = 0,
        vendor_err: int = 0,
        peer: int = -1,
    ) -> None:
        self.status = status
        self.qp = qp
        self.wr_id = wr_id
        self.vendor_err = vendor_err
        self.peer = peer
        super().__init__(message)


class Cancelled(WorldError):
    """The user stopped the run."""
