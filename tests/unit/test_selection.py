"""What ``auto`` stands for: accelerator, NIC and verbs, on machines of every kind."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
from devices import SIM, gpu
from typer.testing import CliRunner

from mkernel import doctor, selection
from mkernel.backends import registry
from mkernel.backends.accelerators.streams import StreamsAccelerator
from mkernel.backends.contracts.status import Status
from mkernel.cli import bench
from mkernel.cli.main import app
from mkernel.errors import BackendUnavailable, UnknownBackend, Unsupported
from mkernel.settings import Settings
from mkernel.topology.model import KindName, Nic
from mkernel.world.identity import Backends

GEMMS = ("all_gather_gemm", "gemm_reduce_scatter", "gemm_all_reduce")
EVERY = (*GEMMS, "moe_dispatch_gemm", "moe_combine", "moe_gemm_combine", "ring_attention")


class Claims:
    def __init__(self, ops: tuple[str, ...], between_nodes: bool) -> None:
        self.ops, self.between_nodes, self.process_group = ops, between_nodes, False
        self.one_node_ops: tuple[str, ...] = ()
        self.routing_of_ids = False

    def provides(self, op: str, nodes: int) -> bool:
        return op in self.ops and (nodes == 1 or op not in self.one_node_ops)


class Accelerator:
    """A backend as ``auto`` sees it."""

    def __init__(
        self,
        preference: int,
        usable: bool | Exception = True,
        ops: tuple[str, ...] = EVERY,
        between_nodes: bool = True,
        device: str = "cuda",
    ) -> None:
        self.device = device
        self.preference, self._usable = preference, usable
        self._claims = Claims(ops, between_nodes)

    def status(self) -> Status:
        if isinstance(self._usable, Exception):
            raise self._usable
        return Status(self._usable, "here" if self._usable else "no device", "buy one")

    def capabilities(self) -> Claims:
        return self._claims


class Ports:
    """A NIC backend on a machine with these devices."""

    providers: ClassVar[tuple[str, ...]] = ("soft", "system")

    def __init__(self, kinds: tuple[KindName, ...], ports: tuple[Nic, ...] = ()) -> None:
        self.kinds = (*kinds, "soft")
        self._ports = tuple(nic for nic in ports if nic.kind in kinds)

    def status(self, verbs: str) -> Status:
        usable = verbs == "soft" or any(nic.active for nic in self._ports)
        return Status(usable, "here" if usable else "no RDMA device")

    def probe(self, verbs: str) -> tuple[Nic, ...]:
        if verbs == "soft":
            return (Nic(id="soft0", kind="soft", name="soft0", emulated=True),)
        return self._ports


def ports(
    kind: KindName, count: int, gbps: float | None = 400, active: bool = True
) -> tuple[Nic, ...]:
    return tuple(
        Nic(id=f"{kind}{i}", kind=kind, name=f"{kind}{i}", speed_gbps=gbps, active=active)
        for i in range(count)
    )


Install = Callable[..., None]


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Install:
    """Replaces the installed backends."""

    def put(accelerators: dict[str, Any] | None = None, devices: tuple[Nic, ...] = ()) -> None:
        found = {
            registry.ACCELERATORS: accelerators or {"streams": Accelerator(10)},
            registry.NICS: {
                "cx7": Ports(("cx", "infiniband"), devices),
                "efa": Ports(("efa",), devices),
            },
        }

        def load(group: str, name: str) -> Any:
            if isinstance(found[group][name], Exception):
                raise found[group][name]
            return found[group][name]

        monkeypatch.setattr(registry, "names", lambda group: tuple(sorted(found[group])))
        monkeypatch.setattr(registry, "accelerator", lambda n: load(registry.ACCELERATORS, n))
        monkeypatch.setattr(registry, "nic", lambda name: load(registry.NICS, name))

    return put


def hopper(usable: bool = True) -> Accelerator:
    return Accelerator(20, usable, GEMMS, between_nodes=False)


@pytest.mark.parametrize(
    ("gpus", "nodes", "op", "wanted"),
    [
        (True, 1, None, "hopper"),
        (True, 1, "gemm_all_reduce", "hopper"),
        (True, 1, "ring_attention", "streams"),
        (True, 2, None, "streams"),
        (False, 1, None, "streams"),
        (False, 2, "ring_attention", "streams"),
    ],
)
def test_the_most_preferred_that_can_do_it(
    gpus: bool, nodes: int, op: str | None, wanted: str, install: Install
) -> None:
    install({"ascend": Accelerator(0), "hopper": hopper(gpus), "streams": Accelerator(10)})
    assert selection.chosen_accelerator(nodes, op) == wanted
    assert selection.backends(Settings(), nodes, op=op).accelerator == wanted


def test_a_simulator_and_a_strangers_backend_by_name_only(install: Install) -> None:
    install({"ascend": Accelerator(0), "tiny": Accelerator(0)})
    with pytest.raises(
        BackendUnavailable, match=r"ascend: is chosen by name only; tiny: .*name one"
    ):
        selection.chosen_accelerator()
    assert selection.backends(Settings(), 1, accelerator="ascend").accelerator == "ascend"
    assert selection.backends(Settings(accelerator="tiny"), 1).accelerator == "tiny"


def test_a_strangers_backend_may_ask_to_be_chosen(install: Install) -> None:
    install({"tiny": Accelerator(30), "hopper": hopper(), "streams": Accelerator(10)})
    assert selection.chosen_accelerator() == "tiny"


def test_one_that_breaks_is_passed_over(install: Install) -> None:
    install(
        {
            "gone": BackendUnavailable("gone does not import"),
            "odd": Accelerator(30, ValueError("odd")),
            "streams": Accelerator(10),
        }
    )
    assert selection.chosen_accelerator() == "streams"
    verdicts = {verdict.name: verdict for verdict in selection.accelerator_verdicts()}
    assert verdicts["gone"].detail == "gone does not import"
    assert verdicts["odd"] == ("odd", False, "odd")


def test_the_shipped_backends_preferences() -> None:
    found = {
        name: registry.accelerator(name).preference for name in ("ascend", "hopper", "streams")
    }
    assert found["hopper"] > found["streams"] > found["ascend"] == 0
    assert Settings().accelerator == Settings().nic == Settings().verbs == "auto"


@pytest.mark.parametrize(
    ("installed", "nodes", "wanted"),
    [
        ({"hopper": (20, GEMMS), "streams": (10, EVERY)}, 1, ("hopper", ("streams",))),
        ({"hopper": (20, EVERY), "streams": (10, EVERY)}, 1, ("hopper", ())),
        ({"streams": (10, EVERY)}, 1, ("streams", ())),
        ({"other": (5, EVERY), "streams": (10, GEMMS)}, 1, ("streams", ("other",))),
        ({"hopper": (20, GEMMS), "ascend": (0, EVERY)}, 1, ("hopper", ())),
        (
            {"hopper": (20, GEMMS), "moe": (15, EVERY[3:6]), "streams": (10, EVERY)},
            1,
            ("hopper", ("moe", "streams")),
        ),
    ],
)
def test_auto_puts_beside_the_preferred_one_those_that_have_more_ops(
    installed: dict[str, tuple[int, tuple[str, ...]]],
    nodes: int,
    wanted: tuple[str, tuple[str, ...]],
    install: Install,
) -> None:
    install({name: Accelerator(rank, ops=ops) for name, (rank, ops) in installed.items()})
    found = selection.backends(Settings(), nodes)
    assert (found.accelerator, found.companions) == wanted
    assert found.accelerators == (wanted[0], *wanted[1])


def test_doctor_names_companions(install: Install) -> None:
    install({"hopper": Accelerator(20, ops=GEMMS), "streams": Accelerator(10)})
    row, *_ = doctor.auto_rows()
    assert row.detail == "hopper (here), and for ops that it lacks streams"


def test_no_companion_is_on_another_device_or_cannot_run_there(install: Install) -> None:
    few = Accelerator(20, ops=GEMMS, between_nodes=False)
    install({"hopper": few, "streams": Accelerator(10, device="cpu")})
    assert selection.backends(Settings(), 1).companions == ()
    install({"hopper": few, "moe": Accelerator(15, False), "streams": Accelerator(10)})
    assert selection.backends(Settings(), 1).companions == ("streams",)


def test_an_op_goes_to_the_first_that_provides_it(install: Install) -> None:
    install(
        {
            "hopper": Accelerator(20, ops=GEMMS),
            "moe": Accelerator(15, ops=EVERY[3:6]),
            "streams": Accelerator(10, ops=(*EVERY, "moe_dispatch_backward")),
        }
    )
    world = selection.backends(Settings(), 1)
    assert [selection.provider(world, op) for op in EVERY] == [
        *["hopper"] * 3, *["moe"] * 3, "streams",
    ]  # fmt: skip
    # It would read what the dispatch on another accelerator left in words of its own.
    with pytest.raises(Unsupported, match=r"'moe' does not provide 'moe_dispatch_backward'"):
        selection.provider(world, "moe_dispatch_backward")
    for name in ("moe", "streams"):  # they read each other's words
        registry.accelerator(name).capabilities().routing_of_ids = True
    assert selection.provider(world, "moe_dispatch_backward") == "streams"
    assert selection.provider(world, "moe_combine") == "moe"
    backends = {"hopper": Accelerator(20), "streams": Accelerator(10)}
    backends["hopper"].capabilities().one_node_ops = ("ring_attention",)
    install(backends)
    both = selection.backends(Settings(), 2, accelerator=("hopper", "streams"))
    assert [selection.provider(both, "ring_attention", n) for n in (1, 2)] == ["hopper", "streams"]
    assert selection.chosen_accelerator(2, "ring_attention") == "streams"
    wide = backends["streams"].capabilities()
    assert selection.provider(both, "ring_attention", 1, lambda claims: claims is wide) == "streams"
    assert selection.provider(both, "ring_attention", 1, lambda claims: False) == "hopper"


def test_what_is_named_is_alone(install: Install) -> None:
    install({"hopper": Accelerator(20, ops=GEMMS), "streams": Accelerator(10)})
    alone = selection.backends(Settings(), 1, accelerator="hopper")
    assert alone.companions == (), "what is named is alone"
    with pytest.raises(Unsupported, match=r"accelerator='hopper,streams'"):
        selection.provider(alone, "ring_attention")
    named = selection.backends(Settings(), 1, accelerator=("hopper", "streams"))
    assert named == selection.backends(Settings(accelerator="hopper, streams"), 1)
    assert named.companions == ("streams",)


def test_a_missing_op_names_who_has_it(install: Install) -> None:
    claims: Any = Claims(GEMMS, between_nodes=False)
    install({"hopper": hopper(), "streams": Accelerator(10), "off": Accelerator(10, False)})
    with pytest.raises(
        Unsupported, match=r"'hopper' does not provide 'ring_attention'.*; streams does:"
    ):
        selection.require_op("hopper", claims, "ring_attention")
    with pytest.raises(Unsupported, match=r"accelerator='streams'.* MKERNEL_ACCELERATOR=streams"):
        selection.require_op("hopper", claims, "ring_attention")
    selection.require_op("hopper", claims, "gemm_all_reduce")
    install({"hopper": hopper()})
    with pytest.raises(Unsupported, match="nor does any other"):
        selection.require_op("hopper", claims, "ring_attention")


@pytest.mark.parametrize(
    ("devices", "wanted"),
    [
        ((), ("cx7", "soft")),
        (ports("cx", 2), ("cx7", "system")),
        (ports("infiniband", 1), ("cx7", "system")),
        (ports("efa", 4), ("efa", "system")),
        (ports("cx", 2, active=False), ("cx7", "soft")),
        (ports("efa", 8) + ports("infiniband", 2, 25), ("efa", "system")),
        (ports("efa", 8, None) + ports("infiniband", 2, None), ("efa", "system")),
        (ports("efa", 2, 100) + ports("cx", 8, 400), ("cx7", "system")),
    ],
)
def test_nic_and_verbs_follow_the_rails(
    devices: tuple[Nic, ...], wanted: tuple[str, str], install: Install
) -> None:
    install(devices=devices)
    assert selection.nic_and_verbs(Settings()) == wanted
    assert selection.backends(Settings(), 1) == Backends("streams", None, None)


def test_what_is_named_is_taken(install: Install) -> None:
    install(devices=ports("efa", 4))
    assert selection.nic_and_verbs(Settings(verbs="soft")) == ("cx7", "soft")
    assert selection.nic_and_verbs(Settings(nic="efa", verbs="soft")) == ("efa", "soft")
    assert selection.nic_and_verbs(Settings(), "cx7") == ("cx7", "soft"), "it drives no EFA device"


def test_nodes_of_one_host_are_joined_in_its_memory(install: Install) -> None:
    """Where they are nodes because devices do not reach each other, unless someone says otherwise."""
    install(devices=ports("cx", 2))
    for settings, named, verbs in (
        (Settings(), None, "soft"),
        (Settings(), "system", "system"),
        (Settings(verbs="system"), None, "system"),
    ):
        found = selection.backends(settings, 2, verbs=named, by_host=True)
        assert (found.nic, found.verbs) == ("cx7", verbs)
    assert selection.backends(Settings(), 2).verbs == "system"


def test_an_op_of_one_node_goes_elsewhere_where_devices_are_nodes(
    install: Install, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = Accelerator(20)
    first.capabilities().one_node_ops = ("moe_combine",)
    install({"first": first, "streams": Accelerator(10)})
    for nodes, wanted in ((1, "first"), (4, "streams")):
        monkeypatch.setattr(selection, "usual_world", lambda *_, nodes=nodes: (nodes, 1))
        assert selection.accelerator_here("moe_combine", Settings(), None) == wanted
        assert selection.accelerator_here("gemm_all_reduce", Settings(), None) == "first"


@pytest.mark.parametrize("nodes", [1, 2])
@pytest.mark.parametrize("accelerator", ["ascend", "streams"])
def test_a_misspelt_nic_is_told_where_none_is_used(accelerator: str, nodes: int) -> None:
    with pytest.raises(UnknownBackend, match="'cx9' is not legal; expected one of: cx7, efa"):
        selection.backends(Settings(), nodes, accelerator=accelerator, nic="cx9")


def test_doctor_says_what_would_be_chosen_and_why(install: Install) -> None:
    install(
        {"ascend": Accelerator(0), "hopper": hopper(False), "streams": Accelerator(10)},
        ports("efa", 4),
    )
    accelerator, nic = doctor.auto_rows()
    assert accelerator.usable
    assert accelerator.detail == ("streams (here); not hopper: no device; buy one")
    assert (nic.usable, nic.detail) == (True, "efa on system")
    install({"ascend": Accelerator(0)})
    accelerator, nic = doctor.auto_rows()
    assert not accelerator.usable
    assert "MKERNEL_ACCELERATOR" in accelerator.remedy
    assert "one host only" in nic.detail


@pytest.mark.parametrize(
    ("devices", "given", "wanted"),
    [
        (8, (None, None), (1, 8)), (8, (2, None), (2, 4)), (8, (3, None), (3, 2)), (8, (2, 1), (2, 1)),
        (0, (None, None), (2, 2)), (0, (1, None), (1, 2)), (0, (4, 1), (4, 1)),
    ],
)  # fmt: skip
def test_a_world_has_what_its_nodes_have(
    devices: int, given: tuple[int | None, int | None], wanted: tuple[int, int]
) -> None:
    """All accelerators, shared out between nodes; emulated ones: two nodes of two."""
    found = tuple(gpu(i) for i in range(devices)) or (SIM,)
    backend = SimpleNamespace(
        probe=lambda: found, capabilities=StreamsAccelerator("cpu").capabilities
    )
    assert selection.usual_world(backend, Settings(), *given) == wanted
    ranks = bench._usual_ranks(devices, wanted[0])
    assert given[1] is not None or ranks == wanted[0] * wanted[1]


@pytest.mark.parametrize("command", ["plan", "run"])
def test_help_says_how_many_ranks_a_node_has(command: str) -> None:
    told = CliRunner().invoke(app, [command, "--help"], env={"COLUMNS": "200"}).stdout
    (line,) = (one for one in told.splitlines() if "--ranks-per-node" in one)
    assert "its accelerators" in line
    assert "2 of emulated ones" in line
