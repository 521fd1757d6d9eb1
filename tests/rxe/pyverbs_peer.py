#!/usr/bin/env python3
"""The other end of ``cx7``: a program on pyverbs that follows "On the wire" of ``docs/nics.md``.

    python pyverbs_peer.py HOST PORT

It shares no code with mkernel, so that what the page leaves out does not work. It connects to HOST,
which orders runs. In a run both ends put at once (``peer_traffic.py``), and this one tells what it
found wrong. A run can have a fault of ours, which the other end must notice. Nothing waits for ever.
"""

from __future__ import annotations

import json
import mmap
import random
import select
import socket
import struct
import sys
import time
from ctypes import addressof, c_char
from pathlib import Path
from typing import Any

import pyverbs.enums as e
from peer_traffic import INBOX, NBYTES, Put, add_up, batch_of
from pyverbs.addr import GID, AHAttr, GlobalRoute
from pyverbs.cq import CQ
from pyverbs.device import Context
from pyverbs.mr import MR
from pyverbs.pd import PD
from pyverbs.qp import QP, QPAttr, QPCap, QPInitAttr
from pyverbs.wr import SGE, RecvWR, SendWR

DEVICE, PORT = "rxe0", 1
ME, OTHER = 1, 0
RUN_S = 240.0
"""Of one run, and of silence between two."""
RECEIVES = 64
SENDS = 64
SIGNALED_EVERY = 16
WRITE = e.IBV_ACCESS_LOCAL_WRITE | e.IBV_ACCESS_REMOTE_WRITE


class Wrong(Exception):
    """What the other end did against the page."""


class Line:
    """JSON texts, one a line, over the connection that orders the runs."""

    def __init__(self, host: str, port: int) -> None:
        deadline = time.monotonic() + RUN_S
        while True:
            try:
                self.socket = socket.create_connection((host, port), timeout=1)
                break
            except OSError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.1)
        self.socket.settimeout(RUN_S)
        self._file = self.socket.makefile("rw")

    def say(self, **message: object) -> None:
        self._file.write(json.dumps(message) + "\n")
        self._file.flush()

    def hear(self) -> dict[str, Any]:
        line = self._file.readline()
        if not line:
            raise ConnectionError("the other end is gone")
        return dict(json.loads(line))


class Region:
    """Registered memory."""

    def __init__(self, pd: PD, nbytes: int) -> None:
        self.bytes = mmap.mmap(-1, nbytes)
        self.address = addressof(c_char.from_buffer(self.bytes))
        self.mr = MR(pd, nbytes, WRITE, address=self.address)

    def word(self, offset: int) -> int:
        return int(struct.unpack_from("<Q", self.bytes, offset)[0])


class Lane:
    """A queue pair, with its two words: the other's count of receives, and our own."""

    def __init__(self, context: Context, pd: PD, gid: tuple[int, str]) -> None:
        self.sends, self.arrivals = CQ(context, SENDS + 1), CQ(context, RECEIVES + 1)
        cap = QPCap(max_send_wr=SENDS, max_recv_wr=RECEIVES, max_send_sge=1, max_recv_sge=1)
        init = QPInitAttr(qp_type=e.IBV_QPT_RC, scq=self.sends, rcq=self.arrivals, cap=cap)
        self.attributes = QPAttr(port_num=PORT)
        self.attributes.qp_access_flags = WRITE
        self.qp = QP(pd, init, self.attributes)
        self.words = Region(pd, mmap.PAGESIZE)
        self.gid_index, self.gid = gid
        self.psn = random.getrandbits(24)
        self.mtu = 128 << context.query_port(PORT).active_mtu
        self.posted = self.completed = self.told = self.taken = self.taken_told = 0
        self.share: list[int] = []
        self.shares = 0
        # pyverbs makes no request without memory; nothing is ever received into this.
        nowhere = SGE(self.words.address + 16, 0, self.words.mr.lkey)
        self.nothing, self.receive = nowhere, RecvWR(num_sge=1, sg=[nowhere])
        for _ in range(RECEIVES):
            self.qp.post_recv(self.receive)

    def end(self) -> dict[str, object]:
        """As the page's table has it."""
        return {
            "qp_num": self.qp.qp_num,
            "psn": self.psn,
            "lid": 0,
            "mtu": self.mtu,
            "gid": self.gid,
            "ethernet": True,
            "rail": 0,
            "receives": RECEIVES,
            "credit_address": self.words.address,
            "credit_rkey": self.words.mr.rkey,
        }

    def connect(self, end: dict[str, Any]) -> None:
        self.remote = end
        gid = ":".join(end["gid"][i : i + 4] for i in range(0, 32, 4))
        route = GlobalRoute(dgid=GID(gid), sgid_index=self.gid_index, hop_limit=64)
        attr = self.attributes
        attr.ah_attr = AHAttr(is_global=1, port_num=PORT, gr=route)
        attr.path_mtu = min(self.mtu, end["mtu"]).bit_length() - 8
        attr.dest_qp_num, attr.rq_psn = end["qp_num"], end["psn"]
        attr.max_dest_rd_atomic, attr.min_rnr_timer = 1, 24
        self.qp.to_rtr(attr)
        attr.sq_psn, attr.max_rd_atomic = self.psn, 1
        attr.timeout, attr.retry_cnt, attr.rnr_retry = 16, 6, 6
        self.qp.to_rts(attr)

    def room(self, immediate: bool) -> bool:
        """In our own queue, and of receives at the other end."""
        if self.posted - self.completed >= SENDS:
            return False
        return not immediate or self.told < self.remote["receives"] + self.words.word(0)

    def write(self, source: SGE | None, to: tuple[int, int], immediate: int | None) -> None:
        self.posted += 1
        told = immediate is not None
        opcode = e.IBV_WR_RDMA_WRITE_WITH_IMM if told else e.IBV_WR_RDMA_WRITE
        signaled = e.IBV_SEND_SIGNALED if self.posted % SIGNALED_EVERY == 0 else 0
        request = SendWR(
            wr_id=self.posted,
            opcode=opcode,
            num_sge=1,
            sg=[source or self.nothing],
            imm_data=socket.htonl(immediate or 0),
            send_flags=signaled,
        )
        request.set_wr_rdma(to[1], to[0])
        self.qp.post_send(request)
        self.told += told


