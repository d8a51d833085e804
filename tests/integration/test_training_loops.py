"""Every shape of training loop: what is recorded is what the script saw at the right moment."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING

import pytest
from integration.conftest import HERE
from integration.truth import EVERYTHING, Observed

if TYPE_CHECKING:
    from collections.abc import Callable

    from conftest import Runner

pytestmark = pytest.mark.slow


@pytest.fixture
def loops(observed: Callable[..., Observed]) -> Observed:
    seen = observed("loops.py", **EVERYTHING)
    assert "models in this process: the rest is not watched" not in seen.finished.stderr
    return seen


@pytest.mark.parametrize(
    "scenario",
    [
        "accumulation",
        "zeroed_in_place",
        "closures",
        "grad_scaler",
        "grad_scaler_fused",
        "adversaries",
        "two_optimizers",
        "two_rates",
        "optimizer_in_backward",
        "optimizer_in_hook",
        "sharpness",
        "sharpness_state",
        "super_step",
        "exception_in_step",
        "exception_in_backward",
        "evaluation",
        "functional_regions",
        "copied_while_watched",
        "saved_while_watched",
        "folds",
        "optimizer_made_again",
        "optimizer_every_epoch",
        "phases",
        "new_head_every_task",
        "head_replaced",
        "head_only",
        "not_called_forward",
        "loss_wrapper",
        "two_modules_one_optimizer",
        "plain_list",
        "scripted_part",
        "data_parallel",
        "checkpoint_values",
        "double_backward",
        "weight_norm",
        "swapped_for_evaluation",
        "in_a_thread",
        "between_two_threads",
        "converted_by_swapping",
        "frozen_then_free",
        "subset_in_optimizer",
        "branches",
        "unused_in_one_micro_batch",
    ],
)
def test_rows_are_the_truth(loops: Observed, scenario: str) -> None:
    """Rows, values, step numbers and the lines of steps.csv are those that the script noted; no row is missing or too many."""
    loops.check(scenario)


def test_line_search_records_the_first_evaluation(loops: Observed) -> None:
    """LBFGS: rows are those of the closure's first evaluation in each step; its state tensors are recorded, too."""
    assert loops.told("line_search") > 2
    loops.check("line_search")


def test_gradient_of_a_scaled_loss_is_recorded_unscaled(loops: Observed) -> None:
    """B10: grad_reduced is what the optimizer applies, 1.414214, whether the scaler or a fused optimizer unscales."""
    loops.told("gradient_of_scaled_loss")
    for fused in (False, True):
        values = loops.recorded("grad_reduced", [f"Scaled{fused}"])
        assert [norm for _, _, norm, *_ in values.values()] == [pytest.approx(2**0.5)]


def test_scheduler_finds_nothing_to_warn_of(loops: Observed) -> None:
    """B42: torch's scheduler sees an optimizer.step that nobody has replaced."""
    assert loops.told("schedulers") == []
    loops.check("schedulers")


def test_copies_for_averaging_write_no_row(loops: Observed) -> None:
    """B5: a deepcopy and an AveragedModel hold equal weights, and only the original has rows."""
    assert loops.told("averaged") == [True] * 3
    loops.check("averaged")
    assert not loops.recorded("grad_unreduced", ["Averaged_1", "AveragedModel"])


def test_outer_and_inner_step_are_one_training_step(loops: Observed) -> None:
    """An optimizer whose step calls another's: its own steps count; the closure's gradients are the reduced ones."""
    assert loops.told("sharpness_step") == [3]
    loops.check("sharpness_step")


def test_wrapper_without_constructor_is_seen_through(loops: Observed) -> None:
    """A third-party wrapper that never ran Optimizer.__init__: the steps of the optimizer inside are recorded."""
    updated = loops.recorded("param_updated", ["Ahead"])
    loops.results["lookahead"]["rows"] += [["param_updated", *key, values] for key, values in updated.items()]
    assert len(updated) == 3 * 4
    loops.check("lookahead")


def test_bare_parameter_has_a_made_up_name(loops: Observed) -> None:
    """A tensor of no module has rows under a name of its own."""
    loops.told("bare_parameter")
    true = {(row[1], row[2]): row[4] for row in loops.results["bare_parameter"]["rows"]}
    found = {
        (row.name, row.step): row["norm"] for row in loops.finished.rows("grad_reduced") if row.name.startswith("bare")
    }
    assert {key: norm for key, norm in found.items() if key in true} == {
        key: pytest.approx(v[2]) for key, v in true.items()
    }


