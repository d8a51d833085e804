"""How msmon gets into the processes of a run: into all that train, out of the way everywhere, and never in the user's way.

Most facts need no tensor framework: a folder named ``torch`` with two small modules has the names that are waited for.
"""

from __future__ import annotations

import ast
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import zipapp
from pathlib import Path

import pytest
from conftest import MSMON, TORCHRUN, Finished, Runner

from msmon.bootstrap.launch import SITE_FOLDER, prepare_environment
from msmon.config.schema import MonitorConfig
from msmon.offline.reader import read_steps, run_directories

ACCELERATE = str(Path(TORCHRUN).with_name("accelerate"))
NOTHING_SEEN = "no training step was seen"
NOT_REACHED = "msmon: nothing was reached: "
OWN_SITE = """
import os, sys
if "MSMON_CONFIG" in os.environ:  # not in the process of msmon itself, before it becomes the command
    print("own", __name__, __file__, file=sys.stderr)
"""
SHOW_PATH = "import json, sys; print(json.dumps(sys.path[1:]))"
SHOW_FINDERS = "import sys; print(sum(getattr(finder, '__name__', '') == '_Finder' for finder in sys.meta_path))"

FAKE_TORCH = {
    "torch/__init__.py": "",
    "torch/data.txt": "some data",
    "torch/nn/__init__.py": "",
    "torch/nn/modules/__init__.py": "",
    "torch/nn/modules/module.py": """
        class Module:
            def __init__(self):
                self.constructed = True
            def __setstate__(self, state):
                self.__dict__.update(state)
    """,
    "torch/optim/__init__.py": "",
    "torch/optim/optimizer.py": """
        class Optimizer:
            def __init__(self, params):
                self.constructed = True
            def __setstate__(self, state):
                self.__dict__.update(state)
    """,
}

TRAIN = """
import torch
def train(steps=2, hidden=2):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, hidden), torch.nn.Linear(hidden, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(steps):
        model(torch.randn(4, 3)).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer
"""


class Injected(Runner):
    """Runs commands under `msmon run` and counts the processes it reached."""

    @property
    def log(self) -> Path:
        return self.folder / "decisions.log"

    def run(self, *command: str, stdin: str | None = None, **env: str) -> Finished:
        """A command under `msmon run`, with what each process decided written to :attr:`log`."""
        return self._call([MSMON, "run", "--output", str(self.output), "--", *command], stdin, env)

    def plain(self, *command: str, stdin: str | None = None, **env: str) -> Finished:
        """The same command without msmon."""
        return self._call(list(command), stdin, env)

    def python(self, code: str, **env: str) -> Finished:
        return self.run(sys.executable, "-c", code, **env)

    def _call(self, command: list[str], stdin: str | None, env: dict[str, str]) -> Finished:
        done = subprocess.run(
            command,
            cwd=self.folder,
            env={**self.environment, "MSMON_DEBUG": str(self.log), **env},
            input=stdin,
            stdin=None if stdin is not None else subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=900,
            check=False,
        )
        return Finished(done.returncode, done.stdout, done.stderr, self.output)

    def decided(self, text: str) -> list[str]:
        """The decisions of all processes so far that contain a text; the log is emptied."""
        lines = self.log.read_text().splitlines() if self.log.exists() else []
        self.log.unlink(missing_ok=True)
        return [line for line in lines if text in line]

    def boots(self) -> int:
        """How many processes have waited for torch."""
        return len(self.decided("waiting for torch"))

    def write_all(self, files: dict[str, str]) -> None:
        for name, source in files.items():
            self.write(source, name)


@pytest.fixture
def injected(tmp_path: Path) -> Injected:
    return Injected(tmp_path)


def said(done: Finished) -> list[str]:
    """What stands on stderr besides the message that nothing was seen."""
    return [line for line in done.stderr.splitlines() if NOTHING_SEEN not in line]


# The sitecustomize that ours hides


@pytest.mark.parametrize("name", ["sitecustomize.py", "sitecustomize/__init__.py"], ids=["file", "package"])
@pytest.mark.parametrize("path", ["user", "lib:user", ":user"])
def test_the_users_sitecustomize_runs_once(name: str, path: str, injected: Injected) -> None:
    """The user's own, a file or a package, runs exactly once, under its own name and file, and ours is in place."""
    own = injected.write(OWN_SITE, f"user/{name}")
    code = f"{SHOW_FINDERS}; import sitecustomize; print(sitecustomize.__file__)"
    done = injected.python(code, PYTHONPATH=path)
    assert done.stdout.splitlines() == ["1", str(own)]
    assert said(done) == [f"own sitecustomize {own}"]
    assert injected.boots() == 1


def test_a_sitecustomize_that_raises_fails_as_without_us(injected: Injected) -> None:
    """Python says what it always says of a broken sitecustomize and goes on; ours stays in place."""
    injected.write("import no_such_module_of_the_user", "user/sitecustomize.py")
    command = [sys.executable, "-c", SHOW_FINDERS]
    bare = injected.plain(*command, PYTHONPATH="user")
    done = injected.run(*command, PYTHONPATH="user")
    assert (bare.stdout, done.stdout) == ("0\n", "1\n")
    assert "no_such_module_of_the_user" in bare.stderr
    assert said(done) == bare.stderr.splitlines() * 2  # msmon itself, before it becomes the command, is a Python too


def test_without_a_sitecustomize_of_the_user_nothing_is_said(injected: Injected) -> None:
    """Where there is none to run, the start of Python is silent, and ours is what `sitecustomize` names.

    Some systems ship one with their Python: then that one is what it names.
    """
    code = "import sitecustomize, sys; print(sitecustomize.__file__)"
    system = injected.plain(sys.executable, "-c", code).stdout
    done = injected.python(code)
    assert done.stdout == (system or f"{SITE_FOLDER / 'sitecustomize.py'}\n")
    assert said(done) == []


