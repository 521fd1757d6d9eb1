"""The check that a backend's statements about itself fit together."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import get_args

import torch

from mkernel.backends.contracts.status import Status
from mkernel.conformance.accelerator_subject import AcceleratorSubject, blame
from mkernel.conformance.check import Check
from mkernel.plan.capabilities import AcceleratorCapabilities
from mkernel.plan.model import E4M3, DtypeName, OpName, ScaleMode
from mkernel.plan.pipeline import Returns
from mkernel.topology.model import Accelerator

_PATHS = {"p2p", "nic"}


def _repeated(values: Sequence[str]) -> bool:
    return len(set(values)) != len(values)


def _status(status: object) -> Iterator[str]:
    if not isinstance(status, Status):
        yield f"status() returns {type(status).__name__}, not a Status"
    elif not status.usable:
        yield f"status() says that it is not usable: {status.detail}"
    elif not status.detail:
        yield "status() says nothing in detail"


def _devices(devices: object) -> Iterator[str]:
    if not isinstance(devices, tuple) or not all(isinstance(d, Accelerator) for d in devices):
        yield "probe() does not return a tuple of Accelerator"
        return
    if not devices:
        yield "probe() finds no device although status() says that it is usable"
    if _repeated([device.id for device in devices]):
        yield "probe() gives one id to several devices"


def _claims(claims: AcceleratorCapabilities) -> Iterator[str]:
    legal: dict[str, set[str]] = {
        "ops": set(get_args(OpName)),
        "dtypes": set(get_args(DtypeName)) - {E4M3},  # which scale_modes are about
        "out_dtypes": set(get_args(DtypeName)) - {E4M3},
        "b_layouts": {"row", "column"},
        "pitched": {"a", "b"},
        "far_returns": set(get_args(Returns)),
        "scale_modes": set(get_args(ScaleMode)),
        "fused_scale_modes": {mode for mode in claims.scale_modes if mode != "block"},
        "fused_float32_scale_modes": set(claims.scale_modes),
    }
    for field, names in legal.items():
        values = getattr(claims, field)
        if not values and field != "pitched" and not field.endswith("scale_modes"):
            yield f"claims no {field}"
        if _repeated(values):
            yield f"{field} names something twice: {', '.join(values)}"
        unknown = sorted(set(values) - names)
        if unknown:
            yield f"{field} claims {', '.join(unknown)}, which mkernel does not have"
    if claims.scale_modes and "column" not in claims.b_layouts:
        yield "claims scale_modes, and b_layouts without column, as e4m3 operands lie"
    pair = ("moe_dispatch_gemm", "moe_combine")
    for nodes, where in ((1, ""), (2, " between nodes")):
        found = [op for op in pair if claims.provides(op, nodes)]
        if len(found) == 1:
            yield f"claims {found[0]}{where} without its other half"
    alignment = claims.alignment_bytes
    if alignment < 1 or alignment & (alignment - 1):
        yield f"alignment_bytes is {alignment}, not a power of two"
    if claims.compute_cores < 1 or claims.comm_cores < 1:
        yield "claims less than one core"
    astray = sorted(set(claims.put_ops) - set(claims.ops))
    if astray:
        yield f"put_ops names {', '.join(astray)}, which ops does not"
    if claims.put_ops and not (claims.process_group and "p2p" in claims.transfer_paths):
        yield "put_ops has a meaning only with process_group and the transfer path p2p"
    if not claims.process_group and not _PATHS & set(claims.transfer_paths):
        yield f"claims no transfer path out of {', '.join(sorted(_PATHS))} and no process group"


def _device(device: str) -> Iterator[str]:
    try:
        torch.device(device)
    except RuntimeError:
        yield f"device is {device!r}, which torch does not know"


def capabilities(subject: AcceleratorSubject) -> None:
    """Read every claim twice, and check that they are legal and agree."""
    found = [*_claims(subject.capabilities)]
    for backend in subject.backends:
        found += [*_status(backend.status()), *_devices(backend.probe()), *_device(backend.device)]
        if backend.capabilities() != backend.capabilities():
            found.append("capabilities() says something else the second time")
    blame(found)


CHECKS = (
    Check("capabilities", "status, probe and capabilities are well formed and agree", capabilities),
)
