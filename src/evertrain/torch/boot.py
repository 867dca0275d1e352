"""The first code in every rank's process: prepare it, then run the user's script as `python script.py` would.

    python -m evertrain.torch.boot [--rank N] [--module] -- script.py ARG...

The rank is for people who look at the list of processes (`title`).

What has to be arranged before the script: the process must not outlive its agent, its stack must be readable from
outside at any time, the descriptors it inherited must not leak into processes that the script starts, and torch's
slowest import must be put off (`lazy_dynamo`). Beside that, memory is kept that the next step will use again. All of it
takes a few milliseconds and imports neither torch nor anything else that the script may want to import first.

The script then gets a `__main__` module of its own instead of being run by `runpy`: `runpy.run_path` puts the old
`__main__` back when the script's last line is done, while exit handlers, threads and unpickling may still need the new
one, and shows its own frames in every traceback.
"""

from __future__ import annotations

import faulthandler
import importlib.machinery
import importlib.util
import io
import os
import signal
import sys
from collections.abc import Callable
from types import CodeType, ModuleType, TracebackType
from typing import NoReturn

from evertrain.mindio import board, lifeline, title
from evertrain.torch import lazy_dynamo

AGENT_PID = "EVERTRAIN_AGENT_PID"
SPARE_FD = "EVERTRAIN_SPARE_FD"
_INHERITED = (board.BOARD_FD, board.STACK_FD, board.FAULT_BOARD_FD, SPARE_FD)

STACK_SIGNAL = signal.SIGRTMIN + 8
_PR_SET_PDEATHSIG = 1
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # of glibc's malloc.h
_CANNOT_RUN = 2
"""Exit code when there is nothing to run; Python's own for a script that can't be opened."""


def prepare() -> None:
    """Make this process one that the agent can watch. Call once, before the script and before torch is imported."""
    die_with_agent()
    keep_descriptors_private()
    _show_stack_on_signal()
    mark_boot()
    lifeline.hold()
    _keep_freed_memory()
    lazy_dynamo.install()


def mark_boot() -> None:
    """Tell the agent that the script is about to start."""
    if board.BOARD_FD in os.environ:
        board.Board(int(os.environ[board.BOARD_FD])).mark(board.BOOT)


def run(argv: list[str]) -> None:
    """Run the script of `[--module] -- script ARG...` in place of the current `__main__`; returns when it is done."""
    module, arguments = parse(argv)
    if module:
        code, main = _find_module(arguments[0])
        arguments = [main.__file__ or arguments[0], *arguments[1:]]
    else:
        code, main = _find_script(arguments[0])
    # The same list object: somebody may already hold a reference to it.
    sys.argv[:] = arguments
    sys.modules["__main__"] = main
    try:
        exec(code, main.__dict__)
    except SystemExit:
        raise
    except BaseException:
        _hide_own_frames(code)
        raise


def parse(argv: list[str]) -> tuple[bool, list[str]]:
    """Split the command line into "is it a module" and the script's own argv."""
    options, arguments = argv, []
    if "--" in argv:
        at = argv.index("--")
        options, arguments = argv[:at], argv[at + 1 :]
    if options[:1] == [title.OPTION]:
        options = options[2:]
    if not arguments or options not in ([], ["--module"]):
        _refuse("usage: python -m evertrain.torch.boot [--rank N] [--module] -- script.py ARG...")
    return bool(options), arguments


def _refuse(message: str) -> NoReturn:
    print(message, file=sys.stderr)
    raise SystemExit(_CANNOT_RUN)


# --- preparations ----------------------------------------------------------------------------------------------------


def die_with_agent() -> None:
    """Have the kernel kill this process when its agent dies: an orphan would go on training and hold the devices."""
    if AGENT_PID not in os.environ:
        return
    import ctypes

    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        print(f"evertrain: prctl: {os.strerror(ctypes.get_errno())}", file=sys.stderr)
    # The signal is only sent for a death that is still to come.
    if os.getppid() != int(os.environ[AGENT_PID]):
        raise SystemExit("evertrain: the agent that started this process is gone")


def keep_descriptors_private() -> None:
    for name in _INHERITED:
        if name in os.environ:
            os.set_inheritable(int(os.environ[name]), False)