OLD_PYTHONS = [
    path
    for version in ("2.7", "3.6", "3.9")
    for path in sorted(Path.home().glob(f".pyenv/versions/{version}*/bin/python")) or [shutil.which(f"python{version}")]
    if path
]


@pytest.mark.skipif(not OLD_PYTHONS, reason="no Python older than 3.10 here")
@pytest.mark.parametrize("python", OLD_PYTHONS, ids=str)
def test_an_old_python_is_left_alone(python: Path | str, injected: Injected) -> None:
    """A child of any version starts in silence, with the user's own sitecustomize; as the command it is told so."""
    injected.write("import sys; sys.stderr.write('own\\n')", "user/sitecustomize.py")
    starts = f"import subprocess; subprocess.call([{str(python)!r}, '-c', 'print(1)'])"
    child = injected.python(starts)
    assert (child.stdout, said(child)) == ("1\n", [])
    chained = injected.run(str(python), "-c", "print(1)", PYTHONPATH="user")
    assert (chained.stdout, set(said(chained))) == ("1\n", {"own"})
    assert "msmon needs 3.10" in chained.stderr


def test_the_start_can_be_read_by_every_python() -> None:
    """What a Python of 2.7 would not parse or know is absent: text is ASCII, nothing is annotated, no f-string."""
    text = (SITE_FOLDER / "sitecustomize.py").read_text(encoding="ascii")
    newer = (
        ast.JoinedStr,
        ast.NamedExpr,
        ast.AnnAssign,
        ast.Nonlocal,
        ast.AsyncFunctionDef,
        ast.YieldFrom,
        ast.Starred,
    )
    nodes = list(ast.walk(ast.parse(text)))
    found = [ast.unparse(node) for node in nodes if isinstance(node, newer)]
    assert [text for text in found if not text.startswith("*sys.version_info")] == []
    functions = [node for node in nodes if isinstance(node, ast.FunctionDef)]
    assert not any(node.returns or node.args.kwonlyargs or node.args.posonlyargs for node in functions)


@pytest.mark.parametrize("switch", ["MSMON=0", "gone"])
def test_switched_off_the_users_sitecustomize_still_runs(switch: str, injected: Injected) -> None:
    """Off by MSMON=0, or because the settings of the run are gone: nothing of ours is left, the user's own runs."""
    own = injected.write(OWN_SITE, "user/sitecustomize.py")
    injected.write_all(FAKE_TORCH)
    code = f"""
{SHOW_FINDERS}
import threading, torch.optim.optimizer as optimizer
print(threading.active_count(), hasattr(optimizer.Optimizer.__init__, "__msmon_original__"), "msmon" in sys.modules, *sys.path)
"""
    if switch == "gone":
        command = ["sh", "-c", 'rm "$MSMON_CONFIG"; exec "$0" "$@"', sys.executable, "-c", code]
    else:
        command = [sys.executable, "-c", code]
    env = {"MSMON": "0"} if switch == "MSMON=0" else {}
    done = injected.run(*command, PYTHONPATH="user", **env)
    assert done.stdout.startswith("0\n1 False False ")
    assert str(SITE_FOLDER) not in done.stdout
    said = done.stderr.splitlines()
    assert said[0] == f"own sitecustomize {own}"
    assert [line.startswith(NOT_REACHED) for line in said[1:]] == ([True] if switch == "gone" else [])
    assert len(injected.decided("off: ")) == 1


# PYTHONPATH


@pytest.mark.parametrize(
    "path", [None, "", "lib", ".", "..:lib", "lib::other", ":lib", "lib:", "TWICE", "INSIDE", "LINK", "RELATIVE"]
)
def test_the_search_path_is_as_without_us(path: str | None, injected: Injected) -> None:
    """Relative entries, empty ones (the working directory) and none: `sys.path` is the same to the letter.

    Our folder may already be in the caller's PYTHONPATH, twice, between others, or under another name.
    """
    (injected.folder / "link").symlink_to(SITE_FOLDER)
    ours = str(SITE_FOLDER)
    relative = os.path.relpath(ours, injected.folder)
    given, clean = {
        "TWICE": (f"{ours}:{ours}", None),
        "INSIDE": (f"lib:{ours}:other", "lib:other"),
        "LINK": ("link:lib", "lib"),
        "RELATIVE": (f"lib:{relative}", "lib"),
    }.get(path or "", (path, path))
    script = injected.write(SHOW_PATH, "show.py")
    bare = injected.plain(sys.executable, str(script), **({} if clean is None else {"PYTHONPATH": clean}))
    done = injected.run(sys.executable, str(script), **({} if given is None else {"PYTHONPATH": given}))
    assert json.loads(done.stdout) == json.loads(bare.stdout)
    assert injected.boots() == 1


def test_our_folder_stands_once_and_first(injected: Injected) -> None:
    """However often msmon is nested, PYTHONPATH has our folder once, absolute, before the user's entries as they were."""
    nested = [MSMON, "run", "-o", "inner", "--", MSMON, "run", "-o", "inner", "--", "sh", "-c", 'echo "$PYTHONPATH"']
    done = injected.run(*nested, PYTHONPATH=f".:{SITE_FOLDER}:lib")
    assert done.stdout == f"{SITE_FOLDER}:.:lib\n"


