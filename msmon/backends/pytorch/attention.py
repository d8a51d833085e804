"""Query, key and mask of an attention, from the arguments of whatever module computes it."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.nn import functional

from msmon.backends.base import UnsupportedTensorError
from msmon.backends.pytorch.features import Visibility

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torch import Tensor
    from torch.nn import Module

    from msmon.backends.pytorch.features import Order

_QUERIES = ("query", "q", "query_layer", "query_states")
_KEYS = ("key", "k", "key_layer", "key_states")
_MASKS = ("attn_mask", "attention_mask", "mask")
_CAUSAL = ("is_causal", "causal")
_SCALES = ("scale", "softmax_scale")


class AttentionInputs(NamedTuple):
    """What :func:`msmon.backends.pytorch.features.attention` takes."""

    query: Tensor
    key: Tensor
    order: Order
    visibility: Visibility
    scale: float | None = None


def attention_inputs(module: Module, args: Sequence[Any], kwargs: Mapping[str, Any], order: Order) -> AttentionInputs:
    """Find query, key and mask.

    Query and key are the arguments of these names (``query``, ``q``, ``query_layer``, ``query_states``; ``key`` and so on),
    else the first two arguments. A mask is an argument ``attn_mask``, ``attention_mask`` or ``mask``. The attention is
    causal when the argument ``is_causal`` or ``causal`` says so; without either, when ``attn_mask_type`` (argument or
    attribute, of Megatron) holds the word, or when there is no mask and the module's attribute ``is_causal`` or
    ``causal`` is true. True in a boolean mask hides a key when there is an ``attn_mask_type``, else it shows it.

    Args:
        module: The attention.
        args: Of its forward.
        kwargs: Of its forward.
        order: The dimensions of query and key. ``torch.nn.MultiheadAttention`` has its own.

    Raises:
        UnsupportedTensorError: Nothing there can be query and key.
    """
    named = _named(module.forward, args, kwargs)
    query, key = _first(named, _QUERIES), _first(named, _KEYS)
    if query is None or key is None:
        query, key = [*args[:2], None, None][:2]
    if not (isinstance(query, torch.Tensor) and isinstance(key, torch.Tensor)):
        raise UnsupportedTensorError("query and key are not among its arguments; name the module that is given them")
    if isinstance(module, torch.nn.MultiheadAttention):
        return _of_multihead_attention(module, query, key, named)
    mask = _first(named, _MASKS)
    masks = (mask,) if isinstance(mask, torch.Tensor) else ()
    kind = named.get("attn_mask_type") or getattr(module, "attn_mask_type", None)
    visibility = Visibility(_is_causal(module, named, kind, masked=bool(masks)), masks, true_hides=kind is not None)
    scale = _first(named, _SCALES)
    return AttentionInputs(query, key, order, visibility, float(scale) if isinstance(scale, (int, float)) else None)


def _is_causal(module: Module, named: Mapping[str, Any], kind: object, *, masked: bool) -> bool:
    said = _first(named, _CAUSAL)
    if isinstance(said, bool):
        return said
    if kind is not None:
        return "causal" in str(getattr(kind, "name", kind))
    return not masked and any(getattr(module, name, None) is True for name in _CAUSAL)


def _of_multihead_attention(
    module: torch.nn.MultiheadAttention, query: Tensor, key: Tensor, named: Mapping[str, Any]
) -> AttentionInputs:
    """Project query and key as the module does. Its masks hide where they are True, and it needs one to be causal."""
    if module.bias_k is not None or module.add_zero_attn:
        raise UnsupportedTensorError("a MultiheadAttention that adds keys of its own is not supported")
    size = module.embed_dim
    bias: Tensor | None = module.in_proj_bias
    if module._qkv_same_embed_dim:  # noqa: SLF001 - torch has no public name for it
        weights = module.in_proj_weight[:size], module.in_proj_weight[size : 2 * size]
    else:
        weights = module.q_proj_weight, module.k_proj_weight
    biases = [None, None] if bias is None else [bias[:size], bias[size : 2 * size]]
    query = _project(module, query, weights[0], biases[0])
    key = _project(module, key, weights[1], biases[1])
    masks = [mask for mask in (named.get("attn_mask"),) if mask is not None]
    padding = named.get("key_padding_mask")
    if padding is not None:
        masks.append(padding.reshape(-1, 1, 1, padding.shape[-1]))
    order: Order = "b,s,h,d" if module.batch_first else "s,b,h,d"
    return AttentionInputs(query, key, order, Visibility(masks=tuple(masks), true_hides=True))


@torch.no_grad()
def _project(module: torch.nn.MultiheadAttention, tensor: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    if tensor.dim() == 2:  # noqa: PLR2004 - without a batch
        tensor = tensor.unsqueeze(0 if module.batch_first else 1)
    wide = torch.float64 if weight.dtype == torch.float64 else torch.float32
    with torch.autocast(tensor.device.type, enabled=False):
        projected = functional.linear(tensor.to(wide), weight.to(wide), None if bias is None else bias.to(wide))
    return projected.reshape(*projected.shape[:2], module.num_heads, -1)


def _named(forward: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments by name, with their defaults, as far as the signature has names for them."""
    try:
        parameters = inspect.signature(forward).parameters.values()
    except (TypeError, ValueError):
        return dict(kwargs)
    named = {parameter.name: parameter.default for parameter in parameters if parameter.default is not parameter.empty}
    return {**named, **dict(zip((parameter.name for parameter in parameters), args, strict=False)), **kwargs}


def _first(named: Mapping[str, Any], names: Sequence[str]) -> Any:  # noqa: ANN401 - whatever the module takes
    return next((named[name] for name in names if named.get(name) is not None), None)
