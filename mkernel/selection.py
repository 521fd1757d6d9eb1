"""The choice of backends for a world if the user leaves it open (``auto``).

Every rank chooses from what it sees of its own machine; ranks with different results get an error
when they meet (:class:`mkernel.World`). A launcher chooses once, for all of its ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import NamedTuple, TypeVar

from mkernel import machine
from mkernel.backends import registry
from mkernel.backends.contracts.accelerator import AcceleratorBackend
from mkernel.backends.contracts.nic import NicBackend
from mkernel.backends.contracts.status import Status
from mkernel.errors import ArgumentError, BackendUnavailable, Unsupported
from mkernel.plan.capabilities import AcceleratorCapabilities
from mkernel.plan.mixed import JOINT
from mkernel.plan.ops import READS_OF
from mkernel.printable import one_line
from mkernel.settings import AUTO, Settings
from mkernel.topology.lanes import ANY_NIC, NicUse
from mkernel.topology.model import Accelerator, KindName, Nic
from mkernel.topology.rails import most_served
from mkernel.topology.sources.chips import described
from mkernel.world.identity import Backends

SYSTEM, SOFT = "system", "soft"
"""Verbs providers: the machine's RDMA devices, and the software device, which joins processes of
one host only."""


TCP = "tcp", "sockets"
"""NIC backend and provider between nodes whose NICs are unlike."""
BY_NAME = "is chosen by name only"
"""The reason why ``auto`` takes no simulator, which is not worth reporting if something else is
taken."""


class Verdict(NamedTuple):
    """The verdict of ``auto`` on a backend: whether it may take it, and why (not), in words."""

    name: str
    usable: bool
    detail: str


def backends(
    settings: Settings,
    nodes: int,
    *,
    accelerator: str | Sequence[str] | None = None,
    nic: str | None = None,
    verbs: str | None = None,
    op: str | None = None,
    ranks: int | None = None,
    by_host: bool = False,
) -> Backends:
    """Return the backends of a world of ``nodes`` nodes on machines like this one.

    Args:
        accelerator, nic, verbs: values that replace the settings'. ``accelerator``: ``auto``, which
            adds to the most preferred one those that have ops it lacks; one name, which is then
            used alone; or several in order (:func:`accelerator_names`).
        ranks: number of ranks of the world, if it is known.
        op: op that the accelerator must provide, if it is not named.
        by_host: the nodes are ranks of one host that do not reach each other's memory: where verbs are
            left open they are the software device, so that bytes rest in that host's memory.

    Raises:
        ArgumentError, UnknownBackend: a name is invalid, or not installed. BackendUnavailable: a
            backend is left open, and none can run here; states what each lacks.
    """
    names = accelerator_names(accelerator or settings.accelerator)
    if names == (AUTO,):
        name = chosen_accelerator(nodes, op, ranks)
        companions = companions_of(name, nodes, ranks)
    else:
        name, *rest = names
        companions = tuple(rest)
    if nic not in (None, AUTO):
        registry.nic(nic)  # even if it is not used, a misspelt name is reported
    if nodes == 1 or registry.accelerator(name).capabilities().process_group:
        return Backends(name, None, None, companions)
    if by_host and (verbs or settings.verbs) == AUTO:
        verbs = SOFT
    return Backends(name, *nic_and_verbs(settings, nic, verbs), companions)


_Named = TypeVar("_Named", str, str | Sequence[str] | None, str | None)


def of_node(argument: str, given: _Named, node: int, nodes: int) -> _Named:
    """Return what a user names for one of the nodes: ``hopper+streams`` names unlike ones, which share
    all nodes evenly in this order. ArgumentError."""
    if not isinstance(given, str) or JOINT not in given:
        return given
    parts = given.split(JOINT)
    if nodes % len(parts):
        why = f"the world has {nodes} node{'s' if nodes > 1 else ''}"
        legal = f"for each of {len(parts)} kinds as many nodes"
        raise ArgumentError(argument, repr(given), legal, why=why)
    return parts[node * len(parts) // nodes].strip()


def accelerator_names(given: str | Sequence[str]) -> tuple[str, ...]:
    """Return the accelerators that a user names: one, or several in order, in one string with
    commas between them or in a sequence. ArgumentError: none, or one of them twice, or ``auto``
    among several."""
    parts = given.split(",") if isinstance(given, str) else given
    names = tuple(part.strip() for part in parts)
    if not names or "" in names or len({*names}) < len(names) or (AUTO in names and len(names) > 1):
        raise ArgumentError(
            "accelerator", repr(given), f"{AUTO!r}, one name, or different ones with commas between"
        )
    return names


def nic_and_verbs(
    settings: Settings, nic: str | None = None, verbs: str | None = None
) -> tuple[str, str]:
    """Return NIC backend and verbs provider between nodes. BackendUnavailable, as :func:`backends`."""
    nic, verbs = nic or settings.nic, verbs or settings.verbs
    if nic == AUTO:
        nic = chosen_nic(verbs)
    return nic, chosen_verbs(nic) if verbs == AUTO else verbs


# ---- accelerators --------------------------------------------------------------------------------


def chosen_accelerator(nodes: int = 1, op: str | None = None, ranks: int | None = None) -> str:
    """Return the accelerator that ``auto`` chooses: the most preferred that fits and is usable. The
    last that fits is taken without a query of its status: opening it checks that, and querying
    ``streams`` would import torch.

    Raises:
        BackendUnavailable: none fits; states why.
    """
    verdicts, fitting = [], []
    for name, backend in _by_preference():
        misfit = _misfit(backend, nodes, op, ranks)
        if misfit is None:
            fitting.append(name)
        else:
            verdicts.append(Verdict(name, False, misfit))
    for name in fitting[:-1]:
        if _status(name).usable:
            return name
    if fitting:
        return fitting[-1]
    raise BackendUnavailable(
        f"accelerator 'auto' finds none that it may choose{_listed(verdicts)}; name one"
    )


def accelerator_here(op: str, settings: Settings, nodes: int | None) -> str:
    """Return the accelerator that ``auto`` chooses for an op of a world on this machine's devices,
    which may be more nodes than one where they do not reach each other's memory."""
    name = chosen_accelerator(nodes or 1, op)
    backend = registry.accelerator(name)
    found, _ = usual_world(backend, settings, nodes, None)
    return name if backend.capabilities().provides(op, found) else chosen_accelerator(found, op)