class End:
    """This end of a run: its lanes, its memory, what has come."""

    def __init__(self, context: Context, line: Line, order: dict[str, Any]) -> None:
        self.line, self.fault = line, order["fault"]
        self.deadline = time.monotonic() + RUN_S
        theirs = json.loads(order["address"])
        pd = PD(context)
        self.region = Region(pd, NBYTES)
        self.lanes = [Lane(context, pd, own_gid()) for _ in theirs["lanes"]]
        plan = theirs["plan"] | {"rails": [[b, a] for a, b in theirs["plan"]["rails"]]}
        self.stripe = plan["stripe_bytes"]
        mine = {"nic": theirs["nic"], "rank": ME, "peer": OTHER, "plan": plan}
        address = json.dumps(mine | {"lanes": [lane.end() for lane in self.lanes]})
        for lane, end in zip(self.lanes, theirs["lanes"], strict=True):
            lane.connect(end)
        key = {"rank": ME, "region": 0, "address": self.region.address, "nbytes": NBYTES}
        line.say(address=address, key=json.dumps(key | {"rkeys": [self.region.mr.rkey]}))
        self.key = json.loads(line.hear()["key"])  # and it is connected
        self.turn = self.groups = self.arrived = 0
        self.counts: dict[int, int] = {}
        self.open: dict[int, list[list[int]]] = {}  # shares of groups that are not all here

    # ---- what we put ------------------------------------------------------------------------------

    def put(self, put: Put) -> None:
        self.region.bytes[put.offset : put.offset + len(put.payload)] = put.payload
        nbytes = len(put.payload)
        spread = self.stripe is not None and nbytes >= self.stripe
        if not spread and put.value <= 255:
            lane = self.lanes[self.turn % len(self.lanes)]
            self.turn += 1
            shift = 22 if self.fault == "layout" else 23
            self.send(lane, put, 0, nbytes, put.value << shift | put.signal)
            return
        group = 1 << 31 | self.groups % 64 << 23
        if self.groups >= 64:  # the number's last use is complete: it is 64 requests ago, or more
            for lane in self.lanes:
                self.until(lambda lane=lane: lane.posted - lane.completed < SIGNALED_EVERY)
        self.groups += 1
        begins = [nbytes // len(self.lanes) * i // 64 * 64 for i in range(len(self.lanes))]
        for i, (begin, end) in enumerate(zip(begins, [*begins[1:], nbytes], strict=True)):
            messages = 3 if i == 0 else 1
            if self.fault == "group":
                messages -= i == 0
            self.send(self.lanes[i], put, begin, end, group | messages)
        self.send(self.lanes[0], put, 0, 0, group | 1 << 29 | put.signal)
        self.send(self.lanes[0], put, 0, 0, group | 2 << 29 | put.value)

    def send(self, lane: Lane, put: Put, begin: int, end: int, immediate: int) -> None:
        self.until(lambda: lane.room(True))
        source = None
        if end > begin:
            source = SGE(self.region.address + put.offset + begin, end - begin, self.region.mr.lkey)
        at = self.key["address"] + INBOX + put.offset + begin
        lane.write(source, (at, self.key["rkeys"][lane.remote["rail"]]), immediate)

    # ---- what comes -------------------------------------------------------------------------------

    def until(self, done: Any) -> None:
        """Work until then. TimeoutError, ConnectionError."""
        while not done():
            if self.progress():
                continue
            if select.select([self.line.socket], [], [], 0.0005)[0]:
                raise ConnectionError("the other end broke the run off")
            if time.monotonic() > self.deadline:
                raise TimeoutError(f"after {self.arrived} puts; run of {RUN_S:g} s is over")

    def progress(self) -> int:
        found = 0
        for index, lane in enumerate(self.lanes):
            for queue in (lane.sends, lane.arrivals):
                number, completions = queue.poll(16)
                found += number
                for one in completions:
                    if one.status != e.IBV_WC_SUCCESS:
                        raise Wrong(f"lane {index}: completion status {one.status}")
                    if queue is lane.sends:
                        lane.completed = one.wr_id
                        continue
                    lane.qp.post_recv(lane.receive)
                    lane.taken += 1
                    self.arrive(index, lane, socket.ntohl(one.imm_data))
            if 4 * (lane.taken - lane.taken_told) >= RECEIVES and lane.room(False):
                lane.taken_told = lane.taken
                struct.pack_into("<Q", lane.words.bytes, 8, lane.taken)
                source = SGE(lane.words.address + 8, 8, lane.words.mr.lkey)
                to = lane.remote["credit_address"], lane.remote["credit_rkey"]
                lane.write(source, to, None)
        return found

    def arrive(self, index: int, lane: Lane, immediate: int) -> None:
        low = immediate & (1 << 23) - 1
        if immediate >> 31 == 0:
            self.raise_signal(low, immediate >> 23)
            return
        number = immediate >> 23 & 63
        if number != lane.shares % 64:
            raise Wrong(f"lane {index}: group {number}, expected {lane.shares % 64}")
        lane.share.append(immediate)
        parts = [one & (1 << 23) - 1 for one in lane.share if one >> 29 & 3 == 0]
        if not parts or len(lane.share) < parts[0]:
            return
        shares = self.open.setdefault(lane.shares, [])
        shares.append(lane.share)
        if len(shares) == len(self.lanes):
            del self.open[lane.shares]
            told = {one >> 29 & 3: one & (1 << 23) - 1 for share in shares for one in share}
            self.raise_signal(told[1], told[2])
        lane.share = []
        lane.shares += 1

    def raise_signal(self, signal: int, value: int) -> None:
        self.counts[signal] = self.counts.get(signal, 0) + value
        self.arrived += 1

    # ---- a run ------------------------------------------------------------------------------------

    def run(self, batches: int) -> None:
        expected: dict[int, int] = {}
        for batch in range(batches):
            ours = batch_of(ME, batch)
            if self.fault == "byte":
                changed = bytearray(ours[57].payload)
                changed[len(changed) // 2] ^= 1
                ours[57] = ours[57]._replace(payload=bytes(changed))
            for put in ours:
                self.put(put)
            theirs = batch_of(OTHER, batch)
            add_up(expected, theirs)
            half = {
                put.signal: expected[put.signal] for put in theirs
            }  # others have the next batch
            self.until(lambda half=half: all(self.counts.get(s, 0) >= half[s] for s in half))
            found = {signal: self.counts[signal] for signal in half}
            if found != half:
                raise Wrong(f"batch {batch}: signals {found}, expected {half}")
            for slot, put in enumerate(theirs):
                at = INBOX + put.offset
                if self.region.bytes[at : at + len(put.payload)] != put.payload:
                    raise Wrong(f"put {slot} of batch {batch}: its bytes are wrong")


def own_gid() -> tuple[int, str]:
    """Index and 32 digits of the RoCE v2 entry with an IPv4 address."""
    port = Path(f"/sys/class/infiniband/{DEVICE}/ports/{PORT}")
    for index in range(16):
        digits = (port / f"gids/{index}").read_text().strip().replace(":", "")
        kind = (port / f"gid_attrs/types/{index}").read_text().strip()
        if (kind, digits[:24]) == ("RoCE v2", "0" * 20 + "ffff"):
            return index, digits
    raise RuntimeError(f"{DEVICE} has no RoCE v2 GID with an IPv4 address")


def main() -> None:
    line = Line(sys.argv[1], int(sys.argv[2]))
    while (order := line.hear())["batches"]:
        found = ""
        with Context(name=DEVICE) as context:
            end = End(context, line, order)
            try:
                end.run(order["batches"])
            except (Wrong, ConnectionError) as error:
                found = str(error)
            line.say(wrong=found, arrived=end.arrived)
            line.hear()  # the other end has closed: nothing is written to this memory any more


if __name__ == "__main__":
    main()
