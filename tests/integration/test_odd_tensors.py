"""Tensors whose elements are not where torch says, or have another shape than their parameter: they cost the others nothing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest
import torch
from integration.truth import batch, net
from torch import nn

from msmon.backends.pytorch.adapters.parts import tensors_inside
from msmon.backends.pytorch.kernels.choose import choose_kernel
from msmon.backends.pytorch.recorder import StepRecorder
from msmon.backends.pytorch.taps.reduction import Reduction
from msmon.backends.pytorch.watched import WatchedParameter
from msmon.stats.definitions import Statistic

if TYPE_CHECKING:
    from integration.conftest import Room

SIX = ["min", "max", "norm", "mean", "zeros", "nans"]


class Codes(torch.Tensor):
    """Eight-bit codes and a scale, as the state of low-bit optimizers: a wrapper that has no memory of its own."""

    @staticmethod
    def __new__(cls: Any, codes: torch.Tensor, scale: torch.Tensor) -> Any:
        return torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=torch.float32, device=codes.device)

    def __init__(self, codes: torch.Tensor, scale: torch.Tensor) -> None:
        self.codes, self.scale = codes, scale

    @classmethod
    def of(cls, values: torch.Tensor) -> Any:
        scale = values.abs().max().clamp(min=1e-12) / 127
        return cls((values / scale).round().to(torch.int8), scale)

    def values(self) -> torch.Tensor:
        return self.codes.float() * self.scale

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        first = args[0]
        if function is torch.ops.aten.copy_.default:
            new = cls.of(args[1].values() if isinstance(args[1], Codes) else args[1])
            first.codes.copy_(new.codes)
            first.scale.copy_(new.scale)
            return first
        if function is torch.ops.aten.lerp.Scalar:
            return first.values().lerp(args[1], args[2])
        if function in {torch.ops.aten.detach.default, torch.ops.aten.clone.default, torch.ops.aten.view.default}:
            shape = args[1] if len(args) > 1 else first.shape
            return cls(first.codes.clone().view(shape), first.scale.clone())
        raise NotImplementedError(f"{function} of {cls.__name__}")


class Dequantized(Codes):
    """The same, with the method by which such classes hand out their values."""

    def dequantize(self) -> torch.Tensor:
        return self.values()


class Momentum(torch.optim.Optimizer):
    """Keeps its momentum in a class of ours, for all parameters or for those of some shapes."""

    def __init__(self, parameters: Any, make: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})
        self.make = make

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    state = self.state[parameter]
                    if not state:
                        state.update(self.make(parameter))
                    self.update(parameter, state)

    def update(self, parameter: torch.Tensor, state: Any) -> None:
        moment = state.get("exp_avg")
        if isinstance(moment, Codes):
            moment.copy_(moment.lerp(parameter.grad, 0.5))
            parameter -= 0.1 * moment.values()
        else:
            parameter -= 0.1 * parameter.grad


def trained(optimizer: Any, model: nn.Module, steps: int = 3) -> list[torch.Tensor]:
    for step in range(steps):
        optimizer.zero_grad()
        model(batch(step)).pow(2).mean().backward()
        optimizer.step()
    return [parameter.detach().clone() for parameter in model.parameters()]


def model_of(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    model: nn.Module = net("Net")
    return model


@pytest.mark.parametrize("cls", [Codes, Dequantized])
def test_state_in_a_class_of_its_own(room: Room, cls: Any, capfd: pytest.CaptureFixture[str]) -> None:
    """Its values where the class hands them out, else no row and a line that names the tensor; never foreign memory."""
    bare = model_of()
    expected = trained(Momentum(bare.parameters(), lambda p: {"exp_avg": cls.of(torch.zeros_like(p))}), bare)
    model = model_of()
    optimizer = Momentum(model.parameters(), lambda p: {"exp_avg": cls.of(torch.zeros_like(p))})
    room.monitor(mv_distribution=True, mg_direction=True, ur_distribution=True, ops=SIX).set_monitor(
        model, 1, optimizer
    )
    norms: dict[tuple[str, int], float] = {}
    for step in range(3):
        optimizer.zero_grad()
        model(batch(step)).pow(2).mean().backward()
        for name, parameter in model.named_parameters():
            if optimizer.state[parameter]:
                norms[name, step] = float(optimizer.state[parameter]["exp_avg"].values().double().norm())
        optimizer.step()
    assert all(torch.equal(*pair) for pair in zip(expected, model.parameters(), strict=True))
    rows = room.rows("exp_avg")
    said = capfd.readouterr().err
    if cls is Dequantized:
        assert {(row.name, row.step): row["norm"] for row in rows} == pytest.approx(norms)
        assert len(room.rows("other")) == 12
    else:
        assert rows == []
        assert said.count("0.weight has no exp_avg: only Codes itself knows where its elements are") == 1
    assert len(room.rows("grad_reduced")) == 12
    assert "switched off" not in said


class Params4bit(nn.Parameter):
    """As bitsandbytes keeps a weight: two numbers a byte, and how to read them beside it."""

    quant_state: Any = ()


class Packed(nn.Module):
    """A frozen quantised base with a trainable head, and a weight of a class that implements next to nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.packed = Params4bit(torch.arange(32, dtype=torch.uint8).reshape(-1, 1), requires_grad=False)
        self.wrapped = nn.Parameter(Opaque(torch.randn(4, 4)), requires_grad=False)
        self.head = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(x)
        return out


