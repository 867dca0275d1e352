"""What a launch will do, after every source has been read and every contradiction found."""

from __future__ import annotations

import dataclasses
import os
import re
import signal
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from evertrain.launch import nodes
from evertrain.launch.errors import ConfigError
from evertrain.mindio import faultspec, tls
from evertrain.mindio.timing import Timing, TimingError

MANY_PROCESSES = 32
"""Above this many processes their states are read less often."""
STDOUT, STDERR = 1, 2

__all__ = ["MANY_PROCESSES", "STDERR", "STDOUT", "ConfigError", "LaunchConfig", "build"]


@dataclass(frozen=True, slots=True)
class LaunchConfig:
    script: str
    script_args: tuple[str, ...]
    module: bool
    no_python: bool
    world_size: int
    local_size: int
    """Processes on this node."""
    nnodes: int
    node_rank: int
    local_addr: str | None
    token: str
    """Empty: the launcher makes one."""
    node_loss: str
    least_nodes: int
    """With how few nodes the job may go on, if it may."""
    node_wait: float
    standby: bool
    """Is there a second controller that can take over?"""
    events_everywhere: bool
    max_restarts: int
    timing: Timing
    warm: int
    warm_imports: tuple[str, ...]
    park: bool
    elastic: int
    """With how few ranks the job may go on; 0 if it waits for all."""
    checkpoint_dir: str | None
    checkpoint_every: int
    events: str | None
    poll: float
    faults: tuple[faultspec.FaultSpec, ...]
    role: str
    run_id: str
    master_addr: str
    master_port: int
    """0: the launcher finds a free one."""
    log_dir: str | None
    redirects: Mapping[int, int]
    tee: Mapping[int, int]
    shown_ranks: frozenset[int]
    """Local ranks whose output goes to the console."""
    line_prefix: str | None
    """torchrun's template for what stands before each line of a rank, if one was given."""
    stdout_filters: tuple[str, ...]
    stderr_filters: tuple[str, ...]
    signals: tuple[int, ...]
    virtual_local_rank: bool
    tls: tls.TlsInfo | None
    insecure: bool
    values: Mapping[str, Any]
    sources: Mapping[str, str]
    print_config: bool = False

    @property
    def restarts_asked(self) -> bool:
        """Was the number of restarts given, rather than left to the default?"""
        return self.sources["max_restarts"] != "default"

    @property
    def first_rank(self) -> int:
        return self.node_rank * self.local_size

    @property
    def ranks(self) -> range:
        """Of this node."""
        return range(self.first_rank, self.first_rank + self.local_size)

    def describe(self) -> str:
        """Every value with its source, for --print-config."""
        rows = [("script", " ".join((self.script, *self.script_args)) or "(none)", "")]
        shown = dict(self.values, nproc_per_node=self.local_size, poll=self.poll)
        for name, value in shown.items():
            if name in ("timing", "bound", "grace"):
                continue
            rows.append((name, _show(value), self.sources[name]))
        rows.append(("", "", ""))
        overridden = self.values["timing"]
        for field in dataclasses.fields(self.timing):
            source = "derived from bound"
            if field.name in overridden:
                source = self.sources["timing"]
            elif field.name == "bound":
                source = self.sources["bound"]
            elif field.name == "grace":
                source = next((self.sources[n] for n in ("grace", "shutdown_timeout") if self.values[n]), "default")
            rows.append((f"timing.{field.name}", f"{getattr(self.timing, field.name):g} s", source))
        name_width = max(len(name) for name, _, _ in rows)
        value_width = min(40, max(len(value) for _, value, _ in rows))
        return "\n".join(
            f"{name:<{name_width}}  {text:<{value_width}}  {source}".rstrip() for name, text, source in rows
        )


