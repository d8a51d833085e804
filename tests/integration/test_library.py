"""``TrainerMon``: the calls, their arguments, and what they leave behind."""

from __future__ import annotations

import gc
import json
import os
import signal
import sys
import threading
import time
import weakref
from typing import TYPE_CHECKING, Any

import pytest
import torch
from integration.truth import batch, net
from torch._subclasses.fake_tensor import FakeTensorMode

from msmon.backends.pytorch import session
from msmon.errors import ArgumentError, ConfigError, MsmonError
from msmon.offline.reader import read_kind, read_steps, run_directories
from msmon.pytorch import TrainerMon
from msmon.runtime.frames import MSMON
from msmon.runtime.run_directory import RunDirectory

if TYPE_CHECKING:
    from conftest import Runner
    from integration.conftest import Room


def train(model: Any, optimizer: torch.optim.Optimizer, steps: int = 2, first: int = 0) -> list[float]:
    """Gradient norms of the first weight, step by step."""
    norms = []
    for step in range(first, first + steps):
        optimizer.zero_grad()
        model(batch(step)).pow(2).mean().backward()
        norms.append(float(next(iter(model.parameters())).grad.double().norm()))
        optimizer.step()
    return norms


def model_and_optimizer(name: str = "Net") -> tuple[Any, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = net(name)
    return model, torch.optim.Adam(model.parameters(), lr=0.1)


def test_rows_of_a_training(room: Room) -> None:
    """set_monitor(model, 1, optimizer): gradients step by step, counted from start_iteration (P7)."""
    model, optimizer = model_and_optimizer()
    room.monitor().set_monitor(model, 1, optimizer, start_iteration=10)
    norms = train(model, optimizer, 3)
    for kind in ("grad_reduced", "grad_unreduced"):
        rows = [row for row in room.rows(kind) if row.name == "0.weight"]
        assert [row.step for row in rows] == [10, 11, 12]
        assert [row["norm"] for row in rows] == pytest.approx(norms)


@pytest.mark.parametrize("arguments", [(), (1,)])
def test_optimizer_may_come_second(room: Room, arguments: tuple[int, ...]) -> None:
    """set_monitor(model, optimizer[, grad_acc_steps]) is understood, too."""
    model, optimizer = model_and_optimizer()
    room.monitor().set_monitor(model, optimizer, *arguments)  # type: ignore[arg-type]
    train(model, optimizer)
    assert len(room.rows("grad_reduced")) == 8


def test_names_keep_the_prefixes_of_the_model_given(room: Room) -> None:
    """Through the library names are those of the model given, wrapper prefixes included, as in the original."""
    model, optimizer = model_and_optimizer()
    wrapper = torch.nn.DataParallel(model)
    room.monitor().set_monitor(wrapper, 1, optimizer)
    train(model, optimizer)
    assert {row.name for row in room.rows("grad_reduced")} == {f"module.{name}" for name, _ in model.named_parameters()}


def test_targets_match_either_form_of_a_name(room: Room) -> None:
    """A target matches names with and without wrapper prefixes."""
    model, optimizer = model_and_optimizer()
    wrapper = torch.nn.DataParallel(model)
    room.monitor(targets={"0.weight": {}}).set_monitor(wrapper, 1, optimizer)
    train(model, optimizer)
    assert {row.name for row in room.rows("grad_reduced")} == {"module.0.weight"}


def test_chunks_have_their_stage(room: Room) -> None:
    """A list of chunks: equal names are told apart by vpp_stage."""
    chunks = [torch.nn.Linear(4, 4), torch.nn.Linear(4, 1)]
    optimizer = torch.optim.SGD([p for chunk in chunks for p in chunk.parameters()], lr=0.1)
    room.monitor().set_monitor(chunks, 1, optimizer)
    train(torch.nn.Sequential(*chunks), optimizer, 1)
    assert {(row.stage, row.name) for row in room.rows("grad_reduced")} == {
        (stage, name) for stage in (0, 1) for name in ("weight", "bias")
    }


def test_micro_batches_as_the_user_counts_them(room: Room) -> None:
    """grad_acc_steps is the user's word: a further backward pass of a step overwrites its last micro-batch."""
    model, optimizer = model_and_optimizer()
    room.monitor(monitor_mbs_grad=True).set_monitor(model, 2, optimizer)
    for micro in range(3):
        model(batch(micro)).mean().backward()
    optimizer.step()
    assert {row.micro_step for row in room.rows("grad_unreduced")} == {0, 1}


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("no module", 1, "optimizer"), "`model` must be a torch.nn.Module"),
        (([], 1, "optimizer"), "`model` is an empty list"),
        (("model", 0, "optimizer"), "`grad_acc_steps` must be a whole number, 1 or more"),
        (("model", "two", "optimizer"), "`grad_acc_steps`"),
        (("model", 1.5, "optimizer"), "`grad_acc_steps`"),
        (("model", True, "optimizer"), "`grad_acc_steps`"),
        (("model", 1, None), "`optimizer` must be a torch.optim.Optimizer"),
        (("model", 1, "no optimizer"), "`optimizer`"),
        (("model", 1, "optimizer", None, None, -1), "`start_iteration` must be a whole number, 0 or more"),
    ],
)
def test_wrong_arguments_are_named(room: Room, arguments: tuple[Any, ...], named: str) -> None:
    """A wrong argument is an ArgumentError (a TypeError) that names it, what is wanted and what came; nothing is watched."""
    model, optimizer = model_and_optimizer()
    real = [{"model": model, "optimizer": optimizer}.get(a, a) if isinstance(a, str) else a for a in arguments]
    monitor = room.monitor()
    with pytest.raises(ArgumentError) as caught:
        monitor.set_monitor(*real)
    assert named in str(caught.value)
    assert isinstance(caught.value, (TypeError, MsmonError))
    train(model, optimizer, 1)
    assert not room.rows("grad_reduced")


