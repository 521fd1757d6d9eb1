"""What is fuzzed: functions of bytes that come from outside. What is sound is taken for what it is,
all else is refused by name; whatever else they raise is a defect."""

from __future__ import annotations

import contextlib
import json
import tempfile
from collections.abc import Callable
from pathlib import Path

from torch.distributed import HashStore

from mkernel.backends.nics.session import Address, Key, _parse
from mkernel.bootstrap import Bootstrap, Untrusted
from mkernel.errors import ArgumentError, InputFileError, WorldError
from mkernel.topology import discover
from mkernel.topology.model import Topology
from mkernel.watch import Notice, Peer, Watchdog

_STORE = HashStore()
_BOOTSTRAP = Bootstrap(_STORE)  # without a secret, so that a stranger can sign too
_HERE = {0: Peer(0, "here", 1), 1: Peer(1, "elsewhere", 1)}
_WATCHDOG = Watchdog(
    _BOOTSTRAP, 0, _HERE, 60.0, dict, lambda: None, lambda notice: None
)  # is asked here, and never started
_WATCHDOG._last = {1: (0, 0.0)}
_FOLDER = tempfile.TemporaryDirectory()
_FILE = Path(_FOLDER.name) / "topology"


def bootstrap(data: bytes) -> None:
    """A signed message, read as each of those that ranks write."""
    text = data.decode("ascii", errors="replace")
    _STORE.set("heartbeat/1", _BOOTSTRAP._signature("heartbeat/1", text).encode() + data)
    try:
        value = _BOOTSTRAP.peek("heartbeat/1")
    except Untrusted:
        return
    with contextlib.suppress(Untrusted):
        assert isinstance(Notice.from_json(value).error(), WorldError)
    with contextlib.suppress(Untrusted):
        peer = Peer.from_hello(1, value)
        assert (peer.host, peer.pid) == (value["host"], value["pid"])
    with contextlib.suppress(Untrusted):
        _WATCHDOG._left.clear()
        assert _WATCHDOG._has_left(1) == (value is not None and value["state"] == "left")
    for model in (Address, Key):
        with contextlib.suppress(ArgumentError):
            parsed = _parse(model, "text", json.dumps(value))
            assert model.model_validate_json(parsed.model_dump_json()) == parsed


def topology(data: bytes) -> None:
    """A file of any format that a topology is read from."""
    _FILE.write_bytes(data)
    try:
        found = discover.read(_FILE).topology
    except InputFileError:
        return
    assert Topology.model_validate_json(found.model_dump_json()) == found


TARGETS: dict[str, Callable[[bytes], None]] = {"bootstrap": bootstrap, "topology": topology}
