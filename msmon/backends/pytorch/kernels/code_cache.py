"""Machine code for this processor: compiled by llvmlite, and kept on disk so that later runs need no compiler.

Loading llvmlite takes 80 MB and a moment; the code itself is a few kilobytes. What is kept is named after everything that
it depends on: the source, the processor, the version of llvmlite. A file is read only if nobody else could have written
it. Where there is no such place, or where code refers to something outside itself, it is compiled in every run.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import json
import mmap
import os
import platform
import stat
import sys
import tempfile
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from msmon import env
from msmon.runtime.interruption import pass_on

if TYPE_CHECKING:
    from collections.abc import Sequence

_FORMAT = 1
_EXECUTABLE = mmap.PROT_READ | mmap.PROT_EXEC if sys.platform == "linux" else 0


class Processor(NamedTuple):
    """What code is compiled for.

    Attributes:
        name: Its kind.
        features: As the system names them.
    """

    name: str
    features: frozenset[str]

    def has(self, *features: str) -> bool:
        """Whether it has any of these."""
        return not self.features.isdisjoint(features)


@functools.cache
def processor() -> Processor:
    """The one that this process runs on, by the system where that says it, else by llvmlite."""
    machine = platform.machine()
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").partition("\n\n")[0].splitlines()
    except OSError as error:
        pass_on(error)
        lines = []
    fields = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in lines)}
    features = fields.get("flags") or fields.get("Features")
    if features:
        kind = [fields.get(key, "") for key in ("vendor_id", "cpu family", "model", "model name", "stepping")]
        return Processor(" ".join([machine, *kind]), frozenset(features.split()))
    from llvmlite import binding  # noqa: PLC0415 - takes 80 MB

    found = frozenset(name for name, there in binding.get_host_cpu_features().items() if there)
    return Processor(f"{machine} {binding.get_host_cpu_name()}", found)


def load(source: str, names: Sequence[str]) -> tuple[dict[str, int], object]:
    """Addresses of functions, and what must live as long as they are used.

    Args:
        source: LLVM assembly.
        names: Of the functions.

    Raises:
        ModuleNotFoundError: llvmlite is not installed.
        RuntimeError: llvmlite cannot compile them for this processor.
    """
    try:
        version = metadata.version("llvmlite")
    except metadata.PackageNotFoundError:
        raise ModuleNotFoundError("llvmlite is not installed", name="llvmlite") from None
    folder = _folder()
    if folder is None:
        return _compile(source, names)[:2]
    key = json.dumps([_FORMAT, source, names, processor().name, sorted(processor().features), version])
    path = folder / f"{hashlib.sha256(key.encode()).hexdigest()}.code"
    try:
        return _map(_read(path))
    except (OSError, ValueError) as error:
        pass_on(error)
    addresses, owner, code = _compile(source, names)
    if code is not None:
        begin = min(addresses.values())
        _keep(path, {name: address - begin for name, address in addresses.items()}, code)
    return addresses, owner


def _compile(source: str, names: Sequence[str]) -> tuple[dict[str, int], object, bytes | None]:
    """Compile into memory; also the bare machine code, if that is complete by itself."""
    from llvmlite import binding  # noqa: PLC0415 - takes 80 MB

    binding.initialize_native_target()
    binding.initialize_native_asmprinter()
    machine = binding.Target.from_default_triple().create_target_machine(
        cpu=binding.get_host_cpu_name(), features=binding.get_host_cpu_features().flatten(), jit=True
    )
    module = binding.parse_assembly(source)
    module.triple, module.data_layout = machine.triple, str(machine.target_data)
    tuning = binding.create_pipeline_tuning_options(speed_level=2)
    tuning.loop_unrolling = tuning.loop_vectorization = tuning.slp_vectorization = False
    passes = binding.create_pass_builder(machine, tuning)
    passes.getModulePassManager().run(module, passes)
    compiled = binding.ObjectFileRef.from_data(machine.emit_object(module))
    filled = [(section.name(), section.data()) for section in compiled.sections() if section.size()]
    complete = not any(name.startswith((b".rela.text", b".rela.ltext")) for name, _ in filled)
    code = [data for name, data in filled if name in {b".text", b".ltext"}]
    engine = binding.create_mcjit_compiler(binding.parse_assembly(""), machine)
    engine.add_object_file(compiled)
    engine.finalize_object()
    addresses = {name: engine.get_function_address(name) for name in names}
    return addresses, engine, code[0] if complete and len(code) == 1 else None


def _folder() -> Path | None:
    """Where code is kept; ``None`` where it cannot be."""
    wanted = os.environ.get(env.CODE_CACHE, "")
    if wanted == "0" or sys.platform != "linux" or platform.machine() != "x86_64":
        return None
    try:
        folder = Path(wanted or Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "msmon" / "code")
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        _only_ours(folder.lstat(), stat.S_ISDIR)
    except (OSError, RuntimeError) as error:  # there may be no home
        pass_on(error)
        return None
    return folder


def _only_ours(found: os.stat_result, kind: object) -> None:
    """Raise ``PermissionError`` if anybody else could have written it."""
    if not kind(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):  # type: ignore[operator]
        raise PermissionError("others may write here")


def _read(path: Path) -> bytes:
    with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC), "rb") as file:  # noqa: PTH123 - pathlib takes no flags
        _only_ours(os.fstat(file.fileno()), stat.S_ISREG)
        digest, _, content = file.read().partition(b"\n")
    if hashlib.sha256(content).hexdigest().encode() != digest:
        raise ValueError("it is damaged")
    return content


def _keep(path: Path, offsets: dict[str, int], code: bytes) -> None:
    content = json.dumps(offsets).encode() + b"\n" + code
    digest = hashlib.sha256(content).hexdigest().encode()
    try:
        with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
            file.write(digest + b"\n" + content)
        Path(file.name).replace(path)
    except OSError as error:
        pass_on(error)
        return  # a full disk, say: the next run compiles again


def _map(content: bytes) -> tuple[dict[str, int], object]:
    """Put code into memory that can be executed, and no longer written."""
    head, _, code = content.partition(b"\n")
    memory = mmap.mmap(-1, len(code), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.write(code)
    begin = ctypes.c_char.from_buffer(memory)  # also keeps the mapping from being closed
    address = ctypes.addressof(begin)
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mprotect(ctypes.c_void_p(address), ctypes.c_size_t(len(code)), _EXECUTABLE):
        raise OSError(ctypes.get_errno(), "memory cannot be made executable")
    return {name: address + offset for name, offset in json.loads(head).items()}, begin