def _show(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(str(item) for item in value) or "-"
    if value is None or value == "":
        return "-"
    return str(value).lower() if isinstance(value, bool) else str(value)


def build(
    values: dict[str, Any],
    sources: dict[str, str],
    *,
    script: str,
    script_args: list[str],
    print_config: bool,
    environ: Mapping[str, str],
) -> LaunchConfig:
    """Check the values against each other and against this machine."""
    nnodes = nodes.count(values, sources)
    node_loss, least_nodes = nodes.loss(values, sources)
    _refuse_unsupported(values)
    local_size = _local_size(values["nproc_per_node"])
    world_size = nnodes * local_size
    if script and not print_config:
        _check_script(script, values)
    master_addr, master_port = _master(values, sources, nnodes)
    if nnodes > 1 and not print_config and not values["insecure"] and not values["tls_cert"]:
        nodes.refuse_open_network(master_addr)
    shown = _ranks(values["local_ranks_filter"]) if values["local_ranks_filter"] else set(range(local_size))
    return LaunchConfig(
        script=script,
        script_args=tuple(script_args),
        module=values["module"],
        no_python=values["no_python"] and not values["run_path"],
        world_size=world_size,
        local_size=local_size,
        nnodes=nnodes,
        node_rank=values["node_rank"],
        local_addr=values["local_addr"],
        token="" if print_config else nodes.token(values["token_file"], environ, nnodes),
        node_loss=node_loss,
        least_nodes=least_nodes,
        node_wait=values["node_wait"],
        standby=nnodes > 1 if values["standby"] is None else bool(values["standby"]),
        events_everywhere=values["events_everywhere"],
        max_restarts=values["max_restarts"],
        timing=_timing(values, nnodes),
        # A spare is a Python process that has torch imported; it can't become any other program.
        warm=0 if values["no_python"] and not values["run_path"] else values["warm"],
        warm_imports=tuple(values["warm_import"]),
        park=values["park"],
        elastic=_elastic(values["elastic"], world_size),
        checkpoint_dir=_checkpoint_dir(values["checkpoint_dir"], check=not print_config),
        checkpoint_every=values["checkpoint_every"],
        events=_events(values["events"]) if not print_config else values["events"],
        poll=values["poll"] or (0.002 if local_size <= MANY_PROCESSES else 0.005),
        faults=tuple(_fault(text, world_size) for text in values["fault"]),
        role=values["role"],
        run_id=_run_id(values, nnodes),
        master_addr=master_addr,
        master_port=master_port,
        log_dir=_log_dir(values["log_dir"]),
        redirects=_streams(values["redirects"], local_size, "--redirects"),
        tee=_streams(values["tee"], local_size, "--tee"),
        shown_ranks=frozenset(shown),
        line_prefix=values["log_line_prefix_template"],
        stdout_filters=tuple(filter(None, values["duplicate_stdout_filters"])),
        stderr_filters=tuple(filter(None, values["duplicate_stderr_filters"])),
        signals=_signals(values["signals_to_handle"]),
        virtual_local_rank=values["virtual_local_rank"],
        tls=_tls(values),
        insecure=values["insecure"],
        values=values,
        sources=sources,
        print_config=print_config,
    )


def _elastic(least: int, world_size: int) -> int:
    if least > world_size:
        raise ConfigError(f"--ft-elastic {least}: the job has only {world_size} ranks")
    return least


def _refuse_unsupported(values: dict[str, Any]) -> None:
    if values["logs_specs"]:
        raise ConfigError("--logs-specs is not supported: plug-ins of torchrun's own logging can't be loaded here")
    if values["numa_binding"]:
        raise ConfigError("--numa-binding is not supported; bind the launcher itself, for example with numactl")
    if values["print_completion"]:
        raise ConfigError("--print-completion is not supported: there is no completion for `evertrain launch`")
    if values["event_log_handler"] != "null":
        raise ConfigError("--event-log-handler is not supported; --ft-events writes the events of a run to a file")
    if values["module"] and values["no_python"]:
        raise ConfigError("--module and --no-python exclude each other")


def _local_size(text: str) -> int:
    try:
        count = int(text)
    except ValueError:
        count = _count_devices(text)
    if count < 1:
        raise ConfigError(f"--nproc-per-node must be at least 1, got {text!r}")
    return count


def _count_devices(kind: str) -> int:
    if kind == "cpu":
        return len(os.sched_getaffinity(0))
    if kind not in ("gpu", "xpu", "auto"):
        raise ConfigError(f"--nproc-per-node: expected a number, cpu, gpu, xpu or auto, got {kind!r}")
    count = _ask_torch(kind)
    if kind == "auto":
        return count or len(os.sched_getaffinity(0))
    if not count:
        raise ConfigError(f"--nproc-per-node {kind}: there is none on this machine")
    return count


def _ask_torch(kind: str) -> int:
    """The number of devices, from a process of its own: the launcher stays free of torch and of any device."""
    import subprocess
    import sys

    module = "torch.accelerator" if kind == "auto" else "torch.cuda" if kind == "gpu" else "torch.xpu"
    code = f"import torch; print({module}.device_count() if {module}.is_available() else 0)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    if result.returncode:
        last = (result.stderr.strip().splitlines() or ["no message"])[-1]
        raise ConfigError(f"--nproc-per-node {kind}: torch could not be asked for devices: {last}")
    return int(result.stdout)


def _check_script(script: str, values: dict[str, Any]) -> None:
    """Find out now that there is nothing to run, and not from every rank at once."""
    if values["module"]:
        import importlib.util
        import sys

        # As `python -m` does: the current directory comes first. Only the top is looked up, since finding a
        # submodule would import its parents.
        saved = list(sys.path)
        sys.path.insert(0, os.getcwd())
        try:
            found = importlib.util.find_spec(script.partition(".")[0])
        except (ImportError, ValueError):
            found = None
        finally:
            sys.path[:] = saved
        if found is None:
            raise ConfigError(f"there is no module called {script!r}")
    elif values["no_python"] and not values["run_path"]:
        import shutil

        if shutil.which(script) is None:
            raise ConfigError(f"the program {script!r} was not found or is not executable")
    elif not os.path.exists(script):
        raise ConfigError(f"the script {script!r} does not exist")


def _timing(values: dict[str, Any], nnodes: int) -> Timing:
    overrides = dict(values["timing"])
    grace = values["grace"] or values["shutdown_timeout"]
    if grace:
        overrides.setdefault("grace", float(grace))
    bound = overrides.pop("bound", values["bound"])
    try:
        return Timing.derive(bound, nnodes, **overrides)
    except TimingError as error:
        raise ConfigError(f"timing: {error}") from None


def _tls(values: dict[str, Any]) -> tls.TlsInfo | None:
    """Load the certificates once to find out now that they can't be used."""
    names = ("tls_cert", "tls_key", "tls_ca")
    given = [name for name in names if values[name]]
    if not given:
        return None
    if missing := [f"--ft-{name.replace('_', '-')}" for name in names if name not in given]:
        raise ConfigError(f"TLS needs a certificate, its key and an authority: {', '.join(missing)} missing")
    info = tls.TlsInfo.from_files(*(values[name] for name in names))
    try:
        tls.server_context(info)
    except tls.TlsError as error:
        raise ConfigError(f"TLS: {error}") from None
    return info


def _fault(text: str, world_size: int) -> faultspec.FaultSpec:
    try:
        return faultspec.parse(text, world_size)
    except faultspec.FaultSpecError as error:
        raise ConfigError(f"--ft-fault: {error}") from None


def _master(values: dict[str, Any], sources: dict[str, str], nnodes: int) -> tuple[str, int]:
    host, port = values["master_addr"], values["master_port"] or 0
    endpoint = values["rdzv_endpoint"]
    # As in torchrun on one node: other backends have an address of their own, and the workers' port is a free one.
    if endpoint and (values["rdzv_backend"] == "static" or nnodes > 1) and not values["standalone"]:
        name, colon, number = endpoint.rpartition(":")
        if not colon:
            name, number = endpoint, "0"
        if not number.isdigit():
            raise ConfigError(f"--rdzv-endpoint: expected HOST:PORT, got {endpoint!r}")
        if sources["master_addr"] == "default":
            host = name
        if sources["master_port"] == "default":
            port = int(number)
    if not 0 <= port < 65536:
        raise ConfigError(f"--master-port: {port} is not a port number")
    if nnodes > 1 and not port:
        raise ConfigError(
            "--nnodes: a job on several nodes needs --master-addr and --master-port (or --rdzv-endpoint HOST:PORT), "
            "the same on all of them: an address of node 0 and a free port there"
        )
    return host, port


def _run_id(values: dict[str, Any], nnodes: int) -> str:
    """torchrun names a job on one node at random unless it was given a name; several nodes must have the same one."""
    if (values["rdzv_id"] != "none" or nnodes > 1) and not values["standalone"]:
        return values["rdzv_id"]
    import uuid

    return str(uuid.uuid4())


def _streams(text: str, local_size: int, flag: str) -> dict[int, int]:
    """torchrun's notation: one digit for all ranks or rank:digit pairs; 1 is stdout, 2 stderr, 3 both."""
    if re.fullmatch("[0-3]", text):
        return dict.fromkeys(range(local_size), int(text))
    if not re.fullmatch(r"\d+:[0-3](,\d+:[0-3])*", text):
        raise ConfigError(f"{flag}: expected 0, 1, 2, 3 or pairs such as 0:1,1:3, got {text!r}")
    pairs = dict((int(rank), int(value)) for rank, value in (part.split(":") for part in text.split(",")))
    return {rank: pairs.get(rank, 0) for rank in range(local_size)}


def _ranks(text: str) -> set[int]:
    try:
        return {int(part) for part in text.split(",")}
    except ValueError:
        raise ConfigError(f"--local-ranks-filter: expected ranks such as 0,1,2, got {text!r}") from None


def _signals(text: str) -> tuple[int, ...]:
    found = []
    for name in filter(None, (part.strip() for part in text.split(","))):
        number = getattr(signal, name, None)
        if not isinstance(number, signal.Signals) or number in (signal.SIGKILL, signal.SIGSTOP, signal.SIGCHLD):
            raise ConfigError(f"--signals-to-handle: {name!r} is not a signal that can be handled")
        found.append(int(number))
    return tuple(found)


def _log_dir(path: str | None) -> str | None:
    if path and os.path.isfile(path):
        raise ConfigError(f"--log-dir: {path} is a file")
    return path


def _checkpoint_dir(path: str | None, *, check: bool) -> str | None:
    """Find out now that it can't be written to. The ranks create it and what is missing above it."""
    if not path:
        return None
    there = full = os.path.abspath(path)
    while check and not os.path.lexists(there):
        there = os.path.dirname(there)
    if check:
        import tempfile

        try:
            tempfile.TemporaryFile(dir=there).close()  # noqa: SIM115
        except OSError as error:
            place = path if there == full else f"{path}: {there}"
            raise ConfigError(f"--ft-checkpoint-dir: {place} can't be written to: {error.strerror}") from None
    return full


def _events(path: str | None) -> str | None:
    if path:
        folder = os.path.dirname(os.path.abspath(path))
        if os.path.isdir(path) or not os.path.isdir(folder) or not os.access(folder, os.W_OK):
            raise ConfigError(f"--ft-events: {path} can't be written")
    return path
