"""What torch.distributed sends and receives, told to whoever listens.

Every process group hands its calls to operators of the ``c10d`` namespace: those of ``torch.distributed`` under whatever
name they were imported, functional collectives, DDP's reducer in C++, FSDP. A Python kernel of ours stands before the
backend's at the dispatch key ``BackendSelect``, which takes part in every call, also under ``no_grad`` and
``inference_mode``. It passes everything on, so that whoever called gets the backend's own ``Work``.

Nothing is ever waited for. Outputs are read by whoever has waited, on its thread and stream: after ``Work.wait`` or
``Future.wait``, after ``wait_tensor`` of functional collectives, after the C++ function with which DDP broadcasts buffers, at
the end of a backward pass for DDP's reducer. What nobody waits for is read once it is complete. The backend's own threads
run no code of ours, unless the script has put a callback of its own on a future: then ours comes before it.
"""

from __future__ import annotations

import contextlib
import inspect
import sys
import threading
from dataclasses import dataclass, field
from threading import get_ident
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
import torch.distributed as dist

from msmon import log
from msmon.backends.pytorch import events
from msmon.backends.pytorch.devices import capturing
from msmon.backends.pytorch.internals import graph_task
from msmon.runtime.frames import folder_of, frames_from
from msmon.runtime.guard import Guard
from msmon.runtime.ledger import Ledger

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import FrameType

    from torch import Tensor

_AUTOGRAD = folder_of(torch.autograd)


class _Operator(NamedTuple):
    """An operator of ``c10d``.

    Attributes:
        name: As ``torch.distributed`` calls it.
        inputs: Argument with what is sent.
        outputs: Argument with what is received.
        inputs_at_root: Only the root rank sends.
        outputs_at_root: Only the root rank receives.
    """

    name: str
    inputs: str = ""
    outputs: str = ""
    inputs_at_root: bool = False
    outputs_at_root: bool = False


_OPERATORS = {
    "allreduce_": _Operator("all_reduce", "tensors", "tensors"),
    "allreduce_coalesced_": _Operator("all_reduce_coalesced", "tensors", "tensors"),
    "broadcast_": _Operator("broadcast", "tensors", "tensors", inputs_at_root=True),
    "reduce_": _Operator("reduce", "tensors", "tensors", outputs_at_root=True),
    "allgather_": _Operator("all_gather", "input_tensors", "output_tensors"),
    "_allgather_base_": _Operator("all_gather_into_tensor", "input_tensor", "output_tensor"),
    "allgather_coalesced_": _Operator("all_gather_coalesced", "input_list", "output_lists"),
    "allgather_into_tensor_coalesced_": _Operator("all_gather_into_tensor_coalesced", "inputs", "outputs"),
    "gather_": _Operator("gather", "input_tensors", "output_tensors"),
    "scatter_": _Operator("scatter", "input_tensors", "output_tensors"),
    "reduce_scatter_": _Operator("reduce_scatter", "input_tensors", "output_tensors"),
    "_reduce_scatter_base_": _Operator("reduce_scatter_tensor", "input_tensor", "output_tensor"),
    "reduce_scatter_tensor_coalesced_": _Operator("reduce_scatter_tensor_coalesced", "inputs", "outputs"),
    "alltoall_": _Operator("all_to_all", "input_tensors", "output_tensors"),
    "alltoall_base_": _Operator("all_to_all_single", "input", "output"),
    "send": _Operator("send", inputs="tensors"),
    "recv_": _Operator("recv", outputs="tensors"),
    "recv_any_source_": _Operator("recv", outputs="tensors"),
}