def world_here(
    settings: Settings,
    accelerator: str,
    nodes: int | None,
    ranks_per_node: int | None,
    nic: str | None,
    verbs: str | None,
) -> tuple[Backends, int, int]:
    """Return the backends of a world on this machine's devices, and its numbers of nodes and of ranks
    on each, which may be left open (:func:`usual_world`). Raises as :func:`backends`."""
    backend = registry.accelerator(accelerator)
    by_host = nodes is None and bool(real_devices(backend))
    nodes, ranks_per_node = usual_world(backend, settings, nodes, ranks_per_node)
    found = backends(
        settings, nodes, accelerator=accelerator, nic=nic, verbs=verbs, by_host=by_host
    )
    return found, nodes, ranks_per_node


def named_for(op: str, given: str) -> str:
    """Return, out of the accelerators that a user names, the one that runs an op in a world of
    them: the first that provides it; else the first. ``auto`` stays ``auto``."""
    names = accelerator_names(given)
    if len(names) == 1:
        return names[0]
    leader = READS_OF.get(op, op)
    provide = (name for name in names if leader in registry.accelerator(name).capabilities().ops)
    return next(provide, names[0])


def companions_of(name: str, nodes: int, ranks: int | None = None) -> tuple[str, ...]:
    """Return the accelerators that ``auto`` adds to the chosen one: each has ops that none before
    it has. The last that fits is taken without a query, as by :func:`chosen_accelerator`."""
    ordered = [
        other for other, backend in _by_preference() if _misfit(backend, nodes, None, ranks) is None
    ]
    behind = ordered[ordered.index(name) + 1 :] if name in ordered else []
    own = registry.accelerator(name)
    known = {*own.capabilities().ops}
    found = []
    for other in behind:
        backend = registry.accelerator(other)
        more = {*backend.capabilities().ops} - known
        usable = other == ordered[-1] or _status(other).usable
        if more and usable and backend.device == own.device:
            found.append(other)
            known |= more
    return tuple(found)