def test_one_run_inside_another_keeps_both_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The inner `msmon run` shares the id of the outer, and leaves the outer's settings to the outer's processes."""
    monkeypatch.setenv("MSMON_RUN_ID", "0123abcd")
    outer, _ = prepare_environment(MonitorConfig(wg_distribution=True), ["outer"], output=str(tmp_path))
    inner, _ = prepare_environment(MonitorConfig(param_distribution=True), ["inner"], output=str(tmp_path))
    read = [json.loads(Path(environment["MSMON_CONFIG"]).read_text()) for environment in (outer, inner)]
    assert [told["command"] for told in read] == [["outer"], ["inner"]]
    assert [environment["MSMON_RUN_ID"] for environment in (outer, inner)] == ["0123abcd", "0123abcd"]
    assert len(list(tmp_path.iterdir())) == 2


# Which processes are reached


def zip_application(injected: Injected) -> str:
    injected.write(SHOW_FINDERS, "application/__main__.py")
    target = injected.folder / "application.pyz"
    zipapp.create_archive(injected.folder / "application", target)
    return str(target)


@pytest.mark.parametrize(
    "way", ["script", "-m", "-c", "stdin", "zipapp", "-s", "-P", "-X utf8", "shell", "env", "profile", "path"]
)
def test_every_way_to_start_python_is_reached(way: str, injected: Injected) -> None:
    """A script, a module, code, standard input, an archive, through a shell or a tool: one process, injected once."""
    script = str(injected.write(SHOW_FINDERS, "show.py"))
    python = sys.executable
    command = {
        "script": [python, script],
        "-m": [python, "-m", "show"],
        "-c": [python, "-c", SHOW_FINDERS],
        "stdin": [python, "-"],
        "zipapp": [python, zip_application(injected)],
        "-s": [python, "-s", script],
        "-P": [python, *(["-P"] if sys.version_info >= (3, 11) else []), script],
        "-X utf8": [python, "-X", "utf8", "-u", script],
        "shell": ["sh", "-c", shlex.join([python, script])],
        "env": ["env", "TASK=1", python, script],
        "profile": [python, "-m", "cProfile", "-o", "profile", script],
        "path": ["show"],
    }[way]
    if way == "path":
        start = f"#!/bin/sh\n'''exec' '{python}' \"$0\" \"$@\"\n' '''\n"  # a first line takes no path with a space
        injected.write(f"{start}{SHOW_FINDERS}\n", "bin/show").chmod(0o755)
    path = f"{injected.folder}/bin:{os.environ['PATH']}"
    done = injected.run(*command, stdin=SHOW_FINDERS if way == "stdin" else None, PATH=path)
    assert (done.returncode, done.stdout, said(done)) == (0, "1\n", [])
    assert injected.boots() == 1


def test_children_are_reached_once_each(injected: Injected) -> None:
    """Children and grandchildren are, also when `os.environ` was replaced; one with a path or environment of its own is not."""
    injected.write(
        """
        import os, subprocess, sys
        child = [sys.executable, "-c", "pass"]
        grandchild = [sys.executable, "-c", f"import subprocess; subprocess.run({child!r}, check=True)"]
        subprocess.run(child, check=True)
        subprocess.run(grandchild, check=True)
        subprocess.run(child, check=True, env={"PATH": os.environ["PATH"]})
        subprocess.run(child, check=True, env={**os.environ, "PYTHONPATH": "lib"})
        os.environ = dict(os.environ)
        subprocess.run(child, check=True)
        subprocess.run(child, check=True, env={**os.environ, "MORE": "1"})
        pid = os.posix_spawn(sys.executable, child, os.environ)
        os.waitpid(pid, 0)
        if os.fork() == 0:
            os.execve(sys.executable, child, os.environ)
        os.wait()
        """
    )
    done = injected.run(sys.executable, "train.py")
    assert (done.returncode, done.stdout, said(done)) == (0, "", [])
    assert injected.boots() == 1 + 1 + 2 + 1 + 1 + 1 + 1


def test_one_run_inside_another_is_injected_once_a_process(injected: Injected) -> None:
    """The inner `msmon run` is a Python process of the outer run, and becomes the command: each image starts us once."""
    done = injected.run(MSMON, "run", "--output", "inner", "--", sys.executable, "-c", SHOW_FINDERS)
    assert (done.returncode, done.stdout) == (0, "1\n")
    assert done.stderr.count(NOTHING_SEEN) == 1
    assert injected.boots() == 2


@pytest.mark.parametrize("flags", ["-I", "-E", "-S", "-Es", "-W ignore -I"])
def test_flags_that_keep_us_out(flags: str, injected: Injected) -> None:
    """`python -I`, `-E`, `-S`: a warning that names the flag, then the command as it is, with its exit code."""
    done = injected.run(sys.executable, *flags.split(), "-c", f"{SHOW_FINDERS}; import sys; sys.exit(3)")
    assert (done.returncode, done.stdout) == (3, "0\n")
    line, last = done.stderr.splitlines()
    assert line.startswith("warning: python -")
    assert "nothing can be watched" in line
    assert last.startswith(NOT_REACHED)
    assert injected.boots() == 0


def test_an_emptied_environment_runs_unwatched(injected: Injected) -> None:
    """`env -i`: a warning, then the command as it is."""
    done = injected.run("env", "-i", sys.executable, "-c", f"{SHOW_FINDERS}; raise SystemExit(4)")
    assert (done.returncode, done.stdout) == (4, "0\n")
    assert done.stderr.startswith("warning: env -i empties the environment")
    assert injected.boots() == 0


def test_only_the_forwarded_variable_is_enough(injected: Injected) -> None:
    """A launcher that passes on PYTHON* only (DeepSpeed, to other hosts) passes us on."""
    command = ["env", "-u", "MSMON_CONFIG", "-u", "MSMON_RUN_ID", sys.executable, "-c", SHOW_FINDERS]
    assert injected.run(*command).stdout == "1\n"
    assert injected.boots() == 1


# A process that never imports torch


def test_a_process_without_torch_is_left_as_it_is(injected: Injected) -> None:
    """No module but sitecustomize, no thread, no signal handler, no file descriptor: one entry on the meta path."""
    injected.write(
        """
        import json, os, signal, sys, threading
        import subprocess
        if "child" not in sys.argv:  # the command itself also has to say so when nothing was seen
            sys.exit(subprocess.call([sys.executable, __file__, "child"]))
        handlers = [str(signal.getsignal(number)) for number in signal.valid_signals()]
        descriptors = sorted(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else []
        finders = [getattr(finder, "__name__", str(type(finder))) for finder in sys.meta_path]
        print(json.dumps([sorted(sys.modules), threading.active_count(), handlers, descriptors, finders]))
        """
    )
    bare = json.loads(injected.plain(sys.executable, "train.py").stdout)
    done = injected.run(sys.executable, "train.py")
    modules, *rest, finders = json.loads(done.stdout)
    assert set(modules) - set(bare[0]) == {"sitecustomize"} - set(bare[0])  # some systems ship one with their Python
    assert rest == bare[1:-1]
    assert finders == ["_Finder", *bare[-1]]
    assert [path.name for path in injected.output.iterdir() if not path.name.startswith(".msmon-")] == []


# What happens when torch is imported


def test_modules_of_torch_look_as_without_us(injected: Injected) -> None:
    """Loader, spec, source, data and reload are those of the module; our hook leaves nothing on the loader."""
    injected.write_all(FAKE_TORCH)
    injected.write(
        """
        import importlib, inspect, pkgutil, sys
        import torch.nn.modules.module as module, torch.optim.optimizer as optimizer
        for each in (module, optimizer):
            assert type(each.__loader__).__name__ == "SourceFileLoader", each.__loader__
            assert each.__spec__.loader is each.__loader__ and not each.__spec__._initializing
            assert vars(each.__loader__).keys() == {"name", "path"}, vars(each.__loader__)
            assert inspect.getsource(each).lstrip().startswith("class ")
        assert pkgutil.get_data("torch", "data.txt") == b"some data"
        patched = lambda cls: [hasattr(vars(cls)[name], "__msmon_original__") for name in ("__init__", "__setstate__")]
        noted = patched(module.Module) + patched(optimizer.Optimizer)
        before = module.Module
        importlib.reload(module), importlib.reload(optimizer)
        assert before is not module.Module
        again = patched(module.Module) + patched(optimizer.Optimizer)
        print(noted, again)
        from msmon.bootstrap import discovery
        print(len(discovery.on_optimizer))
        """
    )
    done = injected.run(sys.executable, "train.py")
    assert (done.returncode, said(done)) == (0, [])
    assert done.stdout.splitlines() == [str([True] * 4) + " " + str([True] * 4), "1"]


FOREIGN_HOOK = """
    import importlib.util, sys
    class Loader:
        def __init__(self, loader):
            self.loader = loader
        def __getattr__(self, name):
            return getattr(self.loader, name)
        def create_module(self, spec):
            return self.loader.create_module(spec)
        def exec_module(self, module):
            module.__loader__ = module.__spec__.loader = self.loader
            self.loader.exec_module(module)
            print("theirs", module.__name__, hasattr(module, "Module") or hasattr(module, "Optimizer"))
    class Finder:
        busy = False
        def find_spec(self, name, path=None, target=None):
            if self.busy or name not in ("torch.nn.modules.module", "torch.optim.optimizer"):
                return None
            Finder.busy = True
            try:
                spec = importlib.util.find_spec(name)
                spec.loader = Loader(spec.loader)
                return spec
            finally:
                Finder.busy = False
    sys.meta_path.insert(POSITION, Finder())
"""


@pytest.mark.parametrize("position", [0, 1], ids=["before ours", "behind ours"])
@pytest.mark.parametrize("place", ["sitecustomize", "script"])
def test_another_import_hook_lives_beside_ours(position: int, place: str, injected: Injected) -> None:
    """A foreign post-import hook on the same modules runs once, and so does ours, whichever comes first."""
    injected.write_all(FAKE_TORCH)
    injected.write(
        FOREIGN_HOOK.replace("POSITION", str(position)), f"user/{place if place == 'sitecustomize' else 'foreign'}.py"
    )
    injected.write(
        f"""
        {"import foreign" if place == "script" else ""}
        import torch.nn.modules.module as module, torch.optim.optimizer as optimizer
        from msmon.bootstrap import discovery
        for cls in (module.Module, optimizer.Optimizer):
            original = cls.__init__.__msmon_original__
            print(cls.__name__, hasattr(original, "__msmon_original__"), type(sys.modules[cls.__module__].__loader__).__name__)
        print(len(discovery.on_optimizer))
        """.replace("import torch", "import sys, torch", 1)
    )
    done = injected.run(sys.executable, "train.py", PYTHONPATH="user")
    assert (done.returncode, said(done)) == (0, [])
    assert done.stdout.splitlines() == [
        "theirs torch.nn.modules.module True",
        "theirs torch.optim.optimizer True",
        "Module False SourceFileLoader",
        "Optimizer False SourceFileLoader",
        "1",
    ]


def test_a_failing_import_of_torch_fails_as_without_us(injected: Injected) -> None:
    """The user's exception is the user's: the same error and traceback, and a second try may succeed."""
    injected.write_all(FAKE_TORCH)
    injected.write("import os\nif 'BROKEN' in os.environ: raise RuntimeError('no driver')\nclass Module: pass\n",
                   "torch/nn/modules/module.py")  # fmt: skip
    bare = injected.plain(sys.executable, "-c", "import torch.nn.modules.module", BROKEN="1")
    done = injected.python("import torch.nn.modules.module", BROKEN="1")
    assert "no driver" in bare.stderr
    assert done.returncode == bare.returncode
    assert said(done)[-1] == bare.stderr.splitlines()[-1] == "RuntimeError: no driver"
    retry = """
import os
try:
    import torch.nn.modules.module
except RuntimeError:
    del os.environ["BROKEN"]
import torch.nn.modules.module as module
print(module.Module)
"""
    done = injected.python(retry, BROKEN="1")
    assert (done.returncode, done.stdout) == (0, "<class 'torch.nn.modules.module.Module'>\n")


def test_what_we_cannot_do_does_not_keep_the_user_from_training(injected: Injected) -> None:
    """When the rest of msmon cannot be loaded, or there is nothing to patch, one message at most and the script goes on."""
    injected.write_all(FAKE_TORCH)
    construct = "from torch.optim.optimizer import Optimizer; print([Optimizer([]).constructed for _ in range(3)])"
    done = injected.python(construct)
    assert (done.returncode, done.stdout) == (0, "[True, True, True]\n")
    assert [line for line in said(done) if "cannot watch this process, training goes on" in line] == said(done)
    assert len(said(done)) == 1
    injected.write("class Optimizer: pass", "torch/optim/optimizer.py")  # no constructor of its own
    done = injected.python("from torch.optim.optimizer import Optimizer; print(Optimizer())")
    assert (done.returncode, said(done)) == (0, [])
    assert len(injected.decided("hook of torch.optim.optimizer failed")) == 1


def test_first_optimizers_of_several_threads(injected: Injected) -> None:
    """Threads that construct the first optimizers of a process at the same time all get theirs, and we start once."""
    injected.write_all(FAKE_TORCH)
    injected.write(
        """
        import threading
        from torch.optim.optimizer import Optimizer
        barrier = threading.Barrier(8)
        made = []
        def make():
            barrier.wait()
            made.append(Optimizer([]).constructed)
        threads = [threading.Thread(target=make) for _ in range(8)]
        for thread in threads: thread.start()
        for thread in threads: thread.join()
        print(len(made))
        """
    )
    done = injected.run(sys.executable, "train.py")
    assert (done.returncode, done.stdout) == (0, "8\n"), done.stderr
    assert len(said(done)) == 1


def test_a_folder_named_msmon_is_not_taken_for_ours(injected: Injected) -> None:
    """The processes of a run use the msmon that started it, whatever lies first on their path."""
    injected.write_all(FAKE_TORCH)
    injected.write("raise RuntimeError('not ours')", "msmon/__init__.py")
    done = injected.python("import torch.optim.optimizer, msmon; print(msmon.__file__)")
    assert (done.returncode, said(done)) == (0, [])
    assert done.stdout == f"{SITE_FOLDER.parents[1] / '__init__.py'}\n"


def test_an_interpreter_without_msmon_is_watched_from_where_it_is(injected: Injected) -> None:
    """A child under another Python, which has no msmon, loads ours by its place; what it lacks is said, training goes on."""
    base = Path(sys.base_prefix, "bin", f"python{sys.version_info[0]}.{sys.version_info[1]}")
    probe = "import importlib.util as u, sys; sys.exit(any(u.find_spec(name) for name in ('msmon', 'torch')))"
    if not base.exists() or subprocess.run([base, "-I", "-c", probe], check=False).returncode:
        pytest.skip("the base interpreter is absent, or has packages of its own")
    injected.write_all(FAKE_TORCH)
    code = """
from torch.optim.optimizer import Optimizer
print(hasattr(Optimizer.__init__, "__msmon_original__"), Optimizer([]).constructed)
"""
    done = injected.run(str(base), "-c", code)
    assert (done.returncode, done.stdout) == (0, "True True\n")
    (line,) = said(done)
    assert "cannot watch this process, training goes on: " in line
    assert injected.boots() == 1


# The process is the user's


def test_the_command_keeps_its_process(injected: Injected) -> None:
    """Same PID, standard input, output and error, working directory and argument vector."""
    code = "import os, sys; print(os.getpid(), os.getppid(), os.getcwd(), sys.stdin.read()); sys.stderr.write('err')"
    command = [MSMON, "run", "--output", str(injected.output), "--", sys.executable, "-c", code]
    process = subprocess.Popen(
        command, cwd=injected.folder, env=injected.environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    out, err = process.communicate("given\nto it", timeout=900)
    assert out == f"{process.pid} {os.getpid()} {injected.folder} given\nto it\n"
    assert err.startswith("err")


@pytest.mark.parametrize(
    ("code", "status"),
    [
        ("import sys; sys.exit(3)", 3),
        ("import sys; sys.exit('a message')", 1),
        ("raise ValueError('of the user')", 1),
        ("import os; os._exit(9)", 9),
        ("import os, signal; os.kill(os.getpid(), signal.SIGTERM)", -signal.SIGTERM),
        ("import os, signal; os.kill(os.getpid(), signal.SIGINT)", -signal.SIGINT),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", -signal.SIGKILL),
        ("import os; os.abort()", -signal.SIGABRT),
        ("import sys; sys.stdout.close()", 0),
    ],
)
def test_the_command_ends_as_without_us(code: str, status: int, injected: Injected) -> None:
    """Exit codes and signals are passed on, and what stands on stderr is the user's."""
    bare = injected.plain(sys.executable, "-c", code)
    done = injected.python(code)
    assert (bare.returncode, done.returncode, done.stdout) == (status, status, bare.stdout)
    assert said(done) == bare.stderr.splitlines()


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads /proc")
def test_signals_are_found_as_without_us(injected: Injected) -> None:
    """What Python ignores for itself is not handed on; SIGINT that a shell ignores for a background job stays ignored."""
    show = ["grep", "-E", "^Sig(Blk|Ign|Cgt)", "/proc/self/status"]
    assert injected.run(*show).stdout == injected.plain(*show).stdout
    code = "import os, signal; os.kill(os.getpid(), signal.SIGINT); print('went on', signal.getsignal(signal.SIGINT))"
    done = injected.plain("sh", "-c", 'trap "" INT; exec "$0" "$@"', MSMON, "run", "--", sys.executable, "-c", code)
    assert (done.returncode, done.stdout) == (0, f"went on {signal.SIG_IGN}\n")


def test_a_reader_that_leaves_ends_the_command(injected: Injected) -> None:
    """A pipe whose reader is gone ends an ordinary command by SIGPIPE, silently, as in any shell."""
    done = injected.plain("bash", "-c", f"{shlex.quote(MSMON)} run -- yes | head -n 1; exit ${{PIPESTATUS[0]}}")
    assert (done.returncode, done.stdout) == (128 + signal.SIGPIPE, "y\n")
    assert all(line.startswith(NOT_REACHED) for line in done.stderr.splitlines())


# When nothing was seen


OUT_OF_REACH = {
    "no Python": ("echo ran", NOT_REACHED),
    "a wrapper that clears PYTHONPATH": ('env -u PYTHONPATH "$PYTHON" -c 1; echo ran', NOT_REACHED),
    "a wrapper that sets PYTHONPATH": ('PYTHONPATH=/tmp "$PYTHON" -c 1; echo ran', NOT_REACHED),
    "a flag inside of a wrapper": ('"$PYTHON" -I -c 1; echo ran', NOT_REACHED),
    "killed": ("echo ran; kill -9 $$", NOT_REACHED),
    "Python, and no training": ('"$PYTHON" -c 1; echo ran', f"msmon: {NOTHING_SEEN} in any process"),
    "the end is not told": ('exec "$PYTHON" -c "print(\'ran\', flush=True); import os; os._exit(0)"', f"msmon: {NOTHING_SEEN} in any"),
    "another run inside": ('"$MSMON_COMMAND" run -- sh -c "echo ran"', NOT_REACHED),
}  # fmt: skip


@pytest.mark.parametrize("how", OUT_OF_REACH)
def test_a_command_out_of_reach_is_said(how: str, injected: Injected) -> None:
    """Whoever runs a command in vain learns it in one line at its end, though no process of it can say so."""
    script, line = OUT_OF_REACH[how]
    done = injected.run("sh", "-c", script, PYTHON=sys.executable, MSMON_COMMAND=MSMON)
    assert done.stdout == "ran\n"
    assert [said.startswith(line) for said in done.stderr.splitlines()] == [True], done.stderr


@pytest.mark.slow
def test_a_training_under_a_shell_is_not_said_to_be_out_of_reach(injected: Injected) -> None:
    """Whatever it leaves: rows, a structure, what only the library's calls return, or a file that says off."""
    injected.write(TRAIN + "train()")
    for config in ({"wg_distribution": True}, {"print_struct": True}, {"wg_distribution": True, "format": "api"}):
        path = injected.write_config(**config)
        command = ["sh", "-c", f"{shlex.quote(sys.executable)} train.py; true"]
        done = injected.plain(MSMON, "run", "--config", str(path), "--output", "out", "--", *command)
        assert NOT_REACHED not in done.stderr
        assert NOTHING_SEEN not in done.stderr


def test_what_waits_for_the_end_is_not_of_the_command(injected: Injected) -> None:
    """It is no child of the command, not in its session or group, and keeps none of its files and pipes open."""
    code = """
        import os, pathlib, time
        def waiting():
            for process in pathlib.Path("/proc").iterdir():
                try:
                    words = (process / "cmdline").read_text().split(chr(0))
                except OSError:
                    continue  # no process, or one that ended this moment
                if f"{os.environ['MSMON_CONFIG']}.{os.environ['MSMON_RUN_ID']}" in words:
                    return process
        while not (process := waiting()):
            time.sleep(0.01)  # it is about to start
        number = int(process.name)
        print(os.getsid(number) == os.getsid(0), os.getpgid(number) == os.getpgid(0))
        held = set()
        for name in os.listdir(process / "fd"):
            try:
                held.add(os.readlink(process / "fd" / name))
            except OSError:
                pass  # a file that Python reads at its start
        print(os.readlink("/proc/self/fd/1") in held, os.readlink("/proc/self/fd/2") in held, os.path.abspath("held") in held)
        print(os.readlink(process / "cwd"), os.path.exists("/proc/self/fd/7"), os.path.exists("/proc/self/fd/8"))
        os.waitpid(-1, os.WNOHANG)
    """
    script = injected.write(code, "look.py")
    words = [MSMON, "run", "--output", "out", "--", sys.executable, str(script)]
    done = injected.plain("bash", "-c", f"exec 7>held; exec {shlex.join(words)}")
    assert done.stdout == "False False\nFalse True False\n/ True False\n"
    assert "ChildProcessError" in done.stderr


@pytest.mark.parametrize("how", ["a directory of its own", "a directory gone on with"])
def test_what_another_process_recorded_counts(how: str, injected: Injected) -> None:
    """Nothing is said when any process of the run has a directory, be it one of an earlier run (`append_output`)."""
    injected.write(
        """
        import json, os, sys
        run_id, root = os.environ["MSMON_RUN_ID"], os.path.dirname(os.environ["MSMON_CONFIG"])
        name = {"a directory of its own": f"Jan01_00-00-00-rank1-{run_id}"}.get(sys.argv[1], "Jan01_00-00-00-rank1-00000000")
        os.mkdir(f"{root}/{name}")
        if run_id not in name:
            with open(f"{root}/{name}/run.json", "w") as file:
                json.dump({"msmon": {"run_id": run_id}}, file)
        """
    )
    assert injected.run(sys.executable, "train.py", how).stderr == ""
    assert NOTHING_SEEN in injected.python("pass").stderr  # what earlier runs recorded does not count


@pytest.mark.parametrize(
    ("code", "seen"),
    [
        ("raise SystemExit(5)", "torch was never imported"),
        ("import torch; raise SystemExit(5)", "torch was never imported"),
        ("import torch.nn.modules.module as m; [m.Module() for _ in range(3)]; raise SystemExit(5)", "3 modules and no optimizer"),
        ("import os\nif os.fork() == 0: raise SystemExit(0)\nos.wait()\nraise SystemExit(5)", "torch was never imported"),
        ("import subprocess, sys; subprocess.run([sys.executable, '-c', 'pass']); raise SystemExit(5)", "torch was never imported"),
    ],
    ids=["no torch", "nothing of torch", "no optimizer", "a fork", "a child"],
)  # fmt: skip
def test_nothing_seen_is_said_once(code: str, seen: str, injected: Injected) -> None:
    """One line on stderr at the end of the command's own process, with what was seen; its exit code stays."""
    injected.write_all(FAKE_TORCH)
    done = injected.python(code)
    assert (done.returncode, done.stdout) == (5, "")
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"msmon: {NOTHING_SEEN}: ")
    assert seen in line
    assert "MSMON_DEBUG=1" in line


