"""Whether a commit is as fast as another, from result files that were made in turns on one machine.

    OLD=FOLDER bench/measure.sh alternate          FOLDER: pip install --target FOLDER of the old commit
    python bench/two_commits.py --old FILE... --new FILE...

A row's time is that of mkernel over that of the product alone in the same run, so that the machine's
mood is in neither; of a commit's runs the median counts. Exit code 0 only if the geometric mean of new
over old is at most 1.01 and no row's is above 1.04.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from pathlib import Path

from mkernel.harness import results

MOST_IN_THE_MEAN, MOST_OF_A_ROW = 1.01, 1.04


def times(files: list[Path]) -> dict[str, float]:
    """By row: mkernel's time over the product's, the median of the files."""
    found: dict[str, list[float]] = {}
    for file in files:
        report = results.read(file)
        if report is None or not report.passed:
            raise SystemExit(
                f"{file}: no result file of `mkernel bench`, or one with wrong results"
            )
        for row in report.rows:
            ours = row.entries["mkernel"].figures
            if ours is not None and ours.to_gemm is not None:
                name = f"{row.shape.op} {row.shape.name or row.shape} {row.mode}"
                found.setdefault(name, []).append(ours.to_gemm)
    return {name: statistics.median(values) for name, values in found.items()}


def main() -> None:
    """Compare, print, judge."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    for which in ("--old", "--new"):
        parser.add_argument(which, type=Path, nargs="+", required=True, metavar="FILE")
    options = parser.parse_args()
    old, new = times(options.old), times(options.new)
    if not old or set(old) != set(new):
        raise SystemExit(
            f"rows of one commit alone: {sorted(set(old) ^ set(new)) or 'there are none'}"
        )
    ratios = sorted((new[name] / old[name], name) for name in old)
    mean = statistics.geometric_mean(ratio for ratio, _ in ratios)
    for ratio, name in (*ratios[:3], *ratios[-5:]):
        print(f"{ratio:.3f}  {name}: {old[name]:.3f} -> {new[name]:.3f}")
    worst = ratios[-1][0]
    print(f"{len(ratios)} rows, geometric mean {mean:.4f}, worst {worst:.3f}")
    sys.exit(mean > MOST_IN_THE_MEAN or worst > MOST_OF_A_ROW)


if __name__ == "__main__":
    main()