def accelerator_for(
    device: Accelerator, nodes: int, op: str, ranks: int
) -> tuple[str, tuple[Verdict, ...]]:
    """Return the choice of ``auto`` on machines with such a device, and those that it would pass
    over. BackendUnavailable."""
    verdicts: list[Verdict] = []
    for name, backend in _by_preference():
        misfit = _misfit(backend, nodes, op, ranks, device)
        if misfit is None:
            return name, tuple(verdicts)
        verdicts.append(Verdict(name, False, misfit))
    raise BackendUnavailable(
        f"no backend that `auto` may choose runs {op!r} on {described(device)}{_listed(verdicts)}; "
        "name one with --accelerator to see what it would do"
    )


def emulating(kind: KindName, wanted: str) -> str:
    """Return the accelerator backend that emulates devices of a kind: ``wanted`` itself, or for
    ``auto`` the most preferred one. BackendUnavailable: it does not; names those that do."""
    if wanted != AUTO and _emulates(wanted, kind):
        return wanted
    fitting = [name for name, _ in _by_preference() if _emulates(name, kind)]
    if wanted == AUTO and fitting:
        return fitting[0]
    raise BackendUnavailable(
        f"accelerator {wanted!r} emulates no {kind} devices here; "
        f"{' and '.join(fitting) or 'no installed backend'} does"
    )


def _emulates(name: str, kind: KindName) -> bool:
    """Return whether a backend emulates devices of that kind; False for one that is broken."""
    try:
        devices = registry.accelerator(name).probe()
    except Exception:
        return False
    return any(one.emulated and one.kind == kind for one in devices)


def accelerator_verdicts() -> list[Verdict]:
    """Return the verdict of ``auto`` on each installed backend, for a world of one node: it takes
    the first that is usable."""
    verdicts = []
    for name, backend in _by_preference():
        misfit = _misfit(backend, 1, None, None)
        status = Status(False, misfit) if misfit is not None else _status(name)
        verdicts.append(Verdict(name, status.usable, _reason(status)))
    return verdicts


def _misfit(
    backend: AcceleratorBackend | Exception,
    nodes: int,
    op: str | None,
    ranks: int | None,
    device: Accelerator | None = None,
) -> str | None:
    """Return why ``auto`` never takes a backend for such a world; None: it may. ``device``: a
    device of a machine elsewhere, else this one's."""
    if isinstance(backend, Exception):
        return one_line(backend)
    if backend.preference <= 0:
        return BY_NAME
    try:
        claims = backend.capabilities_on(device) if device else backend.capabilities()
    except Exception as error:  # a backend that breaks must not keep others from being chosen
        return one_line(error)
    misfit = claims.misfit(device) if device is not None else None
    if misfit is None and op is not None and op not in claims.ops:
        misfit = f"does not provide {op!r}"
    if misfit is None and op is not None and not claims.provides(op, nodes):
        misfit = f"runs {op!r} on one node, not on {nodes}"
    if misfit is None and nodes > 1 and not claims.between_nodes:
        misfit = f"has no path between {nodes} nodes"
    if misfit is None and ranks is not None:
        misfit = claims.too_many(ranks)
    return misfit


def _status(name: str) -> Status:
    try:
        return registry.accelerator(name).status()
    except Exception as error:  # it must not raise; one that does cannot be used
        return Status(False, one_line(error))