def test_wrong_constructor_arguments(room: Room) -> None:
    """A missing file and a non-boolean flag are refused before anything is patched."""
    backward = torch.autograd.backward
    with pytest.raises(ConfigError, match="cannot read the file"):
        TrainerMon(room.folder / "absent.json")
    with pytest.raises(ArgumentError, match="params_have_main_grad"):
        TrainerMon(room.folder / "absent.json", None, "yes")  # type: ignore[arg-type]
    assert torch.autograd.backward is backward


def test_ops_may_change_while_training(room: Room) -> None:
    """Setting ops in the middle of a step: the step under way ends under the old ones, the next has the new columns."""
    model, optimizer = model_and_optimizer()
    monitor = room.monitor(ops=["norm"])
    monitor.set_monitor(model, 1, optimizer)
    train(model, optimizer, 1)
    optimizer.zero_grad()
    model(batch(1)).mean().backward()
    monitor.ops = ["max", "min"]
    assert monitor.ops == ["max", "min"]
    optimizer.step()
    train(model, optimizer, 1)
    columns = {row.step: set(row.values) - {"shape", "dtype"} for row in room.rows("grad_unreduced")}
    assert columns == {0: {"norm"}, 1: {"norm"}, 2: {"max", "min"}}


def test_ops_set_before_training_hold_from_the_first_step(room: Room) -> None:
    """Setting ops before anything was recorded applies at once; an unknown one is refused."""
    model, optimizer = model_and_optimizer()
    monitor = room.monitor(ops=["norm"])
    monitor.set_monitor(model, 1, optimizer)
    with pytest.raises(ConfigError, match="unknown value"):
        monitor.ops = ["nrom"]
    monitor.ops = ["mean"]
    train(model, optimizer, 1)
    assert {tuple(row.values) for row in room.rows("grad_reduced")} == {("mean", "shape", "dtype")}


def test_current_gradients_on_request(room: Room) -> None:
    """generate_wgrad_metrics: (reduced, unreduced) by name and statistic, as they are now; empty without wg_distribution."""
    model, optimizer = model_and_optimizer()
    monitor = room.monitor(ops=["norm", "max"])
    monitor.set_monitor(model, 1, optimizer)
    assert monitor.generate_wgrad_metrics() == ({}, {})
    model(batch(0)).mean().backward()
    true = {
        name: {"norm": float(p.grad.double().norm()), "max": float(p.grad.max())}
        for name, p in model.named_parameters()
    }
    for metrics in monitor.generate_wgrad_metrics():
        assert {name: pytest.approx(values) for name, values in metrics.items()} == true
    assert monitor.generate_xy_metrics() == ({}, {})
    off = room.monitor(wg_distribution=False)
    off.set_monitor(model, 1, optimizer)
    assert off.generate_wgrad_metrics() == ({}, {})


def test_calls_that_go_away_work_and_warn_once(room: Room, capfd: pytest.CaptureFixture[str]) -> None:
    """set_wrapped_optimizer and monitor_gnorm_with_ad work, and name set_monitor once each."""
    for name in ("A", "B"):
        model, optimizer = model_and_optimizer(name)
        monitor = room.monitor()
        monitor.set_wrapped_optimizer(optimizer)
        monitor.monitor_gnorm_with_ad(model, 1)
        train(model, optimizer, 1)
    assert len(room.rows("grad_reduced")) == 8
    said = capfd.readouterr().err
    assert said.count("set_wrapped_optimizer goes away: pass the optimizer to set_monitor") == 1
    assert said.count("monitor_gnorm_with_ad goes away: call set_monitor") == 1