def test_debug_on_stderr(injected: Injected) -> None:
    """MSMON_DEBUG=1 shows on stderr what each process decided, and never on stdout."""
    injected.write_all(FAKE_TORCH)
    code = "import subprocess, sys, torch.optim.optimizer; subprocess.run([sys.executable, '-c', 'pass'])"
    done = injected.python(code, MSMON_DEBUG="1")
    assert done.stdout == ""
    decided = [line for line in done.stderr.splitlines() if line.startswith("msmon: pid ")]
    assert sum("waiting for torch" in line for line in decided) == 2
    assert sum("torch.optim.optimizer imported" in line for line in decided) == 1


# Real training processes


@pytest.mark.slow
def test_processes_that_do_not_train_leave_no_trace(injected: Injected) -> None:
    """Loader workers, forked or spawned, and forks of a watched process record nothing; modules of torch are torch's.

    Spawned workers construct the script's optimizer once more, as the module of the script is imported in them.
    """
    injected.write(
        TRAIN
        + """
import inspect, os, pkgutil, sys, threading
from torch.utils.data import DataLoader
model = torch.nn.Linear(3, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 8
    def __getitem__(self, index):
        with torch.no_grad():
            return model(torch.ones(3)).detach() * 0 + torch.ones(3)

if __name__ == "__main__":
    for context in ("fork", "spawn"):
        for batch in DataLoader(Data(), batch_size=4, num_workers=2, multiprocessing_context=context):
            optimizer.zero_grad()
            model(batch).sum().backward()
            optimizer.step()
    for leave in (sys.exit, os._exit):
        child = os.fork()
        if child == 0:
            assert threading.active_count() == 1
            model(torch.ones(2, 3)).sum()
            leave(7)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    for each in (sys.modules["torch.optim.optimizer"], sys.modules["torch.nn.modules.module"]):
        assert type(each.__loader__).__name__ == "SourceFileLoader"
        assert vars(each.__loader__).keys() == {"name", "path"}
        assert inspect.getsource(each)
    assert pkgutil.get_data("torch", "version.py")
    print("done")
"""
    )
    done = injected.run(sys.executable, "train.py")
    assert (done.returncode, done.stdout) == (0, "done\n"), done.stderr
    (directory,) = done.directories()
    assert [int(line["step"]) for line in done.steps()] == [0, 1, 2, 3]
    written = {path for path in injected.output.iterdir() if not path.name.startswith(".")}
    assert written == {directory, injected.output / "anomaly_detected"}
    assert [path.name for path in (injected.output / "anomaly_detected").iterdir()] == ["rank0"]
    assert all(line.startswith("msmon: ") for line in done.stderr.splitlines())
    assert len(injected.decided("watching")) == 1 + 2  # the spawned workers have constructed the optimizer


