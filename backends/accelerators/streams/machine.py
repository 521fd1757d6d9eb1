"""Constants of the devices that torch runs on, from ``machine.json`` beside this file, by torch's
name."""

from __future__ import annotations

from functools import cache
from importlib import metadata
from pathlib import Path

from pydantic import Field

from mkernel.backends.cuda.chips import ChipMachine
from mkernel.plan.model import ScaleMode
from mkernel.topology.defaults import Sourced
from mkernel.topology.model import Model

FILE = Path(__file__).with_name("machine.json")


class Traits(Sourced):
    """The best way to make launches on one kind of device."""

    row_chunks: int = Field(ge=1, description="of a rank's rows by default")
    overlaps: bool = Field(True, description="messages and products run at the same time")
    products_in_flight: int = Field(1, ge=1, description="that run side by side")
    peers_together: bool = Field(False, description="rows of all peers come in one message")
    head_start_cycles: int = Field(0, ge=0, description="of messages ahead of the first product")
    tile_elements: int = Field(1, ge=1, description="results that one block computes, at least")
    comm_share: int = Field(0, ge=0, description="one in so many vector cores is for messages")


class TorchDevice(ChipMachine):
    """One kind of device. Without constants, no times are predicted for it."""

    source: str = ""
    traits: Traits


class _File(Model):
    cpu: TorchDevice
    cuda: TorchDevice
    npu: TorchDevice


@cache
def torch_device(name: str) -> TorchDevice:
    """Return the data of the device type of that name. They do not depend on the device present
    here, because ranks on unlike devices must plan alike."""
    found: TorchDevice = getattr(_file(), name)
    return found


@cache
def scaled_mm(name: str) -> tuple[ScaleMode, ...]:
    """Return the scales that ``torch._scaled_mm`` takes on such a device. For CPUs they were tried
    with torch 2.13, the first release known to take both; on other devices nothing was tried."""
    return ("tensor", "row") if name == "cpu" and torch_release() >= (2, 13) else ()


@cache
def torch_release() -> tuple[int, int]:
    """Return the release of the installed torch without importing it; 5 ms."""
    major, minor, *_ = metadata.version("torch").split(".")
    return int(major), int(minor)


@cache
def _file() -> _File:
    return _File.from_file(FILE, "constants of streams")