def test_main_grad_where_there_is_none(room: Room, capfd: pytest.CaptureFixture[str]) -> None:
    """B24: the default params_have_main_grad=True on a plain model reads .grad and says so once."""
    for name in ("A", "B"):
        model, optimizer = model_and_optimizer(name)
        room.monitor(params_have_main_grad=True).set_monitor(model, 1, optimizer)
        norms = train(model, optimizer, 1)
    assert [row["norm"] for row in room.rows("grad_reduced") if row.name == "0.weight"][-1:] == pytest.approx(norms)
    assert capfd.readouterr().err.count("no parameter has main_grad: reading .grad") == 1


@pytest.mark.parametrize("flag", [True, False])
def test_main_grad_where_there_is_one(room: Room, flag: bool) -> None:
    """With main_grad on the parameters it is the reduced gradient, unless params_have_main_grad says no."""
    model, optimizer = model_and_optimizer()
    for parameter in model.parameters():
        parameter.main_grad = torch.full_like(parameter, 3.0)
    room.monitor(params_have_main_grad=flag).set_monitor(model, 1, optimizer)
    norms = train(model, optimizer, 1)
    (row,) = (row for row in room.rows("grad_reduced") if row.name == "0.weight")
    assert row["norm"] == pytest.approx(3.0 * 12**0.5 if flag else norms[0])


def test_wrapper_around_the_optimizer_is_looked_into(room: Room) -> None:
    """A wrapper with .optimizer, as frameworks make them, is accepted."""
    model, optimizer = model_and_optimizer()
    wrapper = type("Wrapper", (), {})()
    wrapper.optimizer = optimizer
    room.monitor().set_monitor(model, 1, wrapper)
    train(model, optimizer)
    assert len(room.rows("grad_reduced")) == 8


def test_second_call_for_a_model_goes_on(room: Room) -> None:
    """B6: watching a model again, with the same optimizer or a new one, goes on with its count and writes each row once."""
    model, optimizer = model_and_optimizer()
    monitor = room.monitor()
    monitor.set_monitor(model, 1, optimizer)
    train(model, optimizer)
    monitor.set_monitor(model, 1, optimizer)
    train(model, optimizer, 1)
    other = torch.optim.SGD(model.parameters(), lr=0.1)
    monitor.set_monitor(model, 1, other)
    train(model, other, 2)
    keys = [(row.name, row.step) for row in room.rows("grad_reduced")]
    assert len(keys) == len(set(keys)) == 4 * 5


def test_optimizer_inside_the_one_given_counts(room: Room) -> None:
    """An optimizer whose own step is never called (SAM): the steps of the one on the same parameters are recorded."""
    model, outer = model_and_optimizer()
    room.monitor().set_monitor(model, 1, outer)
    train(model, torch.optim.SGD(model.parameters(), lr=0.1), 3)
    assert {row.step for row in room.rows("grad_reduced")} == {0, 1, 2}


def test_two_monitors_on_one_model(room: Room) -> None:
    """Two monitors on shared parameters both have all their rows."""
    model, optimizer = model_and_optimizer()
    for _ in range(2):
        room.monitor().set_monitor(model, 1, optimizer)
    train(model, optimizer, 2)
    assert len(room.rows("grad_unreduced")) == 2 * 2 * 4


def test_two_models_in_one_monitor(room: Room) -> None:
    """Two pairs of model and optimizer: the second's names begin with its class, so that no row is taken for another's."""
    monitor = room.monitor()
    pairs = [model_and_optimizer("First"), model_and_optimizer("Second")]
    for model, optimizer in pairs:
        monitor.set_monitor(model, 1, optimizer)
    norms = [train(model, optimizer, 1, first=number) for number, (model, optimizer) in enumerate(pairs)]
    found = {row.name: row["norm"] for row in room.rows("grad_reduced")}
    assert len(found) == 8
    assert [found["0.weight"], found["Second.0.weight"]] == pytest.approx([norm for (norm,) in norms])


def test_current_gradients_of_chunks(room: Room) -> None:
    """generate_wgrad_metrics of several chunks tells equal names apart by their stage."""
    chunks = [torch.nn.Linear(4, 4), torch.nn.Linear(4, 1)]
    monitor = room.monitor()
    monitor.set_monitor(chunks, 1, torch.optim.SGD([p for chunk in chunks for p in chunk.parameters()], lr=0.1))
    torch.nn.Sequential(*chunks)(batch(0)).sum().backward()
    for metrics in monitor.generate_wgrad_metrics():
        assert metrics.keys() == {f"{stage}:{name}" for stage in (0, 1) for name in ("weight", "bias")}


