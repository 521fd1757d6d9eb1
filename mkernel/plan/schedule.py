"""A backend's own part of a plan."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

from pydantic import BeforeValidator, SerializeAsAny

from mkernel.topology.model import Model


class Schedule(Model):
    """The decisions of a backend's launches of one plan that no other backend knows: tile sizes,
    who moves the bytes, in which pieces.

    A subclass gives ``kind`` a default of its own, such as ``"mine.gemm"``. JSON is read as the
    class of its kind, once the module of that class has been imported.
    """

    kind: str

    @property
    def copy_engines(self) -> bool:
        """Return whether copy engines, not kernels, write to the memory of peers."""
        return False

    @property
    def whole_tokens(self) -> bool:
        """Return whether all tokens of a dispatch go to every rank, not only those wanted there."""
        return False

    @property
    def one_exchange(self) -> bool:
        """Return whether partial results of an all-reduce go whole to every rank; else they go to
        their owners, whose sums travel again."""
        return False

    @property
    def partials(self) -> str:
        """Return the dtype in which partial results of a GEMM op travel: that of ``sums``, of
        ``results``, or one by name."""
        return "sums"

    _of_kind: ClassVar[dict[str, type[Schedule]]] = {}

    @classmethod
    def __pydantic_init_subclass__(cls, **kwargs: Any) -> None:
        kind = cls.model_fields["kind"].default
        if isinstance(kind, str):  # else it is a base of others
            Schedule._of_kind[kind] = cls

    @staticmethod
    def read(value: Any) -> Any:
        """Read a schedule, as its own class, from what JSON gave. Raises ValueError if no loaded
        backend has its kind."""
        if not isinstance(value, dict):
            return value
        found = Schedule._of_kind.get(str(value.get("kind")))
        if found is None:
            known = ", ".join(sorted(Schedule._of_kind)) or "none"
            raise ValueError(
                f"no backend that is loaded has schedules of kind {value.get('kind')!r}; known: {known}"
            )
        return found.model_validate(value)


AnySchedule = Annotated[SerializeAsAny[Schedule], BeforeValidator(Schedule.read)]
"""A field that holds a schedule of any kind, and keeps its class through JSON."""