@pytest.mark.slow
def test_worker_starts_beside_our_threads_never_hang(injected: Injected) -> None:
    """200 forked loader workers start while our writer is alive; the training ends, with one directory."""
    injected.write(
        TRAIN
        + """
from torch.utils.data import DataLoader, TensorDataset
model, optimizer = train()
data = TensorDataset(torch.ones(4, 3))
for epoch in range(100):
    for (batch,) in DataLoader(data, batch_size=2, num_workers=2, multiprocessing_context="fork"):
        pass
    optimizer.zero_grad()
    model(batch).sum().backward()
    optimizer.step()
"""
    )
    done = injected.run(sys.executable, "train.py")
    assert done.returncode == 0, done.stderr
    assert len(done.directories()) == 1
    assert len(done.steps()) == 102


@pytest.mark.slow
@pytest.mark.parametrize("method", ["spawn", "fork", "forkserver"])
def test_workers_of_multiprocessing_are_watched(method: str, injected: Injected) -> None:
    """Workers that train record, each in a directory of its own under the run's id, with the rank that they are given.

    So do forks of a process that is watched already; what that process recorded stays as it was.
    """
    injected.write(
        TRAIN
        + f"""
import os
import torch.multiprocessing as mp
def work(rank):
    os.environ.update(RANK=str(rank), WORLD_SIZE="2")
    train(steps=3)
if __name__ == "__main__":
    if "{method}" == "fork":
        train(steps=2)
    mp.start_processes(work, nprocs=2, start_method="{method}")
"""
    )
    done = injected.run(sys.executable, "train.py")
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
    steps = [[int(line["step"]) for line in read] for read in recorded_steps(done)]
    parent = [[0, 1]] if method == "fork" else []
    assert sorted(steps) == sorted([*parent, [0, 1, 2], [0, 1, 2]])
    assert len(done.directories(1)) == 1
    assert len({run_id(directory) for rank in (0, 1) for directory in done.directories(rank)}) == 1
    assert NOTHING_SEEN not in done.stderr