def _show_stack_on_signal() -> None:
    faulthandler.enable()
    if board.STACK_FD in os.environ:
        faulthandler.register(STACK_SIGNAL, file=int(os.environ[board.STACK_FD]), all_threads=True, chain=False)


def _keep_freed_memory() -> None:
    """Set malloc to what it would learn by itself, sooner or later, from a process that frees big blocks.

    A step allocates gradients and frees them. Depending on what happens to lie above them, glibc hands their pages back
    to the kernel each time and takes them again: 500 page faults and more than a millisecond in a step of 20 ms, in one
    run, and none of it in the next. Whoever has chosen thresholds of their own keeps them.
    """
    if any(name.startswith("MALLOC_") or name == "GLIBC_TUNABLES" for name in os.environ):
        return
    import ctypes

    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:  # glibc's; others have no such thresholds
        mallopt(_M_MMAP_THRESHOLD, 32 << 20)
        mallopt(_M_TRIM_THRESHOLD, 256 << 20)


# --- the script ------------------------------------------------------------------------------------------------------


def _find_script(name: str) -> tuple[CodeType, ModuleType]:
    """A file, or a directory or archive with a `__main__.py` in it. Sets sys.path[0] as the interpreter would."""
    path = os.path.abspath(name)
    if os.path.isdir(path) or name.endswith((".zip", ".pyz")):
        spec = importlib.machinery.PathFinder.find_spec("__main__", [path])
        if spec is None:
            _refuse(f"evertrain: can't find '__main__' module in {path!r}")
        _replace_first_path(path)
        return _from_spec(spec)
    try:
        with io.open_code(path) as file:
            source = file.read()
    except OSError as error:
        _refuse(f"evertrain: can't open file {path!r}: [Errno {error.errno}] {error.strerror}")
    _replace_first_path(os.path.dirname(os.path.realpath(path)))
    main = _new_main()
    main.__file__ = path
    main.__loader__ = importlib.machinery.SourceFileLoader("__main__", path)
    return _compile(source, path), main


def _find_module(name: str) -> tuple[CodeType, ModuleType]:
    """What `python -m name` runs. sys.path[0] already is the current directory: this process was started by -m too."""
    try:
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.submodule_search_locations is not None:
            name += ".__main__"
            spec = importlib.util.find_spec(name)
    except ModuleNotFoundError as error:
        if error.name is None or not (name == error.name or name.startswith(error.name + ".")):
            raise
        spec = None
    if spec is None or spec.loader is None:
        _refuse(f"evertrain: no module named {name}")
    return _from_spec(spec)


def _from_spec(spec: importlib.machinery.ModuleSpec) -> tuple[CodeType, ModuleType]:
    get_code = getattr(spec.loader, "get_code", None)
    code = get_code and get_code(spec.name)
    if code is None:
        _refuse(f"evertrain: no code object available for {spec.name}")
    main = _new_main()
    main.__file__ = spec.origin
    main.__dict__["__cached__"] = spec.cached
    main.__loader__ = spec.loader
    main.__package__ = spec.parent
    # Tells multiprocessing's children to import the module by its name.
    main.__spec__ = spec
    return code, main


def _new_main() -> ModuleType:
    main = ModuleType("__main__")
    main.__dict__.update(__builtins__=sys.modules["builtins"], __cached__=None, __annotations__={})
    return main


def _compile(source: bytes, path: str) -> CodeType:
    try:
        return compile(source, path, "exec", dont_inherit=True)
    except BaseException:
        _hide_own_frames(None)
        raise


def _replace_first_path(directory: str) -> None:
    if getattr(sys.flags, "safe_path", False):  # since Python 3.11
        return
    sys.path[0] = directory


def _hide_own_frames(code: CodeType | None) -> None:
    """Let the traceback that the interpreter is about to print begin with the script's own first frame."""
    show: Callable = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
        entry = traceback
        while entry is not None and entry.tb_frame.f_code is not code:
            entry = entry.tb_next
        show(kind, error.with_traceback(entry), entry)

    sys.excepthook = hook


def main() -> None:
    # Bad arguments are the caller's mistake and show before anything else happens.
    parse(sys.argv[1:])
    prepare()
    run(sys.argv[1:])


if __name__ == "__main__":
    main()