class Opaque(torch.Tensor):
    """A wrapper that can be detached and nothing else."""

    @staticmethod
    def __new__(cls: Any, inner: torch.Tensor) -> Any:
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

    def __init__(self, inner: torch.Tensor) -> None:
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.ops.aten.detach.default:
            return cls(args[0].inner)
        raise NotImplementedError(function)


def test_weights_that_cannot_be_read(room: Room, capfd: pytest.CaptureFixture[str]) -> None:
    """Packed and opaque weights are left out, each named once; the head has all its rows."""
    model = Packed()
    optimizer = torch.optim.SGD(model.head.parameters(), lr=0.1)
    room.monitor(param_distribution=True, xy_distribution=True, all_xy=True, ops=SIX).set_monitor(model, 1, optimizer)
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.randn(2, 4)).pow(2).mean().backward()
        optimizer.step()
    for kind in ("param_origin", "param_updated"):
        assert [(row.name, row.step) for row in room.rows(kind)] == [
            (name, step) for step in range(3) for name in ("head.weight", "head.bias")
        ]
    said = capfd.readouterr().err
    assert said.count("packed has no param_origin: a Params4bit packs its numbers into torch.uint8") == 1
    assert said.count("wrapped has no param_origin: ") == 1
    assert "switched off" not in said


def low_rank(parameter: torch.Tensor) -> dict[str, Any]:
    """As GaLore: the moments of a matrix are those of its projection."""
    shape = (2, parameter.shape[1]) if parameter.dim() == 2 else parameter.shape
    return {"exp_avg": torch.ones(shape), "exp_avg_sq": torch.ones(shape), "step": torch.tensor(1.0)}


class AdamW(Momentum):
    """Has the name by which an optimizer is known whose update is Adam's."""


def test_state_of_another_shape(room: Room, capfd: pytest.CaptureFixture[str]) -> None:
    """Low-rank moments have rows; what needs the parameter's shape is left out for that parameter only."""
    model = model_of()
    optimizer = AdamW(model.parameters(), low_rank)
    for group in optimizer.param_groups:
        group.update(betas=(0.9, 0.999), eps=1e-8)
    config = {"mv_distribution": True, "mg_direction": True, "ur_distribution": True, "param_distribution": True}
    room.monitor(**config).set_monitor(model, 1, optimizer)
    trained(optimizer, model)
    names = [name for name, _ in model.named_parameters()]
    biases = [name for name in names if name.endswith("bias")]
    assert {row.name for row in room.rows("exp_avg")} == set(names)
    assert {row.name for row in room.rows("other") if row.step > 0} == set(biases)
    assert {row.name for row in room.rows("update")} == {row.name for row in room.rows("update_ratio")} == set(biases)
    said = capfd.readouterr().err
    assert said.count("0.weight has no other: its first moment has another shape") == 1
    assert said.count("0.weight has no update: its moments have another shape than the weight") == 1
    assert "switched off" not in said


def nested(parameter: torch.Tensor) -> dict[str, Any]:
    """As Shampoo: factors by block, in dictionaries and lists; one that contains itself."""
    state: dict[str, Any] = {
        "step": 1,
        "block_0": {"left": parameter.detach() * 2, "factors": [torch.ones(2), torch.ones(3)]},
    }
    state["block_0"]["itself"] = state
    return state


def test_nested_state(room: Room, capfd: pytest.CaptureFixture[str]) -> None:
    """Keys of dictionaries inside are joined by dots to the kind; a position in a list goes to the row's name."""
    model = model_of()
    optimizer = Momentum(model.parameters(), nested)
    room.monitor(mv_distribution=True).set_monitor(model, 1, optimizer)
    before = dict(model.named_parameters())["0.weight"].detach().double().norm()
    trained(optimizer, model, 2)
    left = {row.name: row for row in room.rows("block_0.left")}
    assert set(left) == dict(model.named_parameters()).keys()
    assert left["0.weight"]["norm"] == pytest.approx(2 * float(before))
    assert [row.name for row in room.rows("block_0.factors")][:2] == ["0.weight[0]", "0.weight[1]"]
    assert "keeps no state" not in capfd.readouterr().err


