"""The parts of a machine as validated data: nodes, accelerators, NICs, CPUs.

Units: bandwidth in GB/s (1e9 bytes a second, one direction), NIC port speed in Gb/s, latency in
microseconds, memory in bytes. Models are frozen and round-trip exactly through JSON.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    FailFast,
    Field,
    StringConstraints,
    ValidationError,
    model_validator,
)
from typing_extensions import Self

from mkernel.errors import InputFileError
from mkernel.printable import printable
from mkernel.schema_version import SchemaVersion
from mkernel.user_files import parse_json, read_file

MAX_NODES, MAX_ACCELERATORS = 16384, 256
"""The most nodes of a world and accelerators of a node that are read."""

_MOST_FILE_BYTES = 1 << 20
_MOST_NAME = 1024
_MOST_SHOWN = 200
_MOST_PARTS = 1 << 16


def _short(text: str) -> str:
    shown = printable(text[: _MOST_NAME + 1])
    if len(shown) > _MOST_NAME:
        raise ValueError(f"a name has at most {_MOST_NAME} characters")
    return shown


_T = TypeVar("_T")
Many = Annotated[tuple[_T, ...], FailFast(), Field(max_length=_MOST_PARTS)]
"""Parts of a machine. If a file has many wrong ones, only the first is reported."""
Name = Annotated[str, AfterValidator(_short)]
"""A name from a driver or a file: limited in length, and printable whatever was in it."""
Printable = Annotated[str, AfterValidator(printable)]

KindName = Annotated[str, StringConstraints(pattern=r"^[a-z0-9][a-z0-9_.-]{0,31}$")]
"""The kind of a device or a link, a word in lower case. Sources and backends may bring words of
their own; those of the sources that come with mkernel are in :mod:`mkernel.topology.sources.kinds`."""


class Model(BaseModel):
    """Base of models: frozen, strict about unknown fields (a typo in a file is an error, not a
    default) and about numbers, because JSON has no infinity and no NaN."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    @cached_property
    def fingerprint(self) -> str:
        """The SHA-256 of all fields (hex); equal exactly when all of them are."""
        return fingerprint(self.model_dump(mode="json"))

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Self:
        """Return a copy with some fields replaced, not validated. Cached properties are not copied,
        but computed anew from the copy's fields."""
        if deep:
            return super().model_copy(update=update, deep=deep)
        kind, given = type(self), update or {}
        fields = {**self.__dict__, **given}
        if len(fields) != len(kind.__pydantic_fields__):
            fields = {name: fields[name] for name in kind.__pydantic_fields__}
        # As pydantic copies, which takes four times as long: planners copy a plan for each row count.
        copied = kind.__new__(kind)
        object.__setattr__(copied, "__dict__", fields)
        known: set[str] = self.__pydantic_fields_set__
        set_there = known if given.keys() <= known else {*known, *given}
        object.__setattr__(copied, "__pydantic_fields_set__", set_there)
        object.__setattr__(copied, "__pydantic_extra__", None)
        object.__setattr__(copied, "__pydantic_private__", None)
        return copied

    @classmethod
    def from_file(cls, file: Path, what: str) -> Self:
        """Load the JSON of a file; ``what`` describes it in words. InputFileError names the bad
        field."""
        try:
            return cls.model_validate(parse_json(read_file(file, what, _MOST_FILE_BYTES)))
        except ValidationError as error:
            raise InputFileError(f"{what} {file}: {first_error(error)}") from error
        except (ValueError, RecursionError) as error:
            if isinstance(error, InputFileError):
                raise
            raise InputFileError(f"{what} {file} is not JSON: {error}") from error


_text = json.JSONEncoder(sort_keys=True, separators=(",", ":")).encode


def fingerprint(fields: Mapping[str, Any]) -> str:
    """Return the SHA-256 (hex) of JSON-safe fields."""
    return hashlib.sha256(_text(fields).encode()).hexdigest()


def first_error(error: ValidationError) -> str:
    """Return where a file is wrong, and why."""
    first = error.errors(include_url=False, include_input=False)[0]
    where = ".".join(str(part) for part in first["loc"]) or "the file"
    return f"{printable(where, _MOST_SHOWN)}: {printable(first['msg'], _MOST_SHOWN)}"


class NumaNode(Model):
    """One NUMA node: its id and the logical CPUs that belong to it."""

    id: int = Field(ge=0)
    cpus: Many[int]
    memory_bytes: int | None = None


