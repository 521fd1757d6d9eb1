"""``torch.autocast`` for ops and layers: which arguments it casts, and how long casts of weights live.

A call inside of autocast is the same call outside of it with other arguments: those that :data:`CASTS`
names are cast to autocast's dtype, as torch casts those of ``torch.mm``. Derivatives compute in the
dtypes of their forward, wherever ``backward`` is called.

Torch casts a weight once in a region (the outermost ``torch.autocast``), and forgets what it cast at
the region's end. Python cannot read its cache, so weights of ours have one that ends with it: a tensor
that torch holds in its own is watched.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.weak import WeakIdKeyDictionary

from mkernel.errors import DtypeError
from mkernel.ops.plain import just_computing

enabled = torch._C._is_any_autocast_enabled
"""Tells whether autocast is on for a device; a function of torch's, which costs a call."""
off = torch._C._DisableAutocast
"""The context in which no autocast is on."""
KEYS = ("AutocastCPU", "AutocastCUDA")
_FLOATS = (torch.float32, torch.bfloat16, torch.float16)

_PRODUCT = ("a", "b", "bias")
_NOTHING: tuple[str, ...] = ()
CASTS: Mapping[str, tuple[str, ...]] = {
    "all_gather_gemm": _PRODUCT,
    "all_gather_gemm_into": _PRODUCT,
    "all_gather_gemm_scaled": _PRODUCT,
    "all_gather_gemm_gathered": _PRODUCT,
    "all_gather_gemms": _PRODUCT,
    "all_gather_gemms_into": _PRODUCT,
    "all_gather_gemms_scaled": _PRODUCT,
    "gemm_reduce_scatter": _PRODUCT,
    "gemm_reduce_scatter_into": _PRODUCT,
    "gemm_reduce_scatter_scaled": _PRODUCT,
    "gemm_all_reduce": _PRODUCT,
    "gemm_all_reduce_into": _PRODUCT,
    "gemm_all_reduce_scaled": _PRODUCT,
    "gemm_all_reduce_norm": _PRODUCT,
    "gemm_all_reduce_norm_into": _PRODUCT,
    "gemm_all_reduce_norm_quantised": _PRODUCT,
    "gemm_all_reduce_norm_scaled": _PRODUCT,
    "replicated_gemm": _PRODUCT,
    "invariant_mm": _PRODUCT,
    "shared_product": ("x", "weight", "bias"),
    "moe_dispatch_gemm": ("x", "w"),
    "moe_dispatch_gemm_scaled": ("x", "w"),
    "moe_gemm_combine": ("h", "w2"),
    "moe_gemm_combine_scaled": ("h", "w2"),
    "ring_attention": ("q", "k", "v"),
    # No products: what only travels or is added keeps its dtype, as in torch.distributed.
    "all_gather_rows": _NOTHING,
    "all_reduce": _NOTHING,
    "all_reduce_into": _NOTHING,
    "all_reduce_norm": _NOTHING,
    "all_reduce_norm_quantised": _NOTHING,
    "joined_columns": _NOTHING,
    "moe_combine": _NOTHING,
    "moe_dispatch": _NOTHING,
    # Derivatives have the dtypes of their forward.
    "moe_combine_backward": _NOTHING,
    "moe_dispatch_backward": _NOTHING,
    "moe_gemm_combine_backward": _NOTHING,
    "ring_attention_backward": _NOTHING,
}
"""The arguments that autocast casts, by op: activations, weights and biases of products. All others
keep their dtypes: scales, weights of routing and norms, residuals, outputs."""


def run(call: Callable[..., Any], name: str, given: dict[str, Any]) -> Any:
    """Call an op with what autocast makes of its arguments, outside of autocast. DtypeError: it does
    not take these dtypes."""
    made = given | {each: cast(given[each]) for each in CASTS[name] if each in given}
    try:
        with off():
            return call(**made)
    except DtypeError as error:
        raise explained(error, name, given) from None


def cast(value: Any) -> Any:
    """Return a tensor, or a list of tensors, as autocast has products take it.

    A tensor in float32 or 16 bits, on a device for which autocast is on, is cast to autocast's dtype
    there. A parameter's cast (a leaf in float32 that requires grad) is kept until torch forgets its
    own, if torch caches casts.
    """
    if isinstance(value, (list, tuple)):
        return [cast(each) for each in value]
    dtype = dtype_of(value)
    if dtype is None or value.dtype == dtype:
        return value
    if torch.compiler.is_compiling() or not just_computing() or not _is_cached(value):
        return value.to(dtype)
    return _CACHE.cast(value, dtype)


def dtype_of(value: Any) -> torch.dtype | None:
    """Return the dtype that autocast casts a tensor to; None: it leaves the value alone."""
    if not isinstance(value, Tensor) or value.dtype not in _FLOATS:
        return None
    kind = value.device.type
    if not (torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)):
        return None
    return torch.get_autocast_dtype(kind)


def explained(error: DtypeError, name: str, given: Mapping[str, Any]) -> DtypeError:
    """Return an error about a call's dtypes that says what autocast did."""
    casts, found = ", ".join(CASTS[name]), (dtype_of(each) for each in given.values())
    dtype = next((each for each in found if each is not None), "its dtype")
    done = f"{casts} to {dtype}, but for float64 and e4m3, and no other argument"
    why = f"torch.autocast casts {done if casts else f'nothing in {name}'}"
    why = f"{error.why}; {why}" if error.why else why
    return DtypeError(error.argument, error.value, error.legal, why=why)


# ---- casts of weights ----------------------------------------------------------------------------


def _is_cached(value: Tensor) -> bool:
    """Return whether the cast of a tensor is kept: where torch keeps it, and counts the tensor's
    changes."""
    return (
        torch.is_autocast_cache_enabled()
        and value.dtype == torch.float32
        and value.requires_grad
        and value.is_leaf
        and not value._is_view()
        and not value.is_inference()
    )


class _Cache:
    """The casts of parameters in this region of autocast.

    They are kept by parameter, and by the state in which it was cast: a cast that was made without a
    graph has no gradient, and one of earlier values is wrong.
    """

    def __init__(self) -> None:
        self._casts = WeakIdKeyDictionary()
        self._watched: Callable[[], Tensor | None] = lambda: None
        self._mark: Tensor | None = None

    def cast(self, value: Tensor, dtype: torch.dtype) -> Tensor:
        if self._watched() is None:
            self._watched = weakref.ref(self._held_by_torch(), lambda _: self._casts.clear())
        state = dtype, value._version, torch.is_grad_enabled(), torch.is_inference_mode_enabled()
        found: tuple[Any, Tensor] | None = self._casts.get(value)  # type: ignore[no-untyped-call]
        if found is None or found[0] != state:
            found = self._casts[value] = state, value.to(dtype)
        return found[1]

    def _held_by_torch(self) -> Tensor:
        """Have torch cast a parameter, and return what it keeps of it until the end of the region."""
        saved: list[Tensor] = []

        def keep(tensor: Tensor) -> Tensor:
            saved.append(tensor)
            return tensor

        with (
            torch.inference_mode(False),
            torch.enable_grad(),
            torch.autocast("cpu", torch.bfloat16),
        ):
            if self._mark is None:
                self._mark = torch.ones(1, 1, device="cpu", requires_grad=True)
            with saved_tensors_hooks(
                keep, keep
            ):  # a product saves its operands, as it multiplied them
                torch.mm(self._mark, self._mark)
        return saved[0]


_CACHE = _Cache()