def test_state_of_the_whole_optimizer(room: Room) -> None:
    """LBFGS sees its parameters as one vector: what it knows of that is its own, not its first parameter's."""
    model = model_of()
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=2)
    room.monitor(mv_distribution=True).set_monitor(model, 1, optimizer)

    def closure() -> Any:
        optimizer.zero_grad()
        loss = model(batch(0)).pow(2).mean()
        loss.backward()
        return loss

    directions = []
    for _ in range(3):
        state = optimizer.state.get(next(model.parameters()), {})
        if "d" in state:
            directions.append(float(state["d"].double().norm()))
        optimizer.step(closure)
    assert [(row.name, row.step) for row in room.rows("d")] == [("LBFGS", 1), ("LBFGS", 2)]
    assert [row["norm"] for row in room.rows("d")] == pytest.approx(directions)
    assert {row.name for row in room.rows("old_dirs")} >= {"LBFGS[0]"}


def quasi_newton(optimizer: Any, model: nn.Module) -> Any:
    """A closure, as LBFGS evaluates it."""

    def closure() -> Any:
        optimizer.zero_grad()
        loss = model(batch(0)).pow(2).mean()
        loss.backward()
        return loss

    return closure


def test_state_of_optimizers_of_one_class(room: Room) -> None:
    """Each has a name of its own; and one whose first parameter is not watched keeps its rows."""
    model = model_of()
    parts = [list(model[0].parameters()), list(model[2].parameters())]  # type: ignore[index]
    optimizers = [torch.optim.LBFGS(part, lr=0.01, max_iter=2) for part in parts]
    monitor = room.monitor(mv_distribution=True, targets={"0.bias": {}, "2.bias": {}})
    monitor.set_monitor(model, 1, optimizers[0])
    monitor.set_monitor(model, 1, optimizers[1])
    for _ in range(2):
        for optimizer in optimizers:
            optimizer.step(quasi_newton(optimizer, model))
    sizes = {row.name: row["norm"] for row in room.rows("d")}
    norms = [float(optimizer.state[part[0]]["d"].norm()) for optimizer, part in zip(optimizers, parts, strict=True)]
    assert len(sizes) == len(norms) == 2
    assert all("LBFGS" in name for name in sizes)


def test_very_much_state(capfd: pytest.CaptureFixture[str]) -> None:
    """More tensors than anybody looks at are cut off, which is said; as many as that are not."""
    assert len(list(tensors_inside({"all": [torch.ones(1)] * 1024}))) == 1024
    assert capfd.readouterr().err == ""
    assert len(list(tensors_inside({"all": [torch.ones(1)] * 1025}))) == 1024
    assert "more than 1024 tensors in the state of one parameter" in capfd.readouterr().err


@dataclass
class Factors:
    """As Shampoo keeps the factors of a block."""

    left: torch.Tensor
    rest: tuple[torch.Tensor, ...]


def test_state_in_other_containers(room: Room) -> None:
    """State in a dataclass, in a list without keys, and under a word instead of a parameter."""
    model = model_of()

    class WordKeeper(Momentum):
        def update(self, parameter: torch.Tensor, state: Any) -> None:
            self.state["global_state"] = {"direction": torch.full((3,), 2.0)}
            super().update(parameter, {})

    optimizer = WordKeeper(
        model.parameters(), lambda p: {"block": Factors(torch.ones(4), (torch.ones(9), torch.ones(1)))}
    )
    first = next(model.parameters())
    optimizer.state[first] = [torch.full((4,), 3.0)]
    room.monitor(mv_distribution=True).set_monitor(model, 1, optimizer)
    trained(optimizer, model, 2)
    left = room.rows("block.left")
    assert {row.name: row["norm"] for row in left} == dict.fromkeys(["0.bias", "2.weight", "2.bias"], 2.0)
    assert {row.name: row["norm"] for row in room.rows("block.rest")}["0.bias[0]"] == 3.0
    assert {row.name: row["norm"] for row in room.rows("state")} == {"0.weight[0]": 6.0}
    direction = room.rows("global_state.direction")
    assert [(row.name, row.step) for row in direction] == [("WordKeeper", 1)]
    assert direction[0]["norm"] == pytest.approx(12**0.5)


def test_codes_in_the_state(room: Room, capfd: pytest.CaptureFixture[str]) -> None:
    """Eight-bit codes (bitsandbytes' ``state1``) are no numbers: left out and named, what stands beside them has rows."""
    model = model_of()

    def coded(parameter: torch.Tensor) -> dict[str, Any]:
        return {"state1": torch.zeros_like(parameter, dtype=torch.uint8), "absmax1": torch.ones(3)}

    optimizer = Momentum(model.parameters(), coded)
    room.monitor(mv_distribution=True).set_monitor(model, 1, optimizer)
    trained(optimizer, model)
    assert room.rows("state1") == []
    assert len(room.rows("absmax1")) == 8
    assert "0.weight has no state1: 8-bit codes, whose numbers only the optimizer knows" in capfd.readouterr().err