def _by_preference() -> list[tuple[str, AcceleratorBackend | Exception]]:
    found: list[tuple[int, str, AcceleratorBackend | Exception]] = []
    for name in registry.names(registry.ACCELERATORS):
        try:
            backend = registry.accelerator(name)
            found.append((-backend.preference, name, backend))
        except Exception as error:  # noqa: PERF203 - one that does not import must not hide others
            found.append((0, name, error))
    return [(name, backend) for _, name, backend in sorted(found, key=lambda each: each[:2])]


def provider(
    backends: Backends,
    op: str,
    nodes: int = 1,
    takes: Callable[[AcceleratorCapabilities], bool] = lambda claims: True,
) -> str:
    """Return the first of a world's accelerators that provides an op. For ops that read what
    another op's call left, it is the accelerator of that call, or one that reads its words.
    Unsupported: none does, or that one does not.

    Args:
        nodes: number of nodes of the world.
        takes: returns whether an accelerator with the op takes the call; if none does, the first
            that has the op refuses the call.
    """
    leader = READS_OF.get(op, op)
    names = (backends.accelerator, *backends.companions)
    claims = {name: registry.accelerator(name).capabilities() for name in names}
    have = {name: each for name, each in claims.items() if leader in each.ops}
    fit = (name for name, each in have.items() if each.provides(leader, nodes) and takes(each))
    found = next(fit, next(iter(have), None))
    if found is None:
        require_op(names, claims[backends.accelerator], op)
        return backends.accelerator
    if op not in claims[found].ops and claims[found].routing_of_ids:
        readers = (
            name
            for name, each in claims.items()
            if each.routing_of_ids and each.provides(op, nodes)
        )
        found = next(readers, found)
    require_op(found, claims[found], op)
    return found


def require_op(
    accelerators: str | Sequence[str], capabilities: AcceleratorCapabilities, op: str
) -> None:
    """Raise Unsupported if an accelerator lacks the op; it names those that have it and can run
    here.

    Args:
        accelerators: its name; or those of several, of which the others lack the op too.
    """
    if op in capabilities.ops:
        return
    named = (accelerators,) if isinstance(accelerators, str) else tuple(accelerators)
    others = [name for name, _ in _by_preference() if _provides(name, op)]
    message = (
        f"accelerator {named[0]!r} does not provide {op!r}; it provides: "
        f"{', '.join(capabilities.ops) or 'nothing'}"
    )
    if len(named) > 1:
        message += f"; nor {' or '.join(map(repr, named[1:]))}"
    if not others:
        raise Unsupported(f"{message}; nor does any other that can run here")
    verb = "does" if len(others) == 1 else "do"
    raise Unsupported(
        f"{message}; {' and '.join(others)} {verb}: accelerator={others[0]!r}, "
        f"--accelerator {others[0]} or MKERNEL_ACCELERATOR={others[0]}; or beside it, "
        f"accelerator={','.join((*named, others[0]))!r}"
    )


def _provides(name: str, op: str) -> bool:
    """Return whether a backend has the op and can run here; a broken one has nothing."""
    try:
        backend = registry.accelerator(name)
        return op in backend.capabilities().ops and backend.status().usable
    except Exception:
        return False


def real_devices(backend: AcceleratorBackend) -> tuple[Accelerator, ...]:
    """Return the devices that a backend finds here, without those that it emulates, for example on
    a CPU."""
    return tuple(device for device in backend.probe() if not device.emulated)