def recorded_steps(done: Finished) -> list[list[dict[str, str]]]:
    """The steps of each directory of a run."""
    return [read_steps(directory) for directory in run_directories(done.output)]


def run_id(directory: Path) -> str:
    return directory.name.rsplit("-", 1)[1]


@pytest.mark.slow
@pytest.mark.skipif(" " in sys.prefix, reason="torch's compiler names its own libraries without quotes")
def test_workers_of_the_compiler_are_not_injected(injected: Injected) -> None:
    """torch.compile starts processes of its own: none of them runs our sitecustomize, and the training is recorded."""
    injected.write(
        TRAIN
        + """
import os, sys
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.ReLU(), torch.nn.Linear(2, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
compiled = torch.compile(model)
for _ in range(2):
    optimizer.zero_grad()
    compiled(torch.ones(4, 3)).sum().backward()
    optimizer.step()
print("compiled", torch._dynamo.utils.counters["stats"]["unique_graphs"])
"""
    )
    done = injected.run(
        sys.executable, "train.py", TORCHINDUCTOR_CACHE_DIR=str(injected.folder / "cache"), TORCHINDUCTOR_COMPILE_THREADS="2",
        TORCHINDUCTOR_WORKER_START="subprocess",
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (0, "compiled 1\n"), done.stderr
    assert injected.boots() == 1
    assert len(done.steps()) == 2


@pytest.mark.slow
def test_the_forwarded_settings_name_the_run(injected: Injected) -> None:
    """A training process that was handed only the forwarded variable records under the id of the run."""
    injected.write(TRAIN + "train()")
    script = 'echo "$MSMON_RUN_ID"; exec env -u MSMON_CONFIG -u MSMON_RUN_ID "$0" train.py'
    done = injected.run("sh", "-c", script, sys.executable)
    assert done.returncode == 0
    (directory,) = done.directories()
    assert run_id(directory) == done.run_file()["msmon"]["run_id"] == done.stdout.strip()
    assert NOTHING_SEEN not in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ending", "status", "steps"),
    [
        ("train(); os.kill(os.getpid(), signal.SIGINT)", -signal.SIGINT, 2),
        ("train(); sys.exit(3)", 3, 2),
        ("train(steps=0); sys.exit(3)", 3, 0),
    ],
    ids=["Ctrl-C", "exit", "no step"],
)
def test_a_training_ends_as_without_us(ending: str, status: int, steps: int, injected: Injected) -> None:
    """Exit codes, and Ctrl-C as a signal, are those of the script; an optimizer that never stepped is said, once."""
    injected.write(TRAIN + f"import os, signal, sys\n{ending}")
    done = injected.run(sys.executable, "train.py")
    assert (done.returncode, done.stdout) == (status, ""), done.stderr
    assert len(done.steps()) == steps
    assert len(done.directories()) == bool(steps)
    assert done.stderr.count(NOTHING_SEEN) == (not steps)
    assert ("1 optimizers were constructed in this process and none stepped" in done.stderr) == (not steps)


