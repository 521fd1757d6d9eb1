"""The switch of async tensor parallelism. Inductor, whose import takes a second, is imported only
where it is used."""

from __future__ import annotations

from types import TracebackType
from typing import Any

from mkernel.async_tensor_parallel.report import Report
from mkernel.ops.inductor import require_order


class AsyncTensorParallel:
    """Async tensor parallel while it is enabled; a context that disables it at its end.

    Attributes:
        report: the collectives rewritten so far, and those that were left. A graph that Inductor
            takes from its cache was rewritten when it was first compiled, and is not counted again.
    """

    def __init__(self) -> None:
        from torch._inductor import config

        from mkernel.async_tensor_parallel.inductor_pass import FusesCollectives

        require_order()
        self.report = Report()
        self._before: Any = config.post_grad_custom_pre_pass
        self._pass = FusesCollectives(self.report, self._before)
        config.post_grad_custom_pre_pass = self._pass

    def disable(self) -> None:
        """Stop rewriting graphs that are compiled from now on; compiled ones stay as they are.
        RuntimeError: another pass has replaced this one meanwhile."""
        from torch._inductor import config

        if self._pass.enabled and config.post_grad_custom_pre_pass is not self._pass:
            raise RuntimeError(
                "torch._inductor.config.post_grad_custom_pre_pass is "
                f"{config.post_grad_custom_pre_pass!r}, not the pass of async tensor parallel; take "
                "that one off first"
            )
        if self._pass.enabled:
            self._pass.enabled = False
            config.post_grad_custom_pre_pass = self._before

    def __enter__(self) -> AsyncTensorParallel:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.disable()


def enable_async_tensor_parallel() -> AsyncTensorParallel:
    """Make ``torch.compile`` fuse collectives of tensor parallelism with their products from now
    on.

    In graphs that Inductor compiles, all gathers whose result is the left side of a matrix product,
    and reduce scatters and all reduces (``sum``, ``avg``) of a matrix product or of a sum of such,
    become calls of ``torch.ops.mkernel``, if the world of their group takes them: a program that
    ``torch.distributed.tensor.parallel.parallelize_module`` made needs no other change. This
    applies to forward and backward graphs alike. A collective that is left beside a product is a
    ``RuntimeWarning`` with the reason, once for each kind. Worlds are not made while compiling,
    because that is collective: call ``mkernel.init(group)`` before. All ranks must enable it, before
    they compile.

    Returns:
        An object that disables it again, also as a context, and reports what was rewritten:
        ``print(mkernel.enable_async_tensor_parallel().report)`` after the first step.

    Raises:
        Unsupported: the Inductor of this torch keeps no order between ops, as in 2.6.
    """
    return AsyncTensorParallel()