def test_shared_encoder_has_one_row_and_its_alias_in_the_report(loops: Observed) -> None:
    """Two models around one encoder: one row a tensor; run.json names the other name of it."""
    loops.check("shared_encoder")
    names = {
        parameter["name"]: parameter.get("aliases", [])
        for model in loops.finished.run_file()["models"]
        for parameter in model["parameters"]
    }
    assert names["TaskA.encoder.weight"] == ["TaskB.encoder.weight"]


def test_recomputed_shared_weight_has_its_final_gradient(loops: Observed) -> None:
    """B17: reentrant checkpointing calls a gradient hook twice; the row holds the final value, once."""
    assert len(loops.told("checkpointed")) == 2
    loops.check("checkpointed")


def test_create_graph_holds_no_memory(loops: Observed) -> None:
    """B12: 50 steps of backward(create_graph=True) grow the process by no more than a few megabytes."""
    assert loops.told("graph_of_gradients") < 20


def test_what_the_script_lets_go_of_is_freed(loops: Observed) -> None:
    """Model, optimizer, parameters and bare parameters live no longer because they were watched."""
    assert loops.told("freed") == [True] * 5


def test_models_and_optimizers_carry_no_hooks_of_ours(observed: Callable[..., Observed]) -> None:
    """Neither module hooks nor hooks of one optimizer; optimizer.step is torch's; no state entry was made."""
    seen = observed("loops.py", "spectators", **EVERYTHING)
    assert seen.told("spectators") == ["Adam.step", "True"]
    seen.check("spectators")


def test_whole_model_file_loads_without_msmon(loops: Observed, runner: Runner) -> None:
    """B4: a model and optimizer saved while watched load in a Python that cannot import msmon."""
    path = loops.finished.output.parent / "whole.pt"
    code = f"import sys; sys.modules['msmon'] = None; import torch; print(type(torch.load({str(path)!r}, weights_only=False)[1]))"
    loaded = runner.call([sys.executable, "-c", code])
    assert "Adam" in loaded.stdout, loaded.stderr


def test_monitored_loops_train_as_bare_ones(loops: Observed, runner: Runner) -> None:
    """Every loop sees the same gradients, weights and optimizer state, and draws the same random numbers, as without msmon."""
    bare = runner.bare(HERE / "loops.py")
    assert bare.stdout == loops.finished.stdout
    truth = json.loads((runner.folder / "truth.json").read_text())
    assert not [result["error"] for result in truth.values() if result["error"]]
    for name, result in truth.items():
        assert loops.results[name]["steps"] == result["steps"], name
        rows = json.dumps(
            [row for row in loops.results[name]["rows"] if row[:4] in [mine[:4] for mine in result["rows"]]]
        )
        assert rows == json.dumps(result["rows"]), name
    added = [line for line in loops.finished.stderr.splitlines() if line not in bare.stderr.splitlines()]
    assert not [line for line in added if not line.startswith("msmon:")]


def test_update_by_hand_is_said_once(runner: Runner) -> None:
    """A script that updates weights without any optimizer: the same result, one message with a hint, exit code 0."""
    script = runner.write(
        """
        import torch
        torch.manual_seed(0)
        model = torch.nn.Linear(4, 1)
        for step in range(3):
            model.zero_grad()
            model(torch.randn(8, 4)).pow(2).mean().backward()
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter -= 0.1 * parameter.grad
        print(model.weight.tolist())
        """
    )
    bare, watched = runner.bare(script), runner.monitored(script)
    assert (watched.returncode, watched.stdout) == (0, bare.stdout)
    assert watched.stderr.count("no training step was seen") == 1
    assert "torch.optim.SGD" in watched.stderr
    assert not watched.directories()


