"""The streams backend: every op with torch and torch.distributed, on any torch device.

For one call, ``backend.py`` passes it to the thread of ``worker.py``, which runs the op's file on
two streams (``call_streams.py``): messages between ranks on one, matrix work on the other.
"""

from mkernel.backends.accelerators.streams.backend import StreamsAccelerator

__all__ = ["StreamsAccelerator"]
