"""Files that are made to hurt are refused by name: in little time, in little memory, for a reason."""

from __future__ import annotations

import json
import time
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import NamedTemporaryFile

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from machines import dgx, hwloc_xml, nccl_xml
from sysfs_tree import SysfsTree

from mkernel.errors import InputFileError
from mkernel.topology.discover import discover, read

MOST_SECONDS = 20.0  # of CPU time, with every allocation traced
MOST_SECONDS_UNTRACED = 2.0
MOST_BYTES = 400 << 20

LAUGHS = "".join(f'<!ENTITY l{i + 1} "{f"&l{i};" * 10}">' for i in range(12))
SYSTEM = '<system version="1"><cpu numaid="0">{}</cpu></system>'
MACHINE = '<topology version="2.0"><object type="Machine" nodeset="0x1">{}</object></topology>'

BUS, PCI = "0000:01:00.0", '<pci busid="0000:01:00.0"/>'
FUNCTION = '<object type="PCIDev" pci_busid="01:00.0" pci_type=" [0000:0000] 00"/>'
BRIDGE = '<object type="Bridge" bridge_type="1-1" pci_busid="01:00.0">{}</object>'


@contextmanager
def little_time(most_seconds: float = MOST_SECONDS_UNTRACED) -> Iterator[None]:
    """Whatever is done inside takes little CPU time, however busy the machine is."""
    began = time.process_time()
    yield
    assert time.process_time() - began < most_seconds


@contextmanager
def little() -> Iterator[None]:
    """Whatever is done inside takes little memory too."""
    tracemalloc.start()
    try:
        with little_time(MOST_SECONDS):
            yield
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < MOST_BYTES


def refused(tmp_path: Path, content: str | bytes) -> str:
    file = tmp_path / "hostile"
    file.write_bytes(content if isinstance(content, bytes) else content.encode())
    with little(), pytest.raises(InputFileError) as error:
        read(file)
    assert str(file) in str(error.value)
    return str(error.value)


@pytest.mark.parametrize(
    "declared",
    [
        f'<!ENTITY l0 "ha">{LAUGHS}',
        '<!ENTITY l12 SYSTEM "file:///etc/passwd">',
        '<!ENTITY l12 SYSTEM "http://127.0.0.1:9/x">',
        "<!ENTITY % p \"<!ENTITY l12 'x'>\">%p;",
    ],
)
def test_entities_are_refused(tmp_path: Path, declared: str) -> None:
    text = f'<?xml version="1.0"?><!DOCTYPE system [{declared}]>{SYSTEM.format("&l12;")}'
    assert "is declared; no topology needs one" in refused(tmp_path, text)


def test_a_document_type_from_elsewhere_is_never_opened(tmp_path: Path) -> None:
    """hwloc's own files name one; it must be allowed, and left alone."""
    for name in ("hwloc2.dtd", "/etc/passwd", "http://127.0.0.1:9/x.dtd"):
        file = tmp_path / "m.xml"
        file.write_text(f'<!DOCTYPE topology SYSTEM "{name}">' + hwloc_xml(dgx()))
        with little():
            found = read(file)
        assert len(found.topology.nodes[0].accelerators) == 8


@pytest.mark.parametrize("start", [b"<system>", b'{"nodes": [', b""])
def test_100_mb_are_refused_unparsed(tmp_path: Path, start: bytes) -> None:
    file = tmp_path / "hostile"
    with file.open("wb") as out:
        out.write(start)
        out.truncate(100_000_000)
    with little(), pytest.raises(InputFileError, match=r"hostile is larger than 4 MiB"):
        read(file)


@pytest.mark.parametrize(
    "text",
    [
        "<system>" + "<cpu>" * 100_000,
        SYSTEM.format("<pci>" * 100_000 + "</pci>" * 100_000),
        MACHINE.format('<object type="Bridge">' * 5_000 + "</object>" * 5_000),
    ],
)
def test_deep_nesting_is_refused(tmp_path: Path, text: str) -> None:
    assert "more than 200 elements inside each other" in refused(tmp_path, text)


def test_too_many_elements_are_refused(tmp_path: Path) -> None:
    assert "more than 50000 elements" in refused(tmp_path, SYSTEM.format("<x/>" * 1_000_000))


@pytest.mark.parametrize(
    ("code", "what"), [("0x030200", "accelerators"), ("0x020700", "NICs")], ids=["gpu", "nic"]
)
def test_more_devices_than_any_machine_has_are_refused(
    tmp_path: Path, code: str, what: str
) -> None:
    functions = "".join(f'<pci busid="{n:05x}:00:00.0" class="{code}"/>' for n in range(5_000))
    assert f"5000 {what}; expected at most" in refused(tmp_path, SYSTEM.format(functions))