def test_closing_writes_the_step_under_way(room: Room) -> None:
    """close() loses nothing: a backward pass whose step has not come is written as an incomplete step."""
    model, optimizer = model_and_optimizer()
    monitor = room.monitor()
    monitor.set_monitor(model, 1, optimizer)
    train(model, optimizer, 1)
    optimizer.zero_grad()
    model(batch(5)).mean().backward()
    monitor.close()
    assert {row.step for row in room.rows("grad_unreduced")} == {0, 1}
    assert {row.step for row in room.rows("grad_reduced")} == {0}


def traces() -> dict[str, Any]:
    """Everything global that a monitor might change."""
    optimizer_module = sys.modules[torch.optim.Optimizer.__module__]
    owners = (torch, torch.autograd, torch.optim.Optimizer, torch.amp.GradScaler, torch.utils.hooks, torch.nn.Module)
    return {
        **{
            f"{owner.__name__}.{key}": id(value)
            for owner in owners
            for key, value in vars(owner).items()
            if callable(value)
        },
        "step hooks": (
            list(optimizer_module._global_optimizer_pre_hooks),
            list(optimizer_module._global_optimizer_post_hooks),
        ),
        "module hooks": [
            len(v) for k, v in vars(torch.nn.modules.module).items() if k.startswith("_global") and isinstance(v, dict)
        ],
        "threads": sorted(thread.name for thread in threading.enumerate() if thread.name.startswith("msmon")),
        "signals": [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)],
        "wakeup": _wakeup(),
    }


def _wakeup() -> int:
    descriptor = signal.set_wakeup_fd(-1)
    signal.set_wakeup_fd(descriptor)
    return descriptor


def test_attaching_and_detaching_leaves_no_trace(room: Room) -> None:
    """Ten times attach, train, detach: patches, hooks, handlers, threads and descriptors are as before, each time."""
    model, optimizer = model_and_optimizer()
    train(model, optimizer, 1)
    before = traces()
    for _ in range(10):
        monitor = room.monitor(param_distribution=True, mv_distribution=True)
        monitor.set_monitor(model, 1, optimizer)
        train(model, optimizer, 2)
        assert traces() != before
        monitor.close()
        for thread in [thread for thread in threading.enumerate() if thread.name.startswith("msmon")]:
            thread.join(30)
        now = traces()
        assert {key for key in now if now[key] != before[key]} == set()
        assert not any(p._post_accumulate_grad_hooks for p in model.parameters())
        assert not optimizer._optimizer_step_pre_hooks


def steps_of(room: Room) -> list[dict[str, str]]:
    for monitor in room.monitors:
        monitor.close()
    return [line for directory in run_directories(room.folder / "out") for line in read_steps(directory)]


def test_another_default_device(room: Room) -> None:
    """A default device that is not the CPU changes nothing for a model that is on the CPU."""
    model = net("Net")
    torch.set_default_device("meta")
    try:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        room.monitor().set_monitor(model, grad_acc_steps=1, optimizer=optimizer)
        for step in range(2):
            optimizer.zero_grad()
            model(batch_on_cpu(step)).pow(2).mean().backward()
            optimizer.step()
    finally:
        torch.set_default_device(None)
    assert {row.step for row in room.rows("grad_unreduced")} == {0, 1}


def batch_on_cpu(step: int) -> torch.Tensor:
    return torch.randn(8, 4, generator=torch.Generator("cpu").manual_seed(step), device="cpu")


def test_an_optimizer_with_attributes_of_its_own(room: Room, capfd: pytest.CaptureFixture[str]) -> None:
    """What an optimizer calls ``grad_scale`` and ``found_inf`` itself is not taken for what a GradScaler leaves there."""

    class Own(torch.optim.Optimizer):
        grad_scale, found_inf = 4.0, False

        @torch.no_grad()
        def step(self, closure: Any = None) -> None:
            for group in self.param_groups:
                for parameter in group["params"]:
                    parameter.sub_(parameter.grad, alpha=group["lr"])

    model = net("Net")
    optimizer = Own(model.parameters(), {"lr": 0.1})
    room.monitor().set_monitor(model, grad_acc_steps=1, optimizer=optimizer)
    norms = train(model, optimizer)
    name = "0.weight"
    assert [row["norm"] for row in room.rows("grad_reduced") if row.name == name] == pytest.approx(norms, rel=1e-12)
    assert "switched off" not in capfd.readouterr().err


