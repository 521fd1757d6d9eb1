"""An op's *case*: fixed sizes and dtypes, fresh inputs by iteration, the call, the float64 truth.

``mkernel run``, the benchmarks and the conformance kit all judge an op through its case, so there is
one oracle an op. ``case_of(op)`` gives the class.
"""

from mkernel.cases.base import Case, Outcome
from mkernel.cases.comparison import Comparison, compare
from mkernel.cases.registry import case_of

__all__ = ["Case", "Comparison", "Outcome", "case_of", "compare"]
