"""Runs at the start of every Python process of a monitored run. Imports os and sys only; a process pays for it under 2 ms.

It waits for torch to be imported, then for an optimizer: launchers, loader workers and compilers never get that far.
The directory leaves ``sys.path`` at once, so that nothing a process derives from its path is injected (the workers of
torch.compile), and stays in ``PYTHONPATH``, so that real children are. A ``sitecustomize`` that this one hides is run.

A training may start any Python, 2.7 too: this file keeps to what all of them can read, and does nothing in the old ones.
"""

import os
import sys

_HERE = os.path.dirname(os.path.abspath(__file__))


_OLDEST = (3, 10)

_AWAITED = (
    "torch.nn.modules.module",
    "torch.optim.optimizer",
    "torch._dynamo.mutation_guard",
)


def _debug(text):
    where = os.environ.get("MSMON_DEBUG")
    if not where:
        return
    line = "msmon: pid {} of {}: {}\n".format(os.getpid(), os.getppid(), text)
    try:
        if where == "1":
            sys.stderr.write(line)
        else:
            with open(where, "ab") as file:
                file.write(line if isinstance(line, bytes) else line.encode("utf-8", "backslashreplace"))
    except (OSError, IOError, AttributeError):
        pass  # nowhere to write: the process is not ours to disturb


class _Finder:
    """Runs a hook right after one of a few modules has been executed. Loaders keep their type and leave no residue."""

    hooks = {}

    @classmethod
    def find_spec(cls, name, path=None, target=None):
        hook = cls.hooks.get(name)
        if hook is None:
            return None
        for finder in sys.meta_path:
            if finder is cls or not hasattr(finder, "find_spec"):
                continue
            spec = finder.find_spec(name, path, target)
            if spec is not None:
                cls._run_after(spec.loader, hook)
                return spec
        return None

    @staticmethod
    def _run_after(loader, hook):
        execute = getattr(loader, "exec_module", None)
        if execute is None:
            return

        def exec_module(module):
            try:
                del loader.exec_module
            except AttributeError:
                pass  # a second import of the same spec
            execute(module)
            try:
                hook(module)
            except Exception as error:  # a fault of ours must not fail the user's import
                _debug("hook of {} failed: {!r}".format(module.__name__, error))

        try:
            loader.exec_module = exec_module
        except AttributeError:
            _debug("{} takes no hook".format(type(loader).__name__))


def _package(settings):
    """Import msmon from where ``msmon run`` has it; where that does not exist (another host), from this interpreter."""
    if "msmon" in sys.modules:
        return
    import hashlib
    import importlib.util
    import json

    with open(settings, "rb") as file:
        content = file.read()
    if hashlib.sha256(content).hexdigest() != os.path.basename(settings).rpartition("-")[2][:-5]:
        raise ValueError("%s is not as msmon run has written it" % settings)  # others may write to its folder
    folder = json.loads(content)["package"]
    code = os.path.join(folder, "__init__.py")
    if not os.path.isfile(code):
        import msmon  # noqa: F401

        return
    spec = importlib.util.spec_from_file_location("msmon", code, submodule_search_locations=[folder])
    sys.modules["msmon"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sys.modules["msmon"])


def _arm(settings):
    def note(module):
        try:
            _package(settings)
        except ValueError as error:
            _Finder.hooks = {}
            sys.stderr.write("msmon: %s: nothing is recorded in this process\n" % error)
            return
        from msmon.bootstrap import process

        process.framework_imported(module, _debug)

    _Finder.hooks = dict.fromkeys(_AWAITED, note)
    sys.meta_path.insert(0, _Finder)


def _marks(settings):
    """The file for marks of this run, where there is one: see ``unreached.py``."""
    return "{}.{}".format(settings, os.environ.get("MSMON_RUN_ID") or os.environ.get("PYTHON_MSMON_RUN_ID") or "")