COMPILED = """
    import sys, warnings
    import torch
    warnings.simplefilter("ignore")
    from truth import Truth, batch, net, run_scenarios, scenario, train

    graphs = []

    class Body(torch.nn.Sequential):
        def forward(self, x):
            return self[2](self[1](self[0](x)))

    def backend(name):
        inner = torch._dynamo.lookup_backend(name)
        def count(graph, inputs):
            graphs.append(name)
            return inner(graph, inputs)
        return count

    def go(truth, label, name, way):
        graphs.clear()
        torch._dynamo.reset()
        model = net(label, Body)
        run = model
        if way == "before":
            run = torch.compile(model, backend=backend(name), fullgraph=True)
        optimizer = torch.optim.AdamW(run.parameters(), lr=0.1)
        if way == "after":
            run = torch.compile(model, backend=backend(name), fullgraph=True)
        elif way == "in_place":
            model.compile(backend=backend(name), fullgraph=True)
        loss = lambda step: run(batch(step)).pow(2).mean()
        if way == "function":
            loss = torch.compile(lambda x: model(x).pow(2).mean(), backend=backend(name))
            train(truth, model, optimizer, range(4), loss=lambda step: loss(batch(step)))
        elif way == "decorated_step":
            step_once = torch.compile(lambda: optimizer.step(), backend=backend(name))
            for step in range(3):
                optimizer.zero_grad()
                model(batch(step)).pow(2).mean().backward()
                truth.before(step, model, optimizer, f"{label}.")
                step_once()
                truth.after(step, model, f"{label}.")
        else:
            train(truth, model, optimizer, range(4), loss=loss)
        return len(graphs)

    for name in ("eager", "aot_eager"):
        for way in ("before", "after", "in_place", "function", "decorated_step"):
            label = f"{way}_{name}".title().replace("_", "")
            def one(truth, label=label, name=name, way=way):
                return go(truth, label, name, way)
            one.__name__ = f"{way}_{name}"
            scenario(one)

    _warm = [net("WarmA"), net("WarmB")]
    _optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in _warm]
    for model, optimizer in zip(_warm, _optimizers):
        model(batch(0)).sum().backward()
        optimizer.step()
    run_scenarios(sys.argv[1:])
"""


def test_compiled_models_have_all_rows_and_as_many_graphs(runner: Runner) -> None:
    """torch.compile of a model, in place, of a function, before and after the optimizer: true rows, no graph more than bare."""
    script = runner.write(COMPILED)
    assert runner.bare(script).returncode == 0
    bare = json.loads((runner.folder / "truth.json").read_text())
    finished = runner.monitored(script, config=EVERYTHING)
    assert finished.returncode == 0, finished.stderr
    seen = Observed(finished, json.loads((runner.folder / "truth.json").read_text()))
    for name, result in bare.items():
        assert not result["error"], result["error"]
        assert seen.told(name) == result["told"], name
        seen.check(name)


def test_collected_steps_of_optimizers_at_two_rates_are_whole(runner: Runner) -> None:
    """step_interval 2 where a training step ends only when the next begins: the collected ones have their unreduced rows."""
    finished = runner.monitored(HERE / "loops.py", "two_rates", config={**EVERYTHING, "step_interval": 2})
    seen = Observed(finished, json.loads((runner.folder / "truth.json").read_text()))
    true = seen.results["two_rates"]
    true["rows"] = [row for row in true["rows"] if row[2] % 2 == 0]
    true["steps"] = [line for line in true["steps"] if line["step"] % 2 == 0]
    seen.check("two_rates")


def test_short_names_of_several_models_stay_apart(runner: Runner) -> None:
    """squash_name shortens what follows the model's label, so that equal layers of two models keep two names."""
    script = runner.write(
        """
        import torch
        from torch import nn
        class Body(nn.Module):
            def __init__(self):
                super().__init__()
                self.layers = nn.ModuleList([nn.Linear(2, 2)])
        class One(nn.Module):
            def __init__(self):
                super().__init__()
                self.body = Body()
        class Two(One): pass
        models = One(), Two()
        optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
        sum(model.body.layers[0](torch.ones(1, 2)).sum() for model in models).backward()
        for optimizer in optimizers:
            optimizer.step()
        """
    )
    done = runner.monitored(script, config={**EVERYTHING, "squash_name": True})
    names = [row.name for row in done.rows("grad_reduced")]
    assert names == [f"{label}.layers.0.{leaf}" for label in ("One", "Two") for leaf in ("weight", "bias")]