# torchrun and its like


@pytest.mark.slow
def test_torchrun_is_not_watched_and_its_workers_are(injected: Injected) -> None:
    """One directory a rank under one run id; the agent imports torch, attaches nothing and complains of nothing."""
    injected.write(TRAIN + "train()")
    done = injected.run(TORCHRUN, "--standalone", "--nproc-per-node", "2", "train.py", OMP_NUM_THREADS="1")
    assert done.returncode == 0, done.stderr
    log = injected.decided("msmon: ")
    assert [sum(text in line for line in log) for text in ("waiting for torch", "optimizer imported", "watching")] == [
        3,
        3,
        2,
    ]
    directories = [*done.directories(0), *done.directories(1)]
    assert len(directories) == len(run_directories(done.output)) == 2
    assert len({run_id(directory) for directory in directories}) == 1
    assert [len(done.steps(rank)) for rank in (0, 1)] == [2, 2]
    assert [done.run_file(rank)["world_size"] for rank in (0, 1)] == [2, 2]
    assert NOTHING_SEEN not in done.stderr


@pytest.mark.slow
def test_a_restarted_worker_goes_on_under_the_same_run(injected: Injected) -> None:
    """torchrun --max-restarts: the new pair records in new directories with the same run id, the old ones stay."""
    injected.write(
        TRAIN
        + """
import os, pathlib, sys, time
train()
stepped = pathlib.Path("rank0-stepped")
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    if os.environ["RANK"] == "0":
        stepped.touch()
        time.sleep(300)  # until the agent ends it
    deadline = time.monotonic() + 120
    while not stepped.exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    sys.exit(5)
"""
    )
    command = [TORCHRUN, "--standalone", "--max-restarts", "1", "--nproc-per-node", "2", "train.py"]
    done = injected.run(*command, OMP_NUM_THREADS="1")
    assert done.returncode == 0, done.stderr
    directories = run_directories(done.output)
    assert [len(done.directories(rank)) for rank in (0, 1)] == [2, 2]
    assert len({run_id(directory) for directory in directories}) == 1
    assert [len(read_steps(directory)) for directory in directories] == [2, 2, 2, 2]
    assert len(injected.decided("watching")) == 4