@pytest.mark.parametrize("of_module", [True, False])
def test_gradients_thrown_away_in_place(room: Room, of_module: bool) -> None:
    """A pass whose gradients are zeroed in place, by the module or the optimizer, is no micro-batch of the step."""
    model = net("Net")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    room.monitor(monitor_mbs_grad=True).set_monitor(model, grad_acc_steps=2, optimizer=optimizer)
    for step in range(2):
        model(batch(100 + step)).pow(2).mean().backward()
        (model if of_module else optimizer).zero_grad(set_to_none=False)
        model(batch(step)).pow(2).mean().backward()
        optimizer.step()
        model.zero_grad()
    assert {row.micro_step for row in room.rows("grad_unreduced")} == {0}
    assert [line["micro_steps"] for line in steps_of(room)] == ["1", "1"]


class Meeting(torch.autograd.Function):
    """Lets two backward passes wait for each other in their middle."""

    barrier = threading.Barrier(2)

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        Meeting.barrier.wait(60)
        return gradient


def test_backward_passes_of_two_threads_at_once(room: Room) -> None:
    """Two models trained in two threads at the same time have one micro-batch a step each."""
    models = [net("First"), net("Second")]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
    monitor = room.monitor()
    for model, optimizer in zip(models, optimizers, strict=True):
        monitor.set_monitor(model, grad_acc_steps=1, optimizer=optimizer)

    def work(model: Any, optimizer: torch.optim.Optimizer) -> None:
        for step in range(5):
            optimizer.zero_grad()
            model[2](Meeting.apply(model[1](model[0](batch(step))))).pow(2).mean().backward()
            optimizer.step()

    threads = [threading.Thread(target=work, args=pair) for pair in zip(models, optimizers, strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [line["micro_steps"] for line in steps_of(room)] == ["1"] * 10


def test_first_steps_of_two_threads_at_once(room: Room, monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread that comes second waits for the directory as well, so that its first step is recorded too."""
    models = [net("First"), net("Second")]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
    monitor = room.monitor()
    for model, optimizer in zip(models, optimizers, strict=True):
        monitor.set_monitor(model, grad_acc_steps=1, optimizer=optimizer)
    make, open_output = session.make_run_directory, session.Session.open
    entered = set()

    def make_when_both_want_it(*args: Any, **options: Any) -> Any:
        while len(entered) < 2:
            time.sleep(0.01)
        time.sleep(0.1)  # for the one that does not wait to get ahead
        return make(*args, **options)

    def note_and_open(self: Any) -> None:
        entered.add(threading.get_ident())
        open_output(self)

    monkeypatch.setattr(session, "make_run_directory", make_when_both_want_it)
    monkeypatch.setattr(session.Session, "open", note_and_open)
    threads = [threading.Thread(target=train, args=(*pair, 1)) for pair in zip(models, optimizers, strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(line["step"] for line in steps_of(room)) == ["0", "0"]


def test_documents_are_not_written_by_the_thread_that_trains(room: Room, monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk that hangs keeps no training: run.json, whenever it changes, and stacks are written by other threads."""
    threads = []

    def noted(write: Any) -> Any:
        def note(*args: Any) -> None:
            threads.append(threading.current_thread().name)
            write(*args)

        return note

    for name in ("describe", "add"):
        monkeypatch.setattr(RunDirectory, name, noted(getattr(RunDirectory, name)))
    model, optimizer = model_and_optimizer()
    monitor = room.monitor(xy_distribution=True, all_xy=True, stack_info=True, mv_distribution=True)
    monitor.set_monitor(model, 1, optimizer)
    train(model, optimizer)
    later = torch.optim.SGD(model.parameters(), lr=0.1)
    monitor.set_monitor(model, 1, later)
    train(model, later, 2)
    written = list(threads)
    assert "msmon-opening" in written
    assert set(written) <= {"msmon-opening", "msmon-writer"}
    (directory,) = (room.rows("grad_reduced"), run_directories(room.folder / "out"))[1]
    assert json.loads((directory / "run.json").read_text())["models"][0]["optimizers"] == ["Adam", "SGD"]
    assert (directory / "stack_info.csv").exists()


def test_the_end_does_not_wait_for_a_thread_that_hangs(
    room: Room, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """A thread that hangs inside a step (in a kernel of a device, say) keeps no process from ending."""
    monkeypatch.setattr(session, "LOCK_LIMIT", 0.1)
    model, optimizer = model_and_optimizer()
    monitor = room.monitor()
    monitor.set_monitor(model, 1, optimizer)
    train(model, optimizer)
    (watch,) = monitor._session.watches
    inside, over = threading.Event(), threading.Event()

    def hang() -> None:
        with watch.lock:
            inside.set()
            over.wait(900)

    hanging = threading.Thread(target=hang)
    hanging.start()
    inside.wait(900)
    monitor._session.finish()
    over.set()
    hanging.join()
    said = capfd.readouterr().err
    assert "the step under way is not recorded: the thread that trains does not come back" in said
    assert "2 training steps seen, 2 collected" in said
    assert {row.step for row in room.rows("grad_reduced")} == {0, 1}


def test_a_child_forked_while_a_thread_is_inside(room: Room) -> None:
    """The child has none of the parent's threads: it waits for none of them."""
    model, optimizer = model_and_optimizer()
    monitor = room.monitor()
    monitor.set_monitor(model, 1, optimizer)
    (watch,) = monitor._session.watches
    inside, over = threading.Event(), threading.Event()

    def stay() -> None:
        with watch.lock:
            watch._entered = True
            inside.set()
            over.wait(900)
            watch._entered = False

    staying = threading.Thread(target=stay)
    staying.start()
    inside.wait(900)
    child = os.fork()
    if child == 0:
        os._exit(0 if watch.lock.acquire(timeout=1) and not watch._entered else 1)
    for _ in range(6000):
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            break
        time.sleep(0.01)
    else:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    over.set()
    staying.join()
    assert (ended, status) == (child, 0)


class Interruption:
    """Raises at the so manyth line that msmon executes on this thread; ``signal`` raises from a handler of the script."""

    def __init__(self, after: int, kind: str) -> None:
        self.left, self.kind = after, kind

    def __call__(self, frame: Any, event: str, _: object) -> Any:
        if not frame.f_code.co_filename.startswith(MSMON):
            return None
        if event == "line":
            self.left -= 1
            if self.left == 0:
                if self.kind == "signal":
                    signal.raise_signal(signal.SIGALRM)
                raise KeyboardInterrupt
        return self


def time_is_over(number: int, frame: object) -> None:
    raise TimeoutError


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["keyboard", "signal"])
@pytest.mark.parametrize("interval", [1, 2])
def test_interrupted_anywhere(
    room: Room, kind: str, interval: int, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C, or the script's own time limit, inside msmon: the script catches it; no row twice, none of a whole step lost."""
    before = signal.signal(signal.SIGALRM, time_is_over)
    tracing = sys.gettrace()
    point, still = 1, True
    try:
        while still:
            monkeypatch.setenv("MONITOR_OUTPUT_DIR", str(room.folder / str(point)))
            model, optimizer = model_and_optimizer()
            monitor = room.monitor(param_distribution=True, mv_distribution=True, step_interval=interval)
            monitor.set_monitor(model, 1, optimizer)
            interruption = Interruption(point, kind)
            whole = 0
            for step in range(5):
                try:
                    sys.settrace(interruption)
                    train(model, optimizer, 1, first=step)
                    whole += 1
                except (KeyboardInterrupt, TimeoutError):  # noqa: PERF203 - as a script would
                    pass
                finally:
                    sys.settrace(tracing)
            monitor.close()
            still = interruption.left <= 0
            assert whole == 5 - still, "what the script's handler raised reaches the script"
            directories = run_directories(
                room.folder / str(point)
            )  # two when it was interrupted while making the first
            for row_kind in ("grad_unreduced", "grad_reduced", "param_origin", "param_updated", "exp_avg"):
                keys = [(row.name, row.step) for directory in directories for row in read_kind(directory, row_kind)]
                assert len(keys) == len(set(keys)), (point, row_kind)
            lines = [line for directory in directories for line in read_steps(directory)]
            steps = [int(line["step"]) for line in lines]
            assert steps == sorted(set(steps))
            assert sum(line["complete"] == "1" for line in lines) >= whole // interval, (point, lines)
            point += 61
    finally:
        signal.signal(signal.SIGALRM, before)
    assert "switched off" not in capfd.readouterr().err


def test_steps_that_end_when_the_next_begins_are_counted(room: Room, capfd: pytest.CaptureFixture[str]) -> None:
    """Two optimizers at two rates: the summary counts every training step, also those closed by the next one."""
    model = net("Net")
    often, seldom = (torch.optim.SGD(part.parameters(), lr=0.1) for part in (model[0], model[2]))
    monitor = room.monitor()
    monitor.set_monitor(model, 1, often)
    monitor.set_monitor(model, 1, seldom)
    for step in range(7):
        model(batch(step)).pow(2).mean().backward()
        if step % 3 == 0:
            seldom.step()
        often.step()
    monitor._session.finish()
    assert "msmon: 7 training steps seen, 7 collected" in capfd.readouterr().err


@pytest.mark.parametrize("kind", ["linear", "convolution"])
def test_parameters_that_come_to_life_late(room: Room, kind: str, capfd: pytest.CaptureFixture[str]) -> None:
    """A lazy layer has no shape before its first forward pass; from then on it is watched under its names."""
    lazy = torch.nn.LazyLinear(3) if kind == "linear" else torch.nn.LazyConv1d(3, 1)
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), lazy)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    room.monitor(param_distribution=True).set_monitor(model, 1, optimizer)
    train(model[0], optimizer, 1)
    for step in range(2):
        optimizer.zero_grad()
        model(batch(step)[:4]).pow(2).mean().backward()
        optimizer.step()
    for row_kind in ("grad_reduced", "grad_unreduced", "param_updated"):
        found = {step: {row.name for row in room.rows(row_kind) if row.step == step} for step in range(3)}
        assert found[0] == {"0.weight", "0.bias"}
        assert found[1] == found[2] == {"0.weight", "0.bias", "1.weight", "1.bias"}, row_kind
    assert "switched off" not in capfd.readouterr().err


def test_optimizer_of_the_same_class_as_one_seen_before(room: Room, capfd: pytest.CaptureFixture[str]) -> None:
    """A second optimizer has no state at its first step, which says nothing about its class; one without ever is named."""
    monitor = room.monitor(mv_distribution=True)
    for name in ("First", "Second"):
        model, optimizer = model_and_optimizer(name)
        monitor.set_monitor(model, 1, optimizer)
        train(model, optimizer, 2)
    assert "keeps no state" not in capfd.readouterr().err
    monitor.set_monitor(model, 1, plain := torch.optim.SGD(model.parameters(), lr=0.1))
    train(model, plain, 3)
    assert capfd.readouterr().err.count("SGD keeps no state tensors") == 1


def test_replaced_parameters_are_released(room: Room) -> None:
    """A new head and a new optimizer fifty times over: old heads, their optimizers and the hooks on them are gone."""
    model, optimizer = model_and_optimizer()
    monitor = room.monitor(param_distribution=True, mv_distribution=True)
    monitor.set_monitor(model, 1, optimizer)
    train(model, optimizer, 1)
    (watch,) = monitor._session.watches
    hooks = len(watch.ledger)
    heads = []
    for step in range(50):
        model[2] = torch.nn.Linear(3, 2)
        heads.append(weakref.ref(model[2].weight))
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
        monitor.set_monitor(model, 1, optimizer)
        train(model, optimizer, 1, first=step)
    gc.collect()
    assert sum(head() is not None for head in heads) == 1
    assert len(watch.ledger) == hooks
    assert len(watch._optimizers) == 1
    assert len(room.rows("grad_reduced")) == 51 * 4


def test_under_fake_tensors(room: Room, capfd: pytest.CaptureFixture[str]) -> None:
    """A dry run without numbers: each kind of row that is missing is said once, and nothing false of torch and numpy."""
    with FakeTensorMode():
        model, optimizer = model_and_optimizer()
        room.monitor(param_distribution=True).set_monitor(model, 1, optimizer)
        for _ in range(2):
            optimizer.zero_grad()
            model(torch.ones(8, 4)).pow(2).mean().backward()
            optimizer.step()
    said = capfd.readouterr().err
    assert "numpy" not in said
    for kind in ("param_origin", "param_updated", "grad_reduced", "grad_unreduced"):
        assert said.count(f" has no {kind}: ") == 1


WRAPPED_BETWEEN = """
    import functools, json, sys
    import torch
    from msmon.pytorch import TrainerMon

    PLACES = [
        (torch.autograd, "backward"), (torch.amp.GradScaler, "step"), (torch.nn.Module, "train"), (torch.nn.Module, "zero_grad"),
        (torch.optim.Optimizer, "zero_grad"), (torch.utils.checkpoint.CheckpointFunction, "apply"),
    ]

    def train():
        torch.manual_seed(0)
        model = torch.nn.Linear(3, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
        monitor = TrainerMon(sys.argv[1], params_have_main_grad=False)
        monitor.set_monitor(model, 1, optimizer)
        for step in range(3):
            model.train()
            optimizer.zero_grad()
            model.zero_grad()
            output = torch.utils.checkpoint.checkpoint(model, torch.ones(1, 3, requires_grad=True), use_reentrant=True)
            scaler.scale(output.sum()).backward()
            scaler.step(optimizer)
            scaler.update()
        return monitor, model.weight.tolist()

    monitor, first = train()
    held = [getattr(owner, name) for owner, name in PLACES]
    monitor.close()
    called = set()
    for (owner, name), function in zip(PLACES, held):
        def theirs(*args, name=name, function=function, **kwargs):
            called.add(name)
            return function(*args, **kwargs)
        setattr(owner, name, functools.wraps(function)(theirs))
    monitor, second = train()
    monitor.close()
    assert called == {name for _, name in PLACES} and first == second
"""


@pytest.mark.slow
def test_functions_that_another_tool_wraps_between_two_monitors(runner: Runner) -> None:
    """What it holds is the wrapper of the first monitor, which then lies under its own and that under the second's."""
    script = runner.write(WRAPPED_BETWEEN)
    config = runner.write_config(wg_distribution=True, xy_distribution=True, all_xy=True, ops=["norm"])
    done = runner.bare(script, str(config), MONITOR_OUTPUT_DIR=str(runner.output))
    assert done.returncode == 0, done.stderr
    first, second = sorted(runner.output.glob("*-rank0-*"), key=lambda path: path.stat().st_mtime)
    names = sorted(path.name for path in first.glob("*.csv"))
    assert len(names) > 6
    for name in names:
        assert (second / name).read_text() == (first / name).read_text(), name


def add_up(parameter: torch.Tensor, *, keep: str, leave: str) -> None:
    """What a script does in a hook of its own: add the gradient to a float32 buffer, and let it go."""
    gradient = parameter.grad
    assert gradient is not None
    before = getattr(parameter, keep, None)
    if before is None:
        setattr(parameter, keep, gradient.float().clone())
    elif leave == "a new buffer":
        setattr(parameter, keep, before + gradient.float())
    else:
        before += gradient.float()
    if leave == "zeros":
        gradient.zero_()
    else:
        parameter.grad = None


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("every", [False, True])
@pytest.mark.parametrize("leave", ["nothing", "zeros", "a new buffer"])
def test_gradients_added_up_by_the_script(
    room: Room, capfd: pytest.CaptureFixture[str], leave: str, *, every: bool, when: str
) -> None:
    """The unreduced gradient is the sum that the script's hooks have made in ``main_grad`` when a backward pass ends."""
    weight = torch.nn.Parameter(torch.zeros(1, dtype=torch.bfloat16))
    model = torch.nn.Module()
    model.weight = weight
    optimizer = torch.optim.SGD([weight], lr=0.1)
    monitor = room.monitor(monitor_mbs_grad=every, params_have_main_grad=True)
    if when == "before":
        weight.register_post_accumulate_grad_hook(lambda p: add_up(p, keep="main_grad", leave=leave))
    monitor.set_monitor(model, 2, optimizer)
    if when == "after":
        weight.register_post_accumulate_grad_hook(lambda p: add_up(p, keep="main_grad", leave=leave))
    for _ in range(3):
        for factor in (4.0, 8.0):
            (weight * factor).sum().backward()
        weight.grad = weight.main_grad.to(weight.dtype)  # type: ignore[attr-defined]
        optimizer.step()
        weight.grad, weight.main_grad = None, None  # type: ignore[attr-defined]
    unreduced = [(row.step, row["norm"], row.values["dtype"]) for row in room.rows("grad_unreduced")]
    sums = (4.0, 12.0) if every else (12.0,)
    assert unreduced == [(step, value, "torch.float32") for step in range(3) for value in sums]
    assert [row["norm"] for row in room.rows("grad_reduced")] == [12.0] * 3
    assert "takes .grad away" not in capfd.readouterr().err


def test_main_grad_that_is_filled_later(room: Room) -> None:
    """What no hook has written to during the backward pass is no sum of gradients: ``.grad`` is read."""
    weight = torch.nn.Parameter(torch.zeros(1))
    model = torch.nn.Module()
    model.weight = weight
    optimizer = torch.optim.SGD([weight], lr=0.1)
    room.monitor(params_have_main_grad=True).set_monitor(model, 2, optimizer)
    for _ in range(3):
        for factor in (4.0, 8.0):
            (weight * factor).sum().backward()
        weight.main_grad = weight.grad / 2  # type: ignore[attr-defined, operator]
        optimizer.step()
        optimizer.zero_grad()
    assert [row["norm"] for row in room.rows("grad_unreduced")] == [12.0] * 3
    assert [row["norm"] for row in room.rows("grad_reduced")] == [6.0] * 3


def test_gradients_added_up_elsewhere(room: Room, capfd: pytest.CaptureFixture[str]) -> None:
    """Where the script adds up cannot be known from its name: the row is the last micro-batch's, which is said."""
    weight = torch.nn.Parameter(torch.zeros(1))
    model = torch.nn.Module()
    model.weight = weight
    optimizer = torch.optim.SGD([weight], lr=0.1)
    room.monitor().set_monitor(model, 2, optimizer)
    weight.register_post_accumulate_grad_hook(lambda p: add_up(p, keep="summed", leave="nothing"))
    for _ in range(3):
        for factor in (4.0, 8.0):
            (weight * factor).sum().backward()
        weight.grad, weight.summed = weight.summed, None  # type: ignore[attr-defined]
        optimizer.step()
        optimizer.zero_grad()
    assert [row["norm"] for row in room.rows("grad_unreduced")] == [8.0] * 3
    assert [row["norm"] for row in room.rows("grad_reduced")] == [12.0] * 3
    assert capfd.readouterr().err.count("takes .grad away after each backward pass") == 1