def test_module_made_around_a_model_in_training(runner: Runner) -> None:
    """An export in mid-training, or a wrapper with a head of its own: the model's rows go on, and are there once."""
    script = runner.write(
        """
        import sys, torch
        from truth import batch, net
        model = net("Net")
        def train(run, optimizer):
            for step in range(2):
                optimizer.zero_grad()
                run(batch(step)).pow(2).mean().backward()
                optimizer.step()
        train(model, torch.optim.SGD(model.parameters(), lr=0.1))
        if sys.argv[1] == "export":
            kept = torch.export.export(model, (batch(0),))
            train(model, torch.optim.SGD(model.parameters(), lr=0.1))
        else:
            outer = type("Outer", (torch.nn.Sequential,), {})(model, torch.nn.Linear(1, 1))
            train(outer, torch.optim.SGD(outer.parameters(), lr=0.1))
        """
    )
    inner = ["0.weight", "0.bias", "2.weight", "2.bias"]
    for way, more in (("export", []), ("wrapper", ["Outer.1.weight", "Outer.1.bias"])):
        runner.output = runner.folder / way  # a place for each
        done = runner.monitored(script, way, options=[])
        rows = [(row.step, row.name) for row in done.rows("grad_reduced")]
        true = [(step, name) for step in range(4) for name in inner + (more if step > 1 else [])]
        assert sorted(rows) == sorted(true), done.stderr
        assert [(line["model"], line["step"]) for line in done.steps()] == [("", str(step)) for step in range(4)]


def test_threads_that_begin_to_train_at_once(runner: Runner) -> None:
    """Each of several threads makes its model and trains it: no first step is lost, and run.json is whole."""
    script = runner.write(
        """
        import sys, threading, torch
        from truth import batch, net
        sys.setswitchinterval(1e-6)
        torch.set_num_threads(1)
        ready = threading.Barrier(12)
        def work(number):
            model = net(f"Net{number}")
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            ready.wait()
            for step in range(3):
                optimizer.zero_grad()
                model(batch(step)).pow(2).mean().backward()
                optimizer.step()
        threads = [threading.Thread(target=work, args=(number,)) for number in range(12)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        """
    )
    done = runner.monitored(script)
    assert done.returncode == 0, done.stderr
    assert len(done.directories()) == 1
    assert sorted((line["model"], line["step"]) for line in done.steps()) == sorted(
        (f"Net{number}", str(step)) for number in range(12) for step in range(3)
    ), done.stderr
    rows = [(row.name, row.step) for row in done.rows("grad_unreduced")]
    assert len(rows) == len(set(rows)) == 12 * 3 * 4
    assert len(done.run_file()["models"]) == 12
    assert not list(done.directories()[0].glob(".run.json*"))


def test_bare_tensors_beside_a_model_have_a_label(runner: Runner) -> None:
    """Lines of steps.csv of tensors without a module begin with the name of the first one."""
    script = runner.write(
        """
        import torch
        from truth import batch, net
        models = [net("Net"), net("Other")]
        bare = torch.zeros(3, requires_grad=True)
        optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
        optimizers.append(torch.optim.SGD([bare], lr=0.1))
        for step in range(2):
            (sum(model(batch(step)).pow(2).mean() for model in models) + (bare - 1).pow(2).sum()).backward()
            for optimizer in optimizers:
                optimizer.step()
        """
    )
    done = runner.monitored(script)
    assert {line["model"] for line in done.steps()} == {"Net", "Other", "bare_parameter_0"}
    assert [model["label"] for model in done.run_file()["models"]] == ["Net", "Other", "bare_parameter_0"]


@pytest.mark.parametrize("end", ["", "raise SystemExit", "1 / 0", "os.kill(os.getpid(), signal.SIGTERM)"])
def test_gradients_that_another_model_left_at_the_end(runner: Runner, end: str) -> None:
    """A generator's backward pass leaves gradients in the discriminator: no step of its own, unless the run was cut short."""
    script = runner.write(
        f"""
        import os, signal, sys
        import torch
        from truth import batch, net
        G, D = net("G"), torch.nn.Linear(1, 1)
        optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in (D, G)]
        for step in range(2):
            optimizers[0].zero_grad()
            D(G(batch(step)).detach()).mean().backward()
            optimizers[0].step()
            optimizers[1].zero_grad()
            D(G(batch(step))).mean().backward()
            optimizers[1].step()
        {end}
        """
    )
    done = runner.monitored(script)
    lines = [(line["model"], line["step"], line["complete"]) for line in done.steps()]
    whole = [(model, str(step), "1") for step in range(2) for model in ("Linear", "G")]
    cut = [("Linear", "2", "0")] if end[:1] in {"1", "o"} else []
    assert lines == whole + cut, done.stderr
    assert {row.step for row in done.rows("grad_unreduced") if row.name.startswith("Linear")} == (
        {0, 1, 2} if cut else {0, 1}
    )
