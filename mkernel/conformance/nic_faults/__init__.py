"""Planted faults of the NIC checks: ``cx7`` or ``efa`` with one promise broken each.

Every fault is a NIC backend, named ``module:Class`` where a backend's name is asked for.
:data:`FAULTS` says which checks must fail on it.
"""

from __future__ import annotations

from mkernel.conformance.nic_faults import flags, immediates, puts, sessions
from mkernel.conformance.nic_faults.base import Fault

_CX7: dict[type[Fault], tuple[str, ...]] = {
    puts.SignalFirst: ("visibility",),
    puts.SignalFirstAtTimes: ("visibility",),
    puts.SignalBeforeTail: ("visibility",),
    flags.RelaxedFlag: ("visibility",),
    puts.PeersOfTwoBits: ("worlds",),
    puts.CutsOddSizes: ("sizes",),
    puts.FirstMegabyteOnly: ("sizes",),
    puts.EmptyPutsLost: ("sizes",),
    puts.OneByteMore: ("sizes", "alignment"),
    puts.RemoteAligned: ("alignment",),
    puts.LocalAligned: ("alignment",),
    puts.LosesPuts: ("in-flight",),
    puts.LosesData: ("in-flight",),
    puts.RepeatsPuts: ("in-flight",),
    puts.DeadFifo: ("fifo",),
    puts.AddsOne: ("signal-values",),
    puts.SevenBitValues: ("signal-values",),
    puts.SequenceWraps: ("counter-wrap",),
    puts.CountersOf32Bits: ("counter-wrap",),
    puts.Reorders: ("order",),
    puts.FlushAtOnce: ("flush",),
    puts.FlushNever: ("flush",),
    sessions.RegionsTooWide: ("registration",),
    sessions.DropsSilently: ("registration",),
    sessions.RegionsAlias: ("registration",),
    sessions.KeepsRegions: ("churn",),
    sessions.SwallowsErrors: ("killed-peer", "registration", "device-faults"),
    sessions.NoAbort: ("killed-peer", "device-faults"),
    sessions.NamesNobody: ("killed-peer",),
    sessions.SlowClose: ("close", "killed-peer"),
    sessions.CloseLater: ("close",),
    sessions.LeaksDescriptor: ("reopen", "device-faults"),
    sessions.LeaksThread: ("reopen",),
    sessions.LeaksMemory: ("reopen",),
    sessions.BusyLoop: ("idle-cpu",),
    sessions.CountsTwice: ("statistics",),
    sessions.CountsSignalsOnly: ("statistics",),
    sessions.StatusRaises: ("capabilities",),
    sessions.OpensAnything: ("capabilities",),
    sessions.ClaimsNothing: ("capabilities",),
}

_EFA: dict[type[Fault], tuple[str, ...]] = {
    flags.SeparateFlag: ("visibility",),
    immediates.MiscountedImmediate: ("visibility",),
    immediates.MissingReceive: ("in-flight",),
}


def _named(faults: dict[type[Fault], tuple[str, ...]]) -> dict[str, tuple[str, ...]]:
    return {f"{fault.__module__}:{fault.__name__}": checks for fault, checks in faults.items()}


FAULTS: dict[str, dict[str, tuple[str, ...]]] = {"cx7": _named(_CX7), "efa": _named(_EFA)}
"""Backend → name of a faulty variant of it → checks that must fail on that."""