@dataclass(eq=False)
class Call:
    """One call of an operator on this rank.

    Attributes:
        operator: Its name.
        group: The process group.
        inputs: What this rank sends.
        outputs: What it receives.
        caller: Python's frame that made the call; only while it begins.
        work: The backend's handle.
        futures: Those that the script has asked the handle for.
        preceded: Whether a callback of ours comes before the script's.
        by_autograd: Made by C++ inside a backward pass, which waits before it ends.
        thread: Which has made it.
        seen: Listeners that want the outputs, with what each said when the call began.
    """

    operator: str
    group: Any
    inputs: list[Tensor]
    outputs: list[Tensor]
    caller: FrameType | None = None
    work: Any = None
    by_autograd: bool = False
    thread: int = 0
    preceded: bool = False
    futures: list[Any] = field(default_factory=list)
    seen: list[tuple[Listener, object]] = field(default_factory=list)


class Listener(Protocol):
    """Hears of calls. Its methods must not raise."""

    def collecting(self) -> bool:
        """Whether to tell it of calls now. All that is asked in a step that is not collected."""

    def begins(self, call: Call) -> object | None:
        """A call is about to be made; its inputs are what will be sent. ``None``: the outputs are not wanted."""

    def ends(self, call: Call, said: object) -> None:
        """The outputs are there. ``said`` is what :meth:`begins` returned. Maybe on another thread."""


_listeners: list[Listener] = []
_observer: _Observer | None = None


def subscribe(listener: Listener) -> bool:
    """Tell this listener of every call from now on.

    Returns:
        Whether this torch can; if not, why was said.
    """
    global _observer  # noqa: PLW0603 - torch has one table of operators a process
    if _observer is None:
        missing = _what_is_missing()
        if missing:
            log.say(f"communication is not recorded: {missing}", once="communication")
            return False
        _observer = Guard("observation of communication").run(_installed)
        if _observer is None:
            return False
    _listeners.append(listener)
    return True


def _installed() -> _Observer:
    observer = _Observer()
    try:
        observer.install()
    except BaseException:
        observer.remove()
        raise
    return observer


def unsubscribe(listener: Listener) -> None:
    """Tell this listener nothing more."""
    global _observer  # noqa: PLW0603 - as above
    if listener in _listeners:
        _listeners.remove(listener)
        if not _listeners and _observer is not None:
            _observer.remove()
            _observer = None


@contextlib.contextmanager
def settled() -> Iterator[None]:
    """Outputs that are complete have been read, and none is being read, on any thread, as long as this lasts."""
    if _observer is None:
        yield
        return
    _observer.guard.run(_observer.settle, backward_over=True)
    with _observer.lock:
        yield


def start_anew() -> None:
    """After a fork: the parent's calls are the parent's."""
    if _observer is not None:
        _observer.lock = threading.RLock()
        _observer.pending.clear()
        _observer.coalescing.clear()


def call_stack(caller: FrameType | None) -> Iterator[FrameType]:
    """The frames that led to a call, innermost first, without msmon's.

    A device's autograd thread has no frames of the script: there the frames of ``backward()``'s caller follow.
    """
    yield from frames_from(caller)
    if graph_task() != -1:
        yield from _frames_of_waiting_backward()


def _frames_of_waiting_backward() -> Iterator[FrameType]:
    thread = events.waiting_for_backward()
    if thread is not None and thread != get_ident():
        yield from frames_from(sys._current_frames().get(thread))  # noqa: SLF001 - the only way to another thread's frames


def _what_is_missing() -> str:
    if not dist.is_available():
        return "this torch was built without torch.distributed"
    handles = (dist.ProcessGroup, dist.distributed_c10d.Work)
    if "with_keyset" in inspect.signature(torch.library.Library.impl).parameters and all(
        hasattr(handle, "unbox") for handle in handles
    ):
        return ""
    return f"torch {torch.__version__} does not let Python see it before the backend does; use a newer one"


class _Registration:
    """Kernels in torch's table of operators, as a handle for the ledger."""

    def __init__(self, namespace: str) -> None:
        self._library = torch.library.Library(namespace, "IMPL")  # type: ignore[no-untyped-call]

    def add(self, name: str, kernel: Callable[..., Any]) -> None:
        self._library.impl(name, kernel, "BackendSelect", with_keyset=True)  # type: ignore[no-untyped-call]

    def remove(self) -> None:
        self._library._destroy()  # type: ignore[no-untyped-call]  # noqa: SLF001 - what torch itself calls when a library is collected


