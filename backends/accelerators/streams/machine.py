"""Constants of the devices that torch runs on: ``machine.json`` beside this file, by torch's name."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from mkernel.backends.cuda.chips import ChipMachine
from mkernel.topology.model import Finite

FILE = Path(__file__).with_name("machine.json")


class TorchDevice(ChipMachine):
    """One kind of device. Without constants nothing is predicted of it."""

    source: str = ""


class _File(Finite):
    cpu: TorchDevice
    cuda: TorchDevice
    npu: TorchDevice


@cache
def torch_device(name: str) -> TorchDevice:
    """The device of that name. These do not depend on the device that is here, because ranks on unlike
    devices must plan alike."""
    found: TorchDevice = getattr(_file(), name)
    return found


@cache
def _file() -> _File:
    return _File.from_file(FILE, "constants of streams")