def test_many_bridges_are_survived(tmp_path: Path) -> None:
    bridges = "".join(f'<pci busid="{n:05x}:00:00.0" class="0x060400"/>' for n in range(20_000))
    file = tmp_path / "m.xml"
    file.write_text(SYSTEM.format(bridges))
    with little():
        found = read(file)
    assert len(found.topology.nodes[0].bridges) == 20_000


def test_sysfs_links_in_circles_end(tmp_path: Path) -> None:
    tree = SysfsTree(tmp_path)
    function = tree.pci("pci0000:00/0000:00:01.0/0000:01:00.0", class_="0x020700\n")
    tree.rdma("mlx5_0", function)
    (function / "virtio0").symlink_to(function.parent)
    (function / "net").symlink_to(function)
    entries = tmp_path / "sys/bus/pci/devices"
    (entries / "0000:02:00.0").symlink_to("0000:03:00.0")
    (entries / "0000:03:00.0").symlink_to("0000:02:00.0")
    with little():
        node = discover(tmp_path).topology.nodes[0]
    assert [nic.id for nic in node.nics] == ["mlx5_0"]


@pytest.mark.parametrize(
    ("content", "named"),
    [
        ("<system>", "not XML"),
        ("<system><cpu></system>", "not XML"),
        ("<nonsense/>", "its root element is <nonsense>"),
        (b"<system>\xff\xfe</system>", "not XML"),
        (b"<?xml version='1.0' encoding='none-such'?><system/>", "not XML"),
        (b"\xff\xfe<\x00s\x00", "not JSON"),
        ("<", "not XML"),
        ("", "not JSON"),
        ("NPU0 NPU1\nNPU7", "not JSON"),
        ('{"nodes": [{"id": 0}]}', "nodes.0.hostname"),
        ('{"topology": 7}', "the file"),
        ("[]", "the file"),
        ("[" * 100_000, "not JSON"),
        ('{"nodes": []}', "nodes"),
        ('{"nodes": [{"id": 0, "hostname": "h", "numa": [], "gpu": 1}]}', "nodes.0.gpu"),
        ('{"schema_version": 2, "nodes": []}', "schema_version"),
        ('<system version="1"/>', "holds no <cpu>"),
        ('<topology version="2.0"/>', "holds no <object>"),
        *(
            (f'<topology {version}><object type="Machine"/></topology>', "expected 2.x or 3.x")
            for version in ("", 'version="1.11"', 'version="4.0"')
        ),
        (SYSTEM.format(PCI * 2), f"line 1: busid {BUS} occurs twice; first in line 1"),
        (SYSTEM.format('<pci busid="01:00.0">' + PCI + "</pci>"), f"busid {BUS} occurs twice"),
        (SYSTEM.format('<pci busid="nonsense"/>'), "line 1: busid 'nonsense' is no PCI address"),
        (SYSTEM.format("<pci/>"), "line 1: busid '' is no PCI address"),
        (MACHINE.format(FUNCTION * 2), f"line 1: pci_busid {BUS} occurs twice"),
        (MACHINE.format(BRIDGE.format(FUNCTION)), f"line 1: pci_busid {BUS} occurs twice"),
        (MACHINE.format(BRIDGE.replace("01:00.0", "x")), "pci_busid 'x' is no PCI address"),
    ],
)
def test_what_is_no_topology_is_named(tmp_path: Path, content: str | bytes, named: str) -> None:
    assert named in refused(tmp_path, content)


def test_json_with_too_many_devices_is_refused(tmp_path: Path) -> None:
    gpus = [{"id": f"g{i}", "kind": "cuda", "name": "g", "index": i} for i in range(2000)]
    node = {"id": 0, "hostname": "h", "numa": [], "accelerators": gpus}
    assert "2000 accelerators" in refused(tmp_path, json.dumps({"nodes": [node]}))


@settings(max_examples=200, deadline=None)  # `make fuzz` runs thousands
@given(
    st.sampled_from([nccl_xml(dgx()), hwloc_xml(dgx())]),
    st.floats(0, 1),
    st.integers(0, 200),
    st.sampled_from(["", "0", "-1", "9" * 20, '"', "<pci/>", "\x00", "&#0;"]) | st.text(max_size=8),
)
def test_a_damaged_file_is_read_or_refused_and_never_crashes(
    text: str, where: float, cut: int, instead: str
) -> None:
    start = int(where * len(text))
    damaged = text[:start] + instead + text[start + cut :]
    with NamedTemporaryFile() as file:
        file.write(damaged.encode("utf-8", errors="surrogatepass"))
        file.flush()
        found = None
        with little_time(), suppress(InputFileError):
            found = read(Path(file.name))
        assert found is None or found.topology.nodes