class Accelerator(Model):
    """One device that computes.

    ``id`` is unique in its node (``gpu0``). ``emulated`` marks devices that a
    simulator provides.
    """

    id: Name
    kind: KindName
    name: Name
    index: int = Field(ge=0)
    pci: Name | None = None
    pci_path: Many[Name] = Field(
        default=(), description="host bridge and PCIe bridges above the device, outermost first"
    )
    pcie_gbs: float | None = Field(default=None, gt=0, description="its own PCIe link")
    numa_node: int | None = None
    memory_bytes: int | None = None
    architecture: str | None = Field(
        default=None,
        description="what kernels are compiled for, where a source says it",
    )
    cores: int | None = Field(
        default=None, ge=1, description="multiprocessors, cube cores, where a source counts them"
    )
    clock_mhz: float | None = Field(
        default=None, ge=1, description="the most of its cores, where a source says it"
    )
    memory_gbs: float | None = Field(
        default=None, ge=1, description="what its memory carries at most, where a source says it"
    )
    emulated: bool = False


class Nic(Model):
    """One port of a network device, or one that a software provider emulates.

    ``gpudirect``: True if it reads and writes accelerators' memory; None if no source states it.
    """

    id: Name
    kind: KindName = Field(description="`ethernet` does no RDMA, `soft` is a software device")
    name: Name
    port: int = 1
    pci: Name | None = None
    pci_path: Many[Name] = Field(
        default=(), description="host bridge and PCIe bridges above the device, outermost first"
    )
    pcie_gbs: float | None = Field(default=None, gt=0, description="its own PCIe link")
    numa_node: int | None = None
    speed_gbps: float | None = Field(default=None, gt=0)
    link_layer: Literal["InfiniBand", "Ethernet", "Unspecified"] | None = None
    active: bool = True
    gpudirect: bool | None = None
    emulated: bool = False


class Bridge(Model):
    """A PCIe bridge that some ``pci_path`` names: a root port, or a port of a switch.

    ``pcie_gbs`` is the rate of that port's link: below a root or downstream port, above an upstream
    port.
    """

    id: Name
    pcie_gbs: float | None = Field(default=None, gt=0)


FABRIC_SWITCH = "switch"
FABRIC_HOST = "host"
"""The special second ends of a :class:`FabricLink`: the switches that join all accelerators linked
to them, and the CPU with its memory."""


class FabricLink(Model):
    """The scale-up links between two accelerators of a node, or from one to switches or its CPU.

    ``gbs``: all ``count`` links together, one direction. Either may be unknown.
    """

    kind: KindName
    ends: tuple[Name, Name] = Field(description="accelerator ids; the second may be switch or host")
    count: int | None = Field(default=None, ge=1)
    gbs: float | None = Field(default=None, gt=0)


class Node(Model):
    """A set of ranks joined by a scale-up fabric. ``emulated``: one of several on one machine.

    ``no_p2p``: pairs of accelerators whose driver refuses them access to each other's memory.
    """

    id: int = Field(ge=0)
    hostname: Name
    emulated: bool = False
    numa: Many[NumaNode]
    accelerators: Many[Accelerator] = ()
    nics: Many[Nic] = ()
    bridges: Many[Bridge] = ()
    fabric: Many[FabricLink] = ()
    fabric_known: bool = Field(
        default=False, description="a source looked for scale-up links: what it did not list is not"
    )
    no_p2p: Many[tuple[Name, Name]] = ()

    @model_validator(mode="after")
    def _unique_ids(self) -> Node:
        for what, ids in (
            ("accelerator", [a.id for a in self.accelerators]),
            ("nic", [n.id for n in self.nics]),
            ("numa node", [str(n.id) for n in self.numa]),
            ("bridge", [bridge.id for bridge in self.bridges]),
        ):
            twice = [i for i, times in Counter(ids).items() if times > 1]
            if twice:
                raise ValueError(f"node {self.id}: {what} id {min(twice)!r} occurs twice")
        return self

    @model_validator(mode="after")
    def _known_ends(self) -> Node:
        known = {a.id for a in self.accelerators}
        for what, ends, legal in (
            *(
                ("fabric link", link.ends, known | {FABRIC_SWITCH, FABRIC_HOST})
                for link in self.fabric
            ),
            *(("no_p2p pair", pair, known) for pair in self.no_p2p),
        ):
            strangers = [end for end in ends if end not in legal]
            if strangers or ends[0] == ends[1]:
                raise ValueError(
                    f"node {self.id}: {what} {ends}: expected two different accelerators of the "
                    f"node{f', not {strangers[0]!r}' if strangers else ''}"
                )
        return self

    @property
    def cpus(self) -> tuple[int, ...]:
        """The logical CPUs of the node, sorted."""
        return tuple(sorted(cpu for numa in self.numa for cpu in numa.cpus))


class Topology(Model):
    """The nodes of a world, or the one node of a machine."""

    schema_version: Annotated[Literal[1], SchemaVersion] = 1
    nodes: Many[Node] = Field(min_length=1)

    @model_validator(mode="after")
    def _consecutive_nodes(self) -> Topology:
        ids = [node.id for node in self.nodes]
        if ids != list(range(len(ids))):
            raise ValueError(f"node ids are {str(ids)[:80]}; expected 0 to {len(ids) - 1} in order")
        return self


class Note(Model):
    """One sentence about something that a source could not find out, or that contradicts another
    source."""

    source: Printable
    message: Printable
