"""The campaign as a command: ``python -m chaos [--seconds N] [--seed N]``; see ``make chaos``."""

from __future__ import annotations

import argparse
import signal
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from chaos.campaign import campaign
from chaos.faults import KINDS
from chaos.pinned import pinned


def main() -> int:
    """Play turns; 1 where anything was wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--turns", type=int, default=1 << 40, help="at most so many")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0, help="number of the first turn")
    parser.add_argument("--kind", choices=sorted(KINDS), help="of every turn's fault")
    parser.add_argument("--keep-going", action="store_true", help="also after a turn that is wrong")
    parser.add_argument("-v", "--verbose", action="store_true", help="each turn in full")
    parser.add_argument("--pinned", action="store_true", help="those of pinned.json first")
    options = parser.parse_args()
    for ending in (signal.SIGINT, signal.SIGTERM):  # the first is ignored behind a shell's `&`
        signal.signal(ending, signal.default_int_handler)  # ends its processes
    before = [each.turn() for each in pinned()] if options.pinned else []
    start = time.monotonic()
    counts: Counter[str] = Counter()
    wrong = 0
    with tempfile.TemporaryDirectory(prefix="chaos-") as folder:
        for played, result in enumerate(
            campaign(Path(folder), options.seed, options.first, options.kind, before), 1
        ):
            turn = result.turn
            print(
                f"{time.monotonic() - start:7.1f} s  {turn.in_full() if options.verbose else turn}: "
                f"{result.outcome.summary()}",
                flush=True,
            )
            counts[f"{turn.fault.kind}: {result.outcome.summary()}"] += 1
            if result.wrong:
                wrong += 1
                print(turn.in_full(), flush=True)
                for each in result.wrong:
                    print(f"  WRONG {each}", flush=True)
                if not options.keep_going:
                    break
            if played >= options.turns or time.monotonic() - start > options.seconds:
                break
    for name, count in sorted(counts.items()):
        print(f"{count:6} {name}")
    print(f"{sum(counts.values())} turns in {time.monotonic() - start:.0f} s, {wrong} wrong")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