@pytest.mark.slow
@pytest.mark.parametrize(
    "command",
    [
        [TORCHRUN, "--standalone", "--nproc-per-node", "2", "noop.py"],
        [TORCHRUN, "--standalone", "--nproc-per-node", "2", "-m", "noop"],
        [TORCHRUN, "--standalone", "--nproc-per-node", "2", "--no-python", sys.executable, "noop.py"],
        [TORCHRUN, "--standalone", "--nproc-per-node", "2", "--run-path", "noop.py"],
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "noop.py"],
        [ACCELERATE, "launch", "--cpu", "--num_processes", "1", "noop.py"],
        [ACCELERATE, "launch", "--multi_gpu", "--num_processes", "2", "noop.py"],
    ],
    ids=[
        "torchrun",
        "torchrun -m",
        "torchrun --no-python",
        "torchrun --run-path",
        "python -m torch.distributed.run",
        "accelerate",
        "accelerate --multi_gpu",
    ],
)
def test_launchers_pass_us_on(command: list[str], injected: Injected) -> None:
    """Workers of each launcher are injected; when none of them trains, that is said once, and the exit code is 0."""
    injected.write(f"import os\nopen(f'worker-{{os.getpid()}}', 'w').close()\n{SHOW_FINDERS}", "noop.py")
    if not Path(command[0]).exists():
        pytest.skip(f"{command[0]} is not installed")
    done = injected.run(*command, OMP_NUM_THREADS="1", PYTHONWARNINGS="ignore", ACCELERATE_USE_CPU="1")
    assert done.returncode == 0, done.stderr
    workers = {path.name.partition("-")[2] for path in injected.folder.glob("worker-*")}
    assert done.stdout.count("1") == len(workers) == (1 if "--cpu" in command else 2)
    assert workers <= {line.split()[2] for line in injected.decided("waiting for torch")}
    assert done.stderr.count(NOTHING_SEEN) == 1
    assert run_directories(done.output) == []
