"""The structure of a model: what each module takes and returns, and which gradients come back."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch.nn.parameter import is_lazy

from msmon.backends.pytorch.module_calls import INPUT, OUTPUT, Observer
from msmon.backends.pytorch.structure import describe_gradients, describe_inputs, describe_output

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from torch import Tensor

    from msmon.backends.pytorch.module_calls import Call, WatchedModule


class StructureTap(Observer):
    """The first call of each module says how it is built."""

    part = "recording of the model's structure"

    def __init__(self) -> None:
        self._described: dict[int, dict[str, dict[str, str]]] = {}
        self._gradients: dict[int, dict[str, list[Tensor | None]]] = {}
        self._first: dict[int, Call] = {}
        self._completed: dict[int, None] = {}

    def begins(self, call: Call, args: Sequence[Any], kwargs: Mapping[str, Any], tensors: Sequence[Tensor]) -> None:
        """Describe the inputs."""
        key = id(call.module)
        if key not in self._described:
            self._first[key] = call
            self._described[key] = {INPUT: describe_inputs(args, kwargs)}
            self._gradients[key] = {INPUT: [None] * len(tensors)}

    def ends(self, call: Call, output: Any, tensors: Sequence[Tensor]) -> None:  # noqa: ANN401 - whatever a module returns
        """Describe the output."""
        if self.wants(call, OUTPUT):
            self._completed[id(call.module)] = None
            self._described[id(call.module)][OUTPUT] = describe_output(output)
            self._gradients[id(call.module)][OUTPUT] = [None] * len(tensors)

    def wants(self, call: Call, side: str) -> bool:
        """Gradients of both sides, of the first call."""
        del side
        return self._first.get(id(call.module)) is call

    def gradient(self, call: Call, side: str, position: int, gradient: Tensor, micro_step: int) -> None:
        """Note size and dtype of a gradient: an empty tensor of that shape on no device holds both."""
        del micro_step
        if self.wants(call, side):
            self._gradients[id(call.module)][side][position] = gradient.detach().to("meta")

    def document(self, modules: Iterable[WatchedModule]) -> dict[str, Any]:
        """The content of ``module_struct.json``: modules in the order in which they first returned, then the others.

        Args:
            modules: All modules of the model.
        """
        by_key = {id(watched): watched for watched in modules}
        called = [key for key in self._completed if key in by_key]
        content = {}
        for key in [*called, *(key for key in by_key if key not in self._completed)]:
            watched = by_key[key]
            sides = self._described.get(key, {})
            gradients = {
                f"{side}_grad": describe_gradients(found) for side, found in self._gradients.get(key, {}).items()
            }
            content[f"{watched.stage}:{watched.name}"] = {**sides, **gradients, **_built(watched)}
        return content


def _built(watched: WatchedModule) -> dict[str, Any]:
    module = watched.reference()
    if module is None:
        return {}
    parameters = {
        name: {"shape": list(parameter.shape), "dtype": str(parameter.dtype), "trainable": parameter.requires_grad}
        for name, parameter in module.__dict__["_parameters"].items()
        if parameter is not None and not is_lazy(parameter)
    }
    return {"class": type(module).__name__, "training": module.training, "parameters": parameters}
