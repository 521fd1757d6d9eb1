"""Formats of files in which other tools describe a machine."""

from __future__ import annotations

from pathlib import Path

from mkernel.errors import InputFileError
from mkernel.topology.sources import hwloc, nccl, npu, xml
from mkernel.topology.sources.findings import Findings

KNOWN = "NCCL's or hwloc's XML, npu-smi's text"
OTHERS = "XML, nor text of npu-smi"
"""The formats in words: those that are known, and those that a file may have if it is not JSON."""


def parse(text: bytes, path: Path) -> tuple[Findings, ...] | None:
    """Return the hosts of a file: NCCL's XML, hwloc's, or the output of ``npu-smi info -t topo``
    (and of ``npu-smi info``, one after the other). None: it is neither XML nor such text.

    Raises:
        InputFileError: it is XML of something else, malformed or hostile.
    """
    if not xml.is_xml(text):
        plain = text.decode("utf-8", errors="replace")
        return (npu.parse(plain),) if npu.is_text(plain) else None
    root = xml.parse(text, path)
    if root.tag == nccl.ROOT:
        return nccl.read(root, path)
    if root.tag == hwloc.ROOT:
        return (hwloc.read(root, path),)
    raise InputFileError(
        f"topology file {path}: its root element is <{root.tag[:40]}>; expected <{nccl.ROOT}> "
        f"(NCCL) or <{hwloc.ROOT}> (hwloc)"
    )
