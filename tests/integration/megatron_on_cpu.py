"""Lets megatron-core, which asks for CUDA throughout, run on the CPU: what it asks for is answered with the CPU's own."""

from __future__ import annotations

import functools
import sys
import types
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import packaging.version
import torch

if TYPE_CHECKING:
    from collections.abc import Callable

_CPU = torch.device("cpu")


def install() -> None:
    """Before anything of Megatron is built."""
    if (
        find_spec("pkg_resources") is None
    ):  # newer setuptools do not have it, and releases up to 0.8.0 ask it for a package
        sys.modules["pkg_resources"] = types.ModuleType("pkg_resources")
        vars(sys.modules["pkg_resources"])["packaging"] = packaging
    for name in ("tensor", "zeros", "ones", "empty", "full", "arange"):
        setattr(torch, name, _on_cpu(getattr(torch, name)))
    torch.cuda.current_device = lambda: _CPU  # type: ignore[assignment,return-value]
    torch.cuda.get_rng_state = lambda *unused: torch.get_rng_state()
    for name in ("manual_seed", "synchronize", "empty_cache"):  # one each: torch._dynamo keeps rules by function
        setattr(torch.cuda, name, lambda *unused: None)
    torch.Tensor.cuda = lambda self, *unused, **also: self  # type: ignore[method-assign,assignment]
    torch.Tensor.type = _of_cuda(torch.Tensor.type)  # type: ignore[method-assign]

    from megatron.core.tensor_parallel import random

    random._set_cuda_rng_state = lambda state, *unused, **also: torch.set_rng_state(state)
    random._get_cuda_rng_state = lambda *unused, **also: torch.get_rng_state()


def _on_cpu(make: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(make)
    def on_cpu(*args: Any, **kwargs: Any) -> Any:
        if str(kwargs.get("device", "")).startswith("cuda"):
            kwargs["device"] = _CPU
        return make(*args, **kwargs)

    return on_cpu


def _of_cuda(original: Callable[..., Any]) -> Callable[..., Any]:
    """Megatron tells types of tensors apart by names such as ``torch.cuda.FloatTensor``."""

    def type_name(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        found = original(self, *args, **kwargs)
        asked_by_megatron = "megatron" in str(sys._getframe(1).f_globals.get("__name__"))
        return found.replace("torch.", "torch.cuda.", 1) if asked_by_megatron and isinstance(found, str) else found

    return type_name


def install_apex() -> None:
    """For releases before 0.8.0, which do not import without apex and Transformer Engine: what they use of those, in torch."""

    def module(name: str, **content: Any) -> types.ModuleType:
        made = sys.modules[name] = types.ModuleType(name)
        vars(made).update(content)
        return made

    def norms(_: Any, __: Any, lists: Any, per_tensor: bool = False) -> Any:
        each = torch.stack([tensor.float().norm() for tensor in lists[0]])
        return each.norm(), each

    def scale(_: Any, __: Any, lists: Any, factor: float) -> None:
        for source, target in zip(*lists, strict=True):
            target.copy_(source * factor)

    class FusedAdam(torch.optim.AdamW):
        pass

    class FusedSGD(torch.optim.SGD):
        pass

    class LayerNorm(torch.nn.LayerNorm):
        def __init__(self, config: Any = None, hidden_size: int = 0, eps: float = 1e-5, **unused: Any) -> None:
            super().__init__(hidden_size, eps=eps)

    names = ("TEDotProductAttention", "TELayerNormColumnParallelLinear", "TERowParallelLinear")
    engine: dict[str, Any] = dict.fromkeys((*names, "TEColumnParallelLinear", "TELinear"), torch.nn.Module)
    module("amp_C", multi_tensor_l2norm=norms, multi_tensor_scale=scale)
    module("apex").__path__ = []
    module("apex.optimizers", FusedAdam=FusedAdam, FusedSGD=FusedSGD)
    module("apex.multi_tensor_apply", multi_tensor_applier=lambda call, _, lists, *args: call(None, None, lists, *args))
    module(
        "megatron.core.transformer.custom_layers.transformer_engine",
        TENorm=LayerNorm,
        get_cpu_offload_context=None,
        SplitAlongDim=None,
        **engine,
    )
    module("megatron.core.fusions.fused_layer_norm", FusedLayerNorm=LayerNorm)
