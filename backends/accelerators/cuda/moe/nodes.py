"""The part of an MoE call that communicates with ranks of other nodes.

Every rank sends its tokens whole, once to each of these ranks, by puts of a NIC, together with its
ids or its weights. One small kernel, which runs before anything waits for tokens, sets the flags
that ranks of the node set themselves. Results return by rank only: sums for another node's ranks
leave through an outbox.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from mkernel.backends.accelerators.cuda.native_kernels import native

if TYPE_CHECKING:
    import torch

    from mkernel.backends.accelerators.cuda import _kernels


class FarRanks:
    """The ranks of other nodes, in the calls of one plan."""

    def __init__(self, device: int, sizes: _kernels.MoeSizes, row_bytes: int) -> None:
        """Prepare the calls. ``row_bytes``: bytes of a token, or of a returning sum."""
        self._device, self._sizes, self._row_bytes = device, sizes, row_bytes

    def send_tokens(
        self, world: _kernels.DeviceWorld, x: torch.Tensor, ids: torch.Tensor, stream: int
    ) -> None:
        """Send the own tokens and ids, and land those of others. Ids come first: a wait for them
        guarantees that the kernel which sets the flags of tokens is running."""
        made = native()
        slots = self._sizes.far_ids(self._row_bytes), self._sizes.far_tokens(self._row_bytes)
        for each, tensor in zip(slots, (ids, x), strict=True):
            made.send_far(self._device, world, tensor.data_ptr(), each, stream)
        made.land_far(self._device, world, slots, stream)

    def send_weights(self, world: _kernels.DeviceWorld, weights: torch.Tensor, stream: int) -> None:
        """Send the own weights, and land those of others."""
        made, slots = native(), self._sizes.far_weights()
        made.send_far(self._device, world, weights.data_ptr(), slots, stream)
        made.land_far(self._device, world, [slots], stream)

    def send_sums(self, world: _kernels.DeviceWorld, stream: int) -> None:
        """Send the contents of the outbox, and land the sums of others."""
        made, slots = native(), self._sizes.far_sums(self._row_bytes)
        outbox = self._sizes.outbox_offset(self._row_bytes)
        made.send_outbox(self._device, world, outbox, slots, stream)
        made.land_far(self._device, world, [slots], stream)