class _Observer:
    """Our kernels and patches, and the calls that are under way."""

    def __init__(self) -> None:
        self.guard = Guard("observation of communication")
        self.lock = threading.RLock()
        self.pending: dict[int, list[Call]] = {}
        self.coalescing: dict[str, list[Call]] = {}
        self._ledger = Ledger()
        self._told_at_end_of: int | None = None
        self._after = torch._C._dispatch_keyset_full_after(torch._C.DispatchKey.BackendSelect)  # noqa: SLF001
        self._unbox_group = dist.ProcessGroup.unbox
        self._work = dist.distributed_c10d.Work
        self._get_future = self._work.get_future
        self._add_done_callback = torch._C.Future.add_done_callback  # noqa: SLF001 - what get_future returns

    # In and out

    def install(self) -> None:
        operators = _Registration("c10d")
        self._ledger.keep(operators)
        for name, operator in _OPERATORS.items():
            packet = getattr(torch.ops.c10d, name, None)
            if packet is not None:
                operators.add(name, self._kernel(operator, packet.default))
        waiting = _Registration("_c10d_functional")
        self._ledger.keep(waiting)
        waiting.add("wait_tensor", self._wait_tensor_kernel(torch.ops._c10d_functional.wait_tensor.default))  # noqa: SLF001
        for owner in (self._work, *self._work.__subclasses__()):
            for name in ("wait", "synchronize", "block_current_stream", "is_completed"):
                if name in vars(owner):
                    self._ledger.patch(owner, name, self._wrap_wait)
        self._ledger.patch(self._work, "get_future", self._wrap_get_future)
        future = torch._C.Future  # noqa: SLF001 - as above
        self._ledger.patch(future, "wait", self._wrap_future_wait)
        self._ledger.patch(future, "then", self._wrap_then)
        self._ledger.patch(future, "add_done_callback", self._wrap_then)
        self._ledger.patch(dist, "_broadcast_coalesced", self._wrap_broadcast_coalesced)
        self._ledger.patch(dist.ProcessGroup, "_start_coalescing", self._wrap_start_coalescing)
        self._ledger.patch(dist.ProcessGroup, "_end_coalescing", self._wrap_end_coalescing)

    def remove(self) -> None:
        self._ledger.undo()
        with self.lock:
            self.pending.clear()
            self.coalescing.clear()

    # Calls

    def _kernel(self, operator: _Operator, overload: Any) -> Callable[..., Any]:  # noqa: ANN401 - torch gives operators no types
        after, redispatch = self._after, overload.redispatch
        places = {argument.name: place for place, argument in enumerate(overload._schema.arguments)}  # noqa: SLF001

        def kernel(keys: Any, *args: Any) -> Any:  # noqa: ANN401 - passes on whatever the operator takes and returns
            interested = self.guard.run(_interested)
            if not interested:
                return redispatch(keys & after, *args)
            call = self.guard.run(self._begin, operator, places, args, interested)
            result = redispatch(keys & after, *args)
            if call is not None:
                self.guard.run(self._issued, call, result)
            return result

        return kernel

    def _begin(
        self, operator: _Operator, places: dict[str, int], args: tuple[Any, ...], interested: list[Listener]
    ) -> Call | None:
        self.settle()
        inputs, outputs = (
            list(_tensors(args[places[name]])) if name else [] for name in (operator.inputs, operator.outputs)
        )
        if any(tensor.is_meta for tensor in (*inputs, *outputs)):
            return None  # a compiler traces
        group = self._unbox_group(args[places["process_group"]])
        if operator.inputs_at_root and args[places["root_rank"]] != group.rank():
            inputs = []
        if operator.outputs_at_root and args[places["root_rank"]] != group.rank():
            outputs = []
        single = max(len(inputs), len(outputs)) == 1  # how functional collectives call the plain operator
        name = operator.name.removesuffix("_coalesced") if single else operator.name
        caller = _outside()
        call = Call(name, group, inputs, outputs, caller, thread=get_ident())
        in_backward = graph_task() != -1
        call.by_autograd = in_backward and (caller is None or caller.f_code.co_filename.startswith(_AUTOGRAD))
        for listener in interested:
            said = listener.begins(call)
            if said is not None:
                call.seen.append((listener, said))
        call.caller = None
        call.inputs = []
        return call if call.seen else None

    def _issued(self, call: Call, result: Any) -> None:  # noqa: ANN401 - what the operator returned
        boxed = result[-1] if isinstance(result, (tuple, list)) else result
        work = self._work.unbox(boxed) if boxed is not None else None
        together = self.coalescing.get(call.group.group_name)
        if not call.outputs:
            self._finish(call)
        elif together is not None:
            together.append(call)  # it has not begun: its own handle says nothing
        else:
            self._await(work, [call])

    def _await(self, work: Any, calls: list[Call]) -> None:  # noqa: ANN401 - a Work
        if work is None:
            for call in calls:
                self._finish(call)
            return
        for call in calls:
            call.work = work
        self.pending[id(work)] = calls
        self._ask_for_end_of_backward()

    def _ask_for_end_of_backward(self) -> None:
        """Hear of the end of this backward pass after DDP has, which waits there and asks to be told later than now."""
        task = graph_task()
        if task in {-1, self._told_at_end_of}:
            return
        self._told_at_end_of = task
        queue = torch.autograd.Variable._execution_engine.queue_callback  # noqa: SLF001 - as DDP and FSDP do
        queue(lambda: queue(lambda: self.guard.run(self.settle, backward_over=True)))

    # Their ends

    def settle(self, *, backward_over: bool = False) -> None:
        """Read outputs that are there though nobody in Python has waited for them."""
        if not self.pending or capturing():
            return
        for call in [call for calls in tuple(self.pending.values()) for call in calls]:
            if self._complete(call) or (backward_over and call.by_autograd and not _on_host(call)):
                self._finish(call)

    def _complete(self, call: Call) -> bool:
        """Whether the outputs are there.

        In host memory the future says so a moment earlier than the handle, and it is the future that DDP waits for. On a
        device it says only that the call was enqueued.
        """
        if call.work.is_completed():
            return True
        try:
            return _on_host(call) and bool(self._get_future(call.work).done())
        except RuntimeError:  # point-to-point calls of gloo have none
            return False

    def _finish(self, call: Call) -> None:
        with self.lock:  # whoever comes second waits until the outputs have been read
            seen, call.seen = call.seen, []
            for listener, said in seen:
                listener.ends(call, said)
            self._forget(call)

    def _forget(self, call: Call) -> None:
        call.seen = []
        call.outputs = []
        others = [other for other in self.pending.get(id(call.work), ()) if other is not call]
        if others:
            self.pending[id(call.work)] = others
        else:
            self.pending.pop(id(call.work), None)

    def _calls_of(self, handle: object) -> list[Call]:
        calls = self.pending.get(id(handle), [])
        return [call for call in calls if call.work is handle]

    def _finish_all(self, calls: list[Call]) -> None:
        if not capturing():
            for call in calls:
                self._finish(call)

    def _wrap_wait(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def wait(work: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - passes on whatever torch takes and returns
            try:
                result = original(work, *args, **kwargs)
            except BaseException:
                for call in self._calls_of(work):
                    self._forget(call)
                raise
            if self.pending and result is not False:  # is_completed() may say no
                self.guard.run(self._finish_all, self._calls_of(work))
            return result

        return wait

    def _wrap_get_future(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def get_future(work: Any) -> Any:  # noqa: ANN401 - passes on whatever torch returns
            future = original(work)
            for call in self._calls_of(work):
                call.futures.append(future)
            return future

        return get_future

    def _wrap_then(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def then(future: Any, *args: Any) -> Any:  # noqa: ANN401 - passes on whatever torch takes and returns
            if self.pending:
                self.guard.run(self._precede, future)
            return original(future, *args)

        return then

    def _precede(self, future: Any) -> None:  # noqa: ANN401 - a Future
        """Read before a callback of the script, which may change an output in place.

        Only in host memory: a device runs each callback on a stream of its own, and none comes before another.
        """
        calls = [call for call in self._calls_with(future) if not call.preceded and _on_host(call)]
        for call in calls:
            call.preceded = True
        if calls:
            self._add_done_callback(future, lambda done: self.guard.run(self._arrived, calls, done))

    def _calls_with(self, future: Any) -> list[Call]:  # noqa: ANN401 - a Future
        every = [call for calls in tuple(self.pending.values()) for call in calls]
        return [call for call in every if any(known is future for known in call.futures)]

    def _arrived(self, calls: list[Call], future: Any) -> None:  # noqa: ANN401 - a Future
        try:
            future.value()
        except Exception:  # noqa: BLE001 - the backend's, whatever it is: the script will meet it itself
            for call in calls:
                self._forget(call)
        else:
            self._finish_all(calls)

    def _wrap_future_wait(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def wait(future: Any) -> Any:  # noqa: ANN401 - passes on whatever torch takes and returns
            result = original(future)
            if self.pending:
                self.guard.run(self._finish_all, self._calls_with(future))
            return result

        return wait

    def _wait_tensor_kernel(self, overload: Any) -> Callable[..., Any]:  # noqa: ANN401 - torch gives operators no types
        after, redispatch = self._after, overload.redispatch

        def kernel(keys: Any, tensor: Tensor) -> Any:  # noqa: ANN401 - passes on what the operator returns
            result = redispatch(keys & after, tensor)
            if self.pending:
                self.guard.run(self._waited_for_tensor, tensor)
            return result

        return kernel

    def _waited_for_tensor(self, tensor: Tensor) -> None:
        if tensor.is_meta:
            return  # a compiler traces
        place = tensor.untyped_storage().data_ptr()
        for call in [call for calls in tuple(self.pending.values()) for call in calls]:
            if any(output.untyped_storage().data_ptr() == place for output in call.outputs):
                self._finish_all([call])

    def _wrap_broadcast_coalesced(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def broadcast_coalesced(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - passes on whatever torch takes and returns
            before = set(self.pending)
            result = original(*args, **kwargs)
            mine = [calls for handle, calls in tuple(self.pending.items()) if handle not in before]
            self.guard.run(self._finish_all, [call for calls in mine for call in calls if call.thread == get_ident()])
            return result

        return broadcast_coalesced

    # Calls that a backend makes together: torch calls these two for NCCL's point-to-point batches

    def _wrap_start_coalescing(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def start(group: Any, *args: Any) -> Any:  # noqa: ANN401 - passes on whatever torch takes and returns
            result = original(group, *args)
            self.coalescing[group.group_name] = []
            return result

        return start

    def _wrap_end_coalescing(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def end(group: Any, *args: Any) -> Any:  # noqa: ANN401 - passes on whatever torch takes and returns
            calls = self.coalescing.pop(group.group_name, [])
            work = original(group, *args)
            if calls:
                self.guard.run(self._await, work, calls)
            return work

        return end


def _interested() -> list[Listener]:
    return [listener for listener in tuple(_listeners) if listener.collecting()]


def _tensors(value: Any) -> Iterator[Tensor]:  # noqa: ANN401 - a tensor, a list, or a list of lists
    if isinstance(value, torch.Tensor):
        yield value
    else:
        for part in value:
            yield from _tensors(part)


def _outside() -> FrameType | None:
    """The nearest frame that is not msmon's."""
    return next(frames_from(inspect.currentframe()), None)


def _on_host(call: Call) -> bool:
    return all(output.device.type == "cpu" for output in call.outputs)
