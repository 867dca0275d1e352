"""Every option of `evertrain launch` in one table: its spellings, where its value may come from, and what it means.

The flags of torchrun (2.13 to 2.15) keep their names, both spellings, their meaning on one node and their `PET_*`
variables, so that a torchrun command line works unchanged. Evertrain's own begin with `--ft-` and have `EVERTRAIN_*`
variables.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Option:
    name: str
    """Field of the namespace, key in the configuration file."""
    group: str
    help: str
    convert: Callable[[str], Any] = str
    default: Any = None
    flags: tuple[str, ...] = ()
    """The spellings; made from the name if empty."""
    env: str = ""
    metavar: str | None = None
    choices: tuple[str, ...] = ()
    switch: bool = False
    repeatable: bool = False
    file: bool = True
    """May it stand in the configuration file?"""
    check: Callable[[Any], str | None] = lambda value: None
    """What is wrong with a value, wherever it came from."""

    def spellings(self) -> tuple[str, ...]:
        if self.flags:
            return self.flags
        dashed = "--" + self.name.replace("_", "-")
        return (dashed,) if dashed == "--" + self.name else (dashed, "--" + self.name)

    def variable(self) -> str:
        return self.env or f"PET_{self.name.upper()}"


def _comma_list(text: str) -> list[str]:
    """Items between commas; a double comma stands for one that belongs to an item."""
    return [item.replace("\0", ",") for item in text.replace(",,", "\0").split(",")]


def _assignments(text: str) -> dict[str, float]:
    """`name=seconds,name=seconds`, or a JSON object of the same."""
    if text.lstrip().startswith("{"):
        return {str(name): float(value) for name, value in json.loads(text).items()}
    values: dict[str, float] = {}
    for part in filter(None, text.split(",")):
        name, equals, value = part.partition("=")
        if not equals:
            raise ValueError(f"expected NAME=SECONDS, got {part!r}")
        values[name.strip().replace("-", "_")] = float(value)
    return values


def _not_negative(value: float) -> str | None:
    return None if value >= 0 else f"must not be negative, got {value}"


def _positive(value: float | None) -> str | None:
    return None if value is None or value > 0 else f"must be a positive number, got {value}"


def own(name: str, group: str, help: str, **more: Any) -> Option:
    return Option(name, group, help, flags=("--ft-" + name.replace("_", "-"),), env=f"EVERTRAIN_{name.upper()}", **more)


SIZE, RECOVERY, SECURITY, FAULTS, USER, LOGS, RENDEZVOUS = (
    "size of the job",
    "recovery",
    "security",
    "fault injection",
    "what to run",
    "output",
    "rendezvous and compatibility with torchrun",
)

OPTIONS: tuple[Option, ...] = (
    Option(
        "nproc_per_node", SIZE, default="1", metavar="N|cpu|gpu|xpu|auto",
        help="processes to start: a number, or one for each cpu core, gpu or xpu; auto takes the accelerators, or else "
        "the cpu cores",
    ),
    Option(
        "nnodes", SIZE, default="1:1", metavar="N|MIN:MAX",
        help="number of nodes, each with its own launcher; with a minimum the job goes on without lost nodes as long "
        "as that many are there",
    ),
    Option(
        "max_restarts", RECOVERY, convert=int, default=3, check=_not_negative, metavar="N",
        help="how often the whole job may be restarted before the launcher gives up (default 3; torchrun has 0: there "
        "a restart begins anew unless the script sees to it, here it resumes from the newest checkpoint). Replacing "
        "one process is not a restart and is not counted",
    ),
    own(
        "bound", RECOVERY, convert=float, default=2.0, check=_positive, metavar="SECONDS",
        help="the detection bound: how long a rank may give no sign of progress before it counts as lost (default 2). "
        "Deaths and stops are seen within milliseconds whatever the bound. All other timeouts are derived from it",
    ),
    own(
        "grace", RECOVERY, convert=float, check=_positive, metavar="SECONDS",
        help="how long the end of the job by SIGTERM or SIGINT may take, the last checkpoint included (default 30)",
    ),
    own(
        "timing", RECOVERY, convert=_assignments, default={}, repeatable=True, metavar="NAME=SECONDS",
        help="override one derived timeout by its name (see --print-config); may be repeated",
    ),
    own(
        "warm", RECOVERY, convert=int, default=1, check=_not_negative, metavar="N",
        help="warm spare processes to keep ready: a spare has imported torch and run a dummy step, so it replaces a "
        "lost rank in a tenth of a second instead of seconds, for some 250 MB of memory (default 1; 0 turns it off)",
    ),
    own(
        "warm_import", RECOVERY, convert=_comma_list, default=[], repeatable=True, metavar="MODULE",
        help="module that spares import while they wait, on top of torch; may be repeated",
    ),
    own(
        "park", RECOVERY, switch=True,
        help="let a spare run the script until it asks for its rank: saves the script's imports and perhaps building "
        "the model, but what the script does before it asks is done once more",
    ),
    own(
        "elastic", RECOVERY, convert=int, default=0, check=_not_negative, metavar="MIN",
        help="if a rank is lost and no warm spare is ready, go on with the others while its replacement starts, as "
        "long as MIN ranks are there; they share the data of the missing one, and it joins again when it is ready "
        "(default 0: wait for the replacement)",
    ),
    own(
        "checkpoint_dir", RECOVERY, metavar="DIR",
        help="directory of the checkpoints, handed to the script as EVERTRAIN_CHECKPOINT_DIR",
    ),
    own(
        "checkpoint_every", RECOVERY, convert=int, default=0, check=_not_negative, metavar="STEPS",
        help="steps between periodic checkpoints if the script does not say so, handed to it as "
        "EVERTRAIN_CHECKPOINT_EVERY (default 0: none but the last one before a job is ended or restarted)",
    ),
    own(
        "events", RECOVERY, metavar="FILE",
        help="append what happens to this file, for `evertrain timeline`; on several nodes the one with the controller "
        "in charge writes it",
    ),
    own("events_everywhere", RECOVERY, switch=True, help="every node writes its own events file"),
    own(
        "node_loss", RECOVERY, default="wait", choices=("wait", "shrink", "exit"),
        help="what to do when a whole node is lost: wait for a new launcher with its node rank (default), go on "
        "without it, or end the job",
    ),
    own(
        "node_wait", RECOVERY, convert=float, default=300.0, check=_positive, metavar="SECONDS",
        help="how long to wait for a node at the start and after its loss (default 300)",
    ),
    own(
        "standby", RECOVERY, convert=int, check=lambda value: None if value in (None, 0, 1) else "must be 0 or 1",
        metavar="0|1",
        help="keep a second controller that takes over when the first is lost: on node 1, or on one node in a process "
        "of its own (default: 1 on several nodes, else 0)",
    ),
    own(
        "token_file", RECOVERY, metavar="FILE",
        help="file with the job's token, the same on all nodes; or set EVERTRAIN_TOKEN. On one node a new one is made",
    ),
    own(
        "poll", RECOVERY, convert=float, check=_positive, metavar="SECONDS",
        help="how often a training process that can't announce its own death is looked at (default 0.002; 0.005 above "
        "32 processes)",
    ),
    own("config", RECOVERY, file=False, metavar="FILE", help="YAML file with any of these options (`bound: 1.0`)"),
    own(
        "tls_cert", SECURITY, metavar="FILE",
        help="certificate (PEM) of this node: the links between launcher and ranks are then TLS 1.3, and both sides "
        "show a certificate. Needs --ft-tls-key and --ft-tls-ca",
    ),
    own("tls_key", SECURITY, metavar="FILE", help="private key (PEM, not encrypted) of the certificate"),
    own("tls_ca", SECURITY, metavar="FILE", help="certificate (PEM) of the authority that signed those of all nodes"),
    own(
        "insecure", SECURITY, switch=True,
        help="listen beyond this machine without TLS: everybody on the network can read the links, the job token "
        "included",
    ),
    own(
        "fault", FAULTS, convert=lambda text: [part for part in text.split(";") if part], default=[], repeatable=True,
        metavar="SPEC", help="inject a fault, for example kill@step=12,rank=1,phase=backward; may be repeated",
    ),
    Option("module", USER, flags=("-m", "--module"), switch=True, help="the script is a module, as in `python -m`"),
    Option("no_python", USER, switch=True, help="run the program directly, not with Python"),
    Option("run_path", USER, switch=True, help="accepted; scripts always run like this"),
    Option("role", USER, default="default", help="name of the workers' role (ROLE_NAME)"),
    Option("log_dir", LOGS, metavar="DIR", help="base directory for log files; each run makes its own directory in it"),
    Option(
        "redirects", LOGS, flags=("-r", "--redirects"), default="0", metavar="STD",
        help="write streams to files instead of the console: 1 stdout, 2 stderr, 3 both; or by rank: 0:1,1:3",
    ),
    Option(
        "tee", LOGS, flags=("-t", "--tee"), default="0", metavar="STD",
        help="write streams to files and to the console (format as in -r)",
    ),
    Option(
        "log_line_prefix_template", LOGS, metavar="TEXT",
        help="prefix of each line of a rank, with ${role_name}, ${local_rank}, ${rank} and ${hostname} (default: "
        "TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE or '[rank${rank}]: ')",
    ),
    Option("local_ranks_filter", LOGS, default="", metavar="RANKS", help="show only these ranks on the console: 0,1"),
    Option(
        "duplicate_stdout_filters", LOGS, convert=_comma_list, default=[], metavar="TEXTS",
        help="copy console lines of stdout with one of these texts to filtered_stdout.log in the log directory",
    ),
    Option(
        "duplicate_stderr_filters", LOGS, convert=_comma_list, default=[], metavar="TEXTS",
        help="the same for stderr and filtered_stderr.log",
    ),
    Option("standalone", RENDEZVOUS, switch=True, help="accepted; a job on one node needs no other rendezvous"),
    Option("rdzv_backend", RENDEZVOUS, default="static", help="accepted: c10d and static mean the same here"),
    Option(
        "rdzv_endpoint", RENDEZVOUS, default="", metavar="HOST:PORT",
        help="the same as --master-addr and --master-port, if they are not set",
    ),
    Option("rdzv_id", RENDEZVOUS, default="none", metavar="ID", help="name of the job (TORCHELASTIC_RUN_ID)"),
    Option("rdzv_conf", RENDEZVOUS, default="", metavar="K=V,...", help="accepted, without effect"),
    Option("node_rank", RENDEZVOUS, convert=int, default=0, metavar="N", help="rank of this node"),
    Option(
        "master_addr", RENDEZVOUS, default="127.0.0.1", metavar="HOST",
        help="MASTER_ADDR of the workers: on several nodes the address of node 0",
    ),
    Option(
        "master_port", RENDEZVOUS, convert=int, metavar="PORT",
        help="MASTER_PORT (default: a free port); on several nodes the port of the controller on node 0",
    ),
    Option(
        "local_addr", RENDEZVOUS, metavar="HOST",
        help="address under which other nodes reach this one (default: the one that its link to node 0 has)",
    ),
    Option(
        "monitor_interval", RENDEZVOUS, convert=float, default=0.1, metavar="SECONDS",
        help="accepted, without effect: events are awaited, see --ft-poll for the rest",
    ),
    Option(
        "start_method", RENDEZVOUS, default="spawn", choices=("spawn", "fork", "forkserver"),
        help="accepted; every worker is a new process of its own",
    ),
    Option("event_log_handler", RENDEZVOUS, default="null", metavar="NAME", help="only null; events go to --ft-events"),
    Option("logs_specs", RENDEZVOUS, metavar="NAME", help="not supported"),
    Option("numa_binding", RENDEZVOUS, metavar="MODE", help="not supported"),
    Option("print_completion", RENDEZVOUS, metavar="SHELL", help="not supported"),
    Option(
        "signals_to_handle", RENDEZVOUS, default="SIGTERM,SIGINT,SIGHUP,SIGQUIT", metavar="SIGNALS",
        help="signals that end the job in an orderly way; a second one ends it at once",
    ),
    Option("shutdown_timeout", RENDEZVOUS, convert=int, check=_positive, metavar="SECONDS", help="same as --ft-grace"),
    Option(
        "virtual_local_rank", RENDEZVOUS, switch=True,
        help="every worker gets LOCAL_RANK 0 and sees only its own device (CUDA_VISIBLE_DEVICES)",
    ),
)  # fmt: skip

BY_NAME = {option.name: option for option in OPTIONS}