class Quarters(nn.Parameter):
    """As bitsandbytes keeps a weight for sharding: codes in the bits of a floating-point dtype."""

    quant_state: Any = None


class Coded(nn.Module):
    """Frozen weights that are codes, in every way in which libraries for quantisation keep them; numbers beside them."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = nn.Parameter(torch.arange(32, dtype=torch.uint8), requires_grad=False)
        self.words = nn.Parameter(torch.arange(8, dtype=torch.int32), requires_grad=False)
        self.bits = Quarters(torch.arange(32, dtype=torch.uint8).view(torch.bfloat16), requires_grad=False)
        self.bits.quant_state = {"absmax": torch.ones(1)}
        self.not_yet = Quarters(torch.ones(3), requires_grad=False)
        self.indices = nn.Parameter(torch.arange(4), requires_grad=False)
        self.head = nn.Linear(4, 3)


def test_weights_that_are_codes(room: Room, capfd: pytest.CaptureFixture[str]) -> None:
    """The norm of codes is none of a weight: they are left out and named; classes of parameters with numbers have rows."""
    model = Coded()
    optimizer = torch.optim.SGD(model.head.parameters(), lr=0.1)
    room.monitor(param_distribution=True).set_monitor(model, 1, optimizer)
    for _ in range(2):
        optimizer.zero_grad()
        model.head(torch.ones(2, 4)).pow(2).mean().backward()
        optimizer.step()
    rows = room.rows("param_origin")
    assert [row.name for row in rows] == 2 * ["not_yet", "indices", "head.weight", "head.bias"]
    assert rows[0]["norm"] == pytest.approx(3**0.5)
    said = capfd.readouterr().err
    for name, dtype in (("bytes", "uint8"), ("words", "int32"), ("bits", "bfloat16")):
        assert said.count(f"{name} has no param_origin: a ") == 1
        assert f"packs its numbers into torch.{dtype}" in said


class Linear(nn.Module):
    """Multiplies by a weight of any class, and has a part whose forward does as it likes."""

    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight, requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


def test_features_of_odd_weights(room: Room, capfd: pytest.CaptureFixture[str]) -> None:
    """A matrix that cannot be read costs the high-order features of the others nothing; one that tells its values has them."""
    values = torch.diag(torch.tensor([3.0, 1.0, 1.0, 1.0]))
    model = nn.Sequential(Linear(Opaque(values)), Linear(Dequantized.of(values)), nn.Linear(4, 3))
    optimizer = torch.optim.SGD(model[2].parameters(), lr=0.1)
    targets = {"linear_hook": [], "moe_router_weight_hook": ["0", "1", "2"]}
    room.monitor(recording_l2_features=True, l2_targets=targets).set_monitor(model, 1, optimizer)
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.ones(2, 4)).pow(2).mean().backward()
        optimizer.step()
    rows = room.rows("linear_hook")
    assert [(row.name, row.step) for row in rows] == [(f"{n}.linear", step) for step in range(2) for n in (1, 2)]
    assert rows[0]["kernel_norm"] == pytest.approx(3, rel=0.02)
    assert {row.name for row in room.rows("moe_router_weight_hook")} == {"1.moe_router", "2.moe_router"}
    said = capfd.readouterr().err
    assert said.count("0.linear has no linear_hook: only Opaque itself knows") == 1
    assert "switched off" not in said


class Counting:
    """A kernel that notes how many tensors it is given at a time."""

    def __init__(self) -> None:
        self.sizes: list[int] = []
        self._kernel = choose_kernel()

    def reduce(self, tensors: Any, *arguments: Any, **keywords: Any) -> torch.Tensor:
        self.sizes.append(len(tensors))
        return self._kernel.reduce(tensors, *arguments, **keywords)


def test_one_odd_tensor_is_tried_alone(room: Room) -> None:
    """Once a tensor could not be read the others are reduced together again; it is among them when it can be read again."""
    del room  # what has been said before is forgotten
    kernel = Counting()
    reduction = Reduction(kernel, [Statistic.NORM], 1e-8)
    named = [
        (WatchedParameter(tensor, f"p{n}", 0), tensor) for n, tensor in enumerate([torch.ones(4) for _ in range(5)])
    ]
    storage = named[2][1].untyped_storage()
    rows = []
    for size in (16, 0, 0, 16, 16):
        storage.resize_(size)
        recorder = StepRecorder()
        reduction.add(recorder, "kind", named)
        rows.append(len(recorder))
    assert rows == [5, 4, 4, 5, 5]
    assert kernel.sizes == [5, *[5, 1, 1, 1, 1, 1], *[4, 1], *[4, 1], 5]
