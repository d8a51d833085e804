"""Two gloo ranks that communicate in every way; each knows the data of both, and so what it must receive."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import nn
from torch.distributed import all_reduce, irecv, isend, recv, send
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel
from truth import statistics

if TYPE_CHECKING:
    from collections.abc import Callable

RANK, SIZE = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
OTHER = 1 - RANK
ROWS: list[list[Any]] = []
TOLD: dict[str, Any] = {}
SCENARIOS: dict[str, Callable[[], Any]] = {}


def scenario(function: Callable[[], Any]) -> Callable[[], Any]:
    SCENARIOS[function.__name__] = function
    return function


def data(seed: int, rank: int = RANK, size: int = 4) -> torch.Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(100 * seed + rank))


def total(seed: int, size: int = 4) -> torch.Tensor:
    return torch.stack([data(seed, rank, size).double() for rank in range(SIZE)]).sum(0)


def both(seed: int) -> list[torch.Tensor]:
    return [data(seed, rank) for rank in range(SIZE)]


def note(name: str, tensor: torch.Tensor) -> None:
    ROWS.append([name, statistics(tensor)])


def spoil(*tensors: torch.Tensor) -> None:
    """A row that is read later than it should be shows it."""
    for tensor in tensors:
        tensor.fill_(-77)


@scenario
def imported_by_name() -> None:
    tensor = data(1)
    assert all_reduce(tensor) is None
    spoil(tensor)
    note("all_reduce_0.input", data(1))
    note("all_reduce_0.output", total(1))


@scenario
def asynchronous() -> list[str]:
    first, second = data(2), data(3)
    works = [dist.all_reduce(first, async_op=True), dist.all_reduce(second, async_op=True)]
    answers = [works[1].wait(), works[0].wait()]
    spoil(first, second)
    for number, seed in enumerate((2, 3)):
        note(f"all_reduce_{number}.input", data(seed))
        note(f"all_reduce_{number}.output", total(seed))
    return [str(type(works[0])), repr(answers)]


@scenario
def polled() -> None:
    tensor = data(4)
    work = dist.all_reduce(tensor, async_op=True)
    while not work.is_completed():
        pass
    spoil(tensor)
    note("all_reduce_0.input", data(4))
    note("all_reduce_0.output", total(4))


@scenario
def futures() -> None:
    waited, chained = data(5), data(6)
    dist.all_reduce(waited, async_op=True).get_future().wait()
    spoil(waited)
    work = dist.all_reduce(chained, async_op=True)
    work.get_future().then(lambda done: spoil(*done.value())).wait()
    assert chained[0] == -77
    for number, seed in enumerate((5, 6)):
        note(f"all_reduce_{number}.input", data(seed))
        note(f"all_reduce_{number}.output", total(seed))


@scenario
def one_to_many() -> None:
    tensor, reduced, part = data(7), data(8), torch.empty(4)
    dist.broadcast(tensor, 1)
    spoil(tensor)
    dist.reduce(reduced, 1)
    spoil(reduced)
    dist.scatter(part, both(9) if RANK == 1 else None, src=1)
    spoil(part)
    gathered = [torch.empty(4) for _ in range(SIZE)] if RANK == 1 else None
    dist.gather(data(10), gathered, dst=1)
    spoil(*(gathered or []))
    if RANK == 1:
        note("broadcast_0.input", data(7, 1))
    note("broadcast_0.output", data(7, 1))
    note("reduce_0.input", data(8))
    if RANK == 1:
        note("reduce_0.output", total(8))
        for number in range(SIZE):
            note(f"scatter_0.input_{number}", data(9, number))
    note("scatter_0.output", data(9, RANK) if RANK == 1 else data(9, 0))
    note("gather_0.input", data(10))
    if RANK == 1:
        for number in range(SIZE):
            note(f"gather_0.output_{number}", data(10, number))


@scenario
def many_to_many() -> None:
    gathered, whole, part = [torch.empty(4) for _ in range(SIZE)], torch.empty(4 * SIZE), torch.empty(2)
    dist.all_gather(gathered, data(11))
    dist.all_gather_into_tensor(whole, data(12))
    spoil(*gathered, whole)
    dist.reduce_scatter(part, list(data(13).chunk(SIZE)))
    spoil(part)
    dist.reduce_scatter_tensor(part, data(14))
    spoil(part)
    dist.all_to_all_single(whole[:4], data(15))
    spoil(whole)
    received = [torch.empty(2) for _ in range(SIZE)]
    dist.all_to_all(received, list(data(16).chunk(SIZE)))
    spoil(*received)
    mine = slice(2 * RANK, 2 * RANK + 2)
    note("all_gather_0.input", data(11))
    for number in range(SIZE):
        note(f"all_gather_0.output_{number}", data(11, number))
    note("all_gather_into_tensor_0.input", data(12))
    note("all_gather_into_tensor_0.output", torch.cat(both(12)))
    for number in range(SIZE):
        note(f"reduce_scatter_0.input_{number}", data(13).chunk(SIZE)[number])
    note("reduce_scatter_0.output", total(13)[mine])
    note("reduce_scatter_tensor_0.input", data(14))
    note("reduce_scatter_tensor_0.output", total(14)[mine])
    note("all_to_all_single_0.input", data(15))
    note("all_to_all_single_0.output", torch.cat([data(15, rank)[mine] for rank in range(SIZE)]))
    for number in range(SIZE):
        note(f"all_to_all_0.input_{number}", data(16).chunk(SIZE)[number])
    for number in range(SIZE):
        note(f"all_to_all_0.output_{number}", data(16, number)[mine])


@scenario
def point_to_point() -> Any:
    tensor = torch.empty(4)
    if RANK == 0:
        send(data(17), 1)
        recv(tensor, 1)
        works = [isend(data(19), 1), irecv(tensor, 1)]
    else:
        source = recv(tensor)  # from any
        assert source == 0
        send(data(18), 0)
        works = [isend(data(19), 0), irecv(tensor, 0)]
    answers = [work.wait() for work in works]
    batch = torch.empty(4)
    operations = [dist.P2POp(dist.isend, data(20), OTHER), dist.P2POp(dist.irecv, batch, OTHER)]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    spoil(tensor, batch)
    if RANK == 0:
        note("send_0.input", data(17, 0))
        note("recv_0.output", data(18, 1))
    else:
        note("recv_0.output", data(17, 0))
        note("send_0.input", data(18, 1))
    note("send_1.input", data(19))
    note("recv_1.output", data(19, OTHER))
    note("send_2.input", data(20))
    note("recv_2.output", data(20, OTHER))
    return repr(answers)


@scenario
def coalesced() -> None:
    tensors = [data(21), data(22)]
    with dist.distributed_c10d._coalescing_manager():
        for tensor in tensors:
            dist.all_reduce(tensor)
    spoil(*tensors)
    note("all_reduce_coalesced_0.input_0", data(21))
    note("all_reduce_coalesced_0.input_1", data(22))
    note("all_reduce_coalesced_0.output_0", total(21))
    note("all_reduce_coalesced_0.output_1", total(22))


@scenario
def functional_forms() -> None:
    world = dist.group.WORLD
    results = [
        functional.all_reduce(data(23), "sum", world),
        functional.all_gather_tensor(data(24), 0, world),
        functional.reduce_scatter_tensor(data(25), "sum", 0, world),
        functional.all_to_all_single(data(26), None, None, world),
        functional.broadcast(data(27), 0, world),
        *functional.all_reduce_coalesced([data(28), data(29)], "sum", world),
    ]
    for result in results:
        spoil(functional.wait_tensor(result))
    mine = slice(2 * RANK, 2 * RANK + 2)
    note("all_reduce_0.input", data(23))
    note("all_reduce_0.output", total(23))
    note("all_gather_into_tensor_0.input", data(24))
    note("all_gather_into_tensor_0.output", torch.cat(both(24)))
    note("reduce_scatter_tensor_0.input", data(25))
    note("reduce_scatter_tensor_0.output", total(25)[mine])
    note("all_to_all_single_0.input", data(26))
    note("all_to_all_single_0.output", torch.cat([data(26, rank)[mine] for rank in range(SIZE)]))
    if RANK == 0:
        note("broadcast_0.input", data(27, 0))
    note("broadcast_0.output", data(27, 0))
    note("all_reduce_coalesced_0.input_0", data(28))
    note("all_reduce_coalesced_0.input_1", data(29))
    note("all_reduce_coalesced_0.output_0", total(28))
    note("all_reduce_coalesced_0.output_1", total(29))


@scenario
def compiled() -> None:
    run = torch.compile(lambda x: functional.all_reduce(2 * x, "sum", dist.group.WORLD) - 1, backend="aot_eager")
    torch.testing.assert_close(run(data(30)), (2 * total(30) - 1).float())
    note("all_reduce_0.input", 2 * data(30))
    note("all_reduce_0.output", 2 * total(30))


@scenario
def without_gradients() -> None:
    with torch.no_grad():
        all_reduce(data(31))
    with torch.inference_mode():
        all_reduce(data(32))
    for number, seed in enumerate((31, 32)):
        note(f"all_reduce_{number}.input", data(seed))
        note(f"all_reduce_{number}.output", total(seed))


@scenario
def groups() -> None:
    all_reduce(data(33), group=NAMED)
    all_reduce(data(34), group=UNNAMED)
    all_reduce(data(35))
    names = "all_reduce[pipeline]_0", f"all_reduce[{UNNAMED.group_name}]_0", "all_reduce_0"
    for name, seed in zip(names, (33, 34, 35), strict=True):
        note(f"{name}.input", data(seed))
        note(f"{name}.output", total(seed))


def twin_gradients(model: nn.Module, seed: int) -> list[torch.Tensor]:
    """The gradients of each rank, flat, in the order of the parameters."""
    found = []
    for rank in range(SIZE):
        model.zero_grad()
        model(data(seed, rank).reshape(1, 4)).sum().backward()
        found.append(torch.cat([parameter.grad.flatten() for parameter in model.parameters()]))
    return found


def pair(size: int = 4) -> tuple[nn.Module, nn.Module]:
    made = []
    for _ in range(2):
        torch.manual_seed(3)
        made.append(nn.Linear(4, size, bias=False))
    return made[0], made[1]


@scenario
def reducer_of_ddp() -> None:
    """From C++; the script changes the bucket, which the gradient is a view of, as soon as backward has returned."""
    model, twin = pair()
    wrapped = BUILT["views"]
    model = wrapped.module
    wrapped(data(36).reshape(1, 4)).sum().backward()
    spoil(*(parameter.grad for parameter in model.parameters()))
    model.zero_grad()
    note("all_reduce_0.input", twin_gradients(twin, 36)[RANK] / SIZE)
    note("all_reduce_0.output", sum(twin_gradients(twin, 36)) / SIZE)


@scenario
def communication_hook() -> None:
    """Of the user, in Python; its callback changes the result in place."""
    _, twin = pair()
    wrapped = BUILT["hooked"]
    wrapped(data(37).reshape(1, 4)).sum().backward()
    mean = sum(twin_gradients(twin, 37)) / SIZE
    torch.testing.assert_close(wrapped.module.weight.grad.flatten(), mean)
    wrapped.module.zero_grad()
    note("all_reduce_0.input", twin_gradients(twin, 37)[RANK])
    note("all_reduce_0.output", sum(twin_gradients(twin, 37)))


@scenario
def buffers_of_ddp() -> None:
    """Broadcast from C++ before the forward pass, which then changes them."""
    wrapped = BUILT["buffers"]
    buffers = [buffer.clone() for buffer in wrapped.module.buffers()]
    wrapped(data(38, RANK, 8).reshape(2, 4))
    if RANK == 0:
        note("broadcast_0.input", torch.cat(buffers[:2]))
    note("broadcast_0.output", torch.cat([torch.full((4,), 5.0), torch.full((4,), 9.0)]))
    if RANK == 0:
        note("broadcast_1.input", buffers[2])
    note("broadcast_1.output", torch.tensor(3))


@scenario
def sharded_by_fsdp2() -> None:
    sharded(BUILT["fsdp2"], 39, "all_gather_into_tensor_0")


@scenario
def sharded_by_fsdp1() -> None:
    sharded(BUILT["fsdp1"], 40, "all_gather_0")


def sharded(model: nn.Module, seed: int, gather: str) -> None:
    _, twin = pair()
    model(data(seed).reshape(1, 4)).sum().backward()
    model.zero_grad()
    shards = twin.weight.detach().flatten().chunk(SIZE)
    note(f"{gather}.input", shards[RANK])
    if gather == "all_gather_0":
        for number in range(SIZE):
            note(f"{gather}.output_{number}", shards[number])
    else:
        note(f"{gather}.output", torch.cat(shards))
    own = twin_gradients(twin, seed)
    divided = SIZE if gather == "all_gather_0" else 1  # FSDP1 divides before, FSDP2 lets the backend divide
    note("reduce_scatter_tensor_0.input", own[RANK] / divided)
    note("reduce_scatter_tensor_0.output", (sum(own) / SIZE).chunk(SIZE)[RANK])


def build() -> dict[str, Any]:
    def hook(state: Any, bucket: Any) -> Any:
        work = dist.all_reduce(bucket.buffer(), async_op=True)
        return work.get_future().then(lambda done: done.value()[0].div_(SIZE))

    hook.__annotations__.clear()  # DDP compares them with its classes, and these are strings
    views = DistributedDataParallel(pair()[0], gradient_as_bucket_view=True)
    hooked = DistributedDataParallel(pair()[0])
    hooked.register_comm_hook(None, hook)
    buffers = DistributedDataParallel(nn.BatchNorm1d(4))
    with torch.no_grad():
        for buffer, value in zip(buffers.module.buffers(), (5, 9, 3), strict=True):
            buffer.fill_(value + 10 * RANK)
    for wrapped in (views, hooked):  # the first pass is followed by another layout of the buckets
        for _ in range(2):
            wrapped(torch.ones(1, 4)).sum().backward()
        wrapped.module.zero_grad()
    fsdp1 = FullyShardedDataParallel(pair()[0], device_id=torch.device("cpu"), use_orig_params=True)
    fsdp2 = fully_shard(pair()[0])
    for model in (fsdp1, fsdp2):
        model(torch.ones(1, 4)).sum().backward()
        model.zero_grad()
    return {"views": views, "hooked": hooked, "buffers": buffers, "fsdp1": fsdp1, "fsdp2": fsdp2}


if __name__ == "__main__":
    dist.init_process_group("gloo")
    NAMED, UNNAMED = dist.new_group([0, 1], group_desc="pipeline"), dist.new_group([0, 1])
    BUILT = build()
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    names = sys.argv[1:] or list(SCENARIOS)
    results = {}
    for step, name in enumerate(names):
        ROWS.clear()
        told = SCENARIOS[name]()
        results[name] = {"step": step, "rows": list(ROWS), "told": told}
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
    Path(os.environ["TRUTH"] + str(RANK)).write_text(json.dumps(results))
    dist.destroy_process_group()
    time.sleep(0.2)  # for gloo's threads, as in conftest.SETTLE