def _leave_mark(marks, mark):
    """Leave a mark for the process that looks when the command has ended."""
    if os.path.basename(marks).startswith(".msmon-") and os.path.isfile(marks):  # else the variable is somebody else's
        try:
            os.chmod(marks, os.stat(marks).st_mode & 0o777 | mark)
        except (OSError, IOError) as error:
            _debug("no mark: {!r}".format(error))


def _tell_at_exit(marks):
    if os.environ.get("MSMON_MAIN_PID") == str(os.getpid()):
        import atexit

        # Python 2 empties a module that nothing refers to any more, and the user's own takes our place in sys.modules.
        atexit.register(_at_exit, marks, os.getpid(), sys.modules.get(__name__))


def _at_exit(marks, pid, _kept):
    """If no process of the run recorded anything, say so, and what was seen in the command's own process.

    Nothing is imported here: an ``exec`` of text (``dataclasses`` has one) makes Python forget that it ends by Ctrl-C.
    """
    process = sys.modules.get("msmon.bootstrap.process")
    try:
        if os.getpid() != pid:
            return
        recorded = (process and process.records()) or _recorded(marks)
        os.remove(marks)
        if recorded:
            return
        if sys.version_info < _OLDEST:
            seen = "this is Python {}.{}, msmon needs 3.10".format(*sys.version_info[:2])
        elif process:
            seen = process.seen()
        else:
            seen = "torch was never imported in this process; is it another Python that trains?"
        sys.stderr.write(
            "msmon: no training step was seen: {} (MSMON_DEBUG=1 shows what each process decided)\n".format(seen)
        )
    except Exception as error:  # the process ends; its exit code is the user's
        _debug("at exit: {!r}".format(error))


def _recorded(marks):
    """Whether the run has a directory: its name ends with the run's id or, in one gone on with, run.json has it."""
    if os.stat(marks).st_mode & 0o667 == 0o601:  # a process says that it has trained, on a disk that keeps modes
        return True
    root, name = os.path.split(marks)
    run_id = name.rpartition(".")[2]
    for directory in os.listdir(root):
        if directory.endswith("-" + run_id):
            return True
        report = os.path.join(root, directory, "run.json")
        if os.path.isfile(report) and os.path.getmtime(report) >= os.path.getmtime(marks):
            with open(report, "rb") as file:
                if run_id.encode() in file.read():
                    return True
    return False


def _start():
    settings = os.environ.get("MSMON_CONFIG") or os.environ.get("PYTHON_MSMON_CONFIG")
    if getattr(sys, "_msmon_started", False):
        return "already started"
    if os.environ.get("MSMON") == "0":
        return "off: MSMON=0"
    if not settings:
        return "off: no MSMON_CONFIG"
    if not os.path.isfile(settings):
        return "off: {} does not exist (left over from an earlier run?)".format(settings)
    sys._msmon_started = True
    marks = _marks(settings)
    _leave_mark(marks, 0o100)
    _tell_at_exit(marks)
    if sys.version_info < _OLDEST:
        return "off: Python {}.{}, msmon needs 3.10".format(*sys.version_info[:2])
    _arm(settings)
    return "waiting for torch"


def _chain():
    """Run the sitecustomize that this one hides, under its own name, as if we were not here."""
    here = os.path.realpath(_HERE)
    sys.path[:] = [entry for entry in sys.path if not entry or os.path.realpath(entry) != here]
    ours = sys.modules.pop("sitecustomize", None)
    try:
        import sitecustomize  # noqa: F401
    except ImportError as error:
        missing = getattr(error, "name", None) or str(error).split(" ")[-1]  # Python 2 has the text only
        if missing != "sitecustomize":
            raise
    finally:
        if ours is not None:
            sys.modules.setdefault("sitecustomize", ours)


try:
    _debug("{} argv={} flags={}".format(_start(), getattr(sys, "orig_argv", []), sys.flags))
except Exception as error:  # noqa: BLE001
    _debug("start failed: {!r}".format(error))
_chain()