def usual_world(
    backend: AcceleratorBackend, settings: Settings, nodes: int | None, ranks_per_node: int | None
) -> tuple[int, int]:
    """Return the numbers of nodes and of ranks on each, if they are left open: all ranks that this
    machine's devices take, on one node if the devices reach each other's memory; for emulated devices
    two nodes of two ranks."""
    room = len(real_devices(backend)) * settings.ranks_per_device
    if nodes is None and ranks_per_node is None and room > 1:
        ranks_per_node = machine.ranks_together(backend, room, settings) or room
        nodes = room // ranks_per_node
    if nodes is None:
        nodes = 1 if room else 2
    if ranks_per_node is None:
        ranks_per_node = max(1, room // max(1, nodes)) if room else 2
    return nodes, ranks_per_node


# ---- NICs ----------------------------------------------------------------------------------------


def nic_use(nic: str | None, settings: Settings) -> NicUse:
    """Return the use of a NIC backend in plans of a world. UnknownBackend, BackendUnavailable."""
    return ANY_NIC if nic is None else registry.nic(nic).use(settings.nic_settings)


def chosen_nic(verbs: str = AUTO) -> str:
    """Return the NIC backend that ``auto`` chooses: the one that drives this machine's RDMA ports,
    or most of them; if there are none, the first that is preferred. BackendUnavailable."""
    nics = _working_nics()
    if verbs != SOFT:
        provider = SYSTEM if verbs == AUTO else verbs
        ports = {nic.id: nic for backend in nics.values() for nic in _ports(backend, provider)}
        found = nic_of(tuple(ports.values()))
        if found is not None:
            return found
    why = []
    for name, backend in nics.items():
        if "soft" in backend.kinds and verbs != AUTO:
            return name
        status = _nic_status(backend)
        if "soft" in backend.kinds and status.usable:
            return name
        why.append(f"{name} on {SOFT}: {status.detail}; {status.remedy}")
    raise BackendUnavailable(
        "nic 'auto' finds no RDMA port that an installed NIC backend drives, and no software device "
        f"({'. '.join(why) or 'no NIC backend is installed'}); name one, or see `mkernel doctor`"
    )


def nic_of(ports: Sequence[Nic]) -> str | None:
    """Return the installed NIC backend that drives the rails among these ports; None: there is
    none."""
    return most_served(ports, {name: each.kinds for name, each in _working_nics().items()})


def _working_nics() -> dict[str, NicBackend]:
    """Return the installed NIC backends, without those that fail to load: one broken backend must
    not keep others from being chosen."""
    found = {}
    for name in registry.names(registry.NICS):
        with suppress(Exception):
            found[name] = registry.nic(name)
    return found


def _ports(backend: NicBackend, verbs: str) -> tuple[Nic, ...]:
    if verbs not in backend.providers and "/" not in verbs:
        return ()
    try:
        return tuple(nic for nic in backend.probe(verbs) if nic.active and not nic.emulated)
    except Exception:  # such a backend has no port that could be chosen
        return ()


def _nic_status(backend: NicBackend) -> Status:
    """Return the status of a backend's software device."""
    if SOFT not in backend.providers:
        return Status(False, "no such provider")
    try:
        return backend.status(SOFT)
    except Exception as error:
        return Status(False, one_line(error))


def chosen_verbs(nic: str) -> str:
    """Return the verbs provider that ``auto`` chooses: the machine's own devices if the NIC backend
    can use one, else the software device. BackendUnavailable."""
    backend = registry.nic(nic)
    ordered = [name for name in (SYSTEM, SOFT) if name in backend.providers]
    ordered += [name for name in backend.providers if name not in ordered]
    verdicts = []
    for name in ordered:
        status = backend.status(name)
        if status.usable:
            return name
        verdicts.append(Verdict(name, False, _reason(status)))
    raise BackendUnavailable(
        f"verbs 'auto' finds no provider for nic {nic!r}{_listed(verdicts)}; see `mkernel doctor`"
    )


def _listed(verdicts: Iterable[Verdict]) -> str:
    text = "; ".join(f"{verdict.name}: {verdict.detail}" for verdict in verdicts)
    return f" ({text})" if text else " (none is installed)"


def _reason(status: Status) -> str:
    return (
        f"{status.detail}; {status.remedy}"
        if status.remedy and not status.usable
        else status.detail
    )
