"""Running the launcher as a user does, and a training script without torch for it.

The script speaks the whole protocol with a state that is nothing but a step counter: everything that the launcher
sees of a training process is real, and a job of it starts in a tenth of a second.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

COMMAND = [sys.executable, "-m", "evertrain.cli.main", "launch"]
SOURCE = str(Path(__file__).parents[2] / "src")

TRAINER = '''
import os, queue, re, signal, subprocess, sys, threading, time
from evertrain.mindio import protocol as p, tls
from evertrain.mindio.board import BOARD_FD, COLLECTIVE, COMPUTE, DATA, FINISHED, OUTSIDE, Board
from evertrain.mindio.processor import LinkLost, Processor

steps, seconds, folder = int(sys.argv[1]), float(sys.argv[2]), sys.argv[3]
troubles = [trouble.split("@") for trouble in sys.argv[4:]]   # name@step@rank
rank = int(os.environ["RANK"])
parts = [part.split(":") for part in os.environ["EVERTRAIN_CONTROLLER"].split(",")]
addresses = [(host, int(port)) for host, port in parts]
patience = 20.0 if os.environ.get("EVERTRAIN_STANDBY") else 0.0
board = Board(int(os.environ[BOARD_FD]))
certificates = tls.TlsInfo.from_environment(os.environ)
context = tls.client_context(certificates) if certificates else None
stop = threading.Event()
link = Processor(addresses, os.environ["EVERTRAIN_TOKEN"], rank=rank, pid=os.getpid(), board=board,
                 incarnation=int(os.environ["EVERTRAIN_INCARNATION"]), on_stop=stop.set, patience=patience,
                 tls=context)
step, attempt = 0, -1
pause = {"number": 0, "at": 0, "agreed": False}
held = []


def on_pause(message):
    pause.update(number=message.number, at=getattr(message, "step", step + 1), agreed=isinstance(message, p.PauseAt))
    if isinstance(message, p.Pause):
        link.send(p.At(number=message.number, step=step))


link.on_pause = on_pause


def once(name):
    try:
        os.close(os.open(os.path.join(folder, name), os.O_CREAT | os.O_EXCL))
        return True
    except FileExistsError:
        return False


def trouble(name):
    if name == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif name == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif name == "exit":
        print("cannot go on", file=sys.stderr)
        os._exit(7)
    elif name == "sleep":
        time.sleep(1000)
    elif name == "gil":
        re.match(r"(a+)+$", "a" * 60 + "b")
    elif name == "loop":
        while True:
            pass
    elif name == "collective":
        board.mark(COLLECTIVE)
        stop.wait()
    elif name == "slow":
        board.slow(+1)
        stop.wait(1.5)
        board.slow(-1)
    elif name == "data":
        board.mark(DATA)
        stop.wait(1.5)
        board.mark(COMPUTE)
    elif name == "child":
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"])
        subprocess.Popen(["/bin/sh", "-c", "exec sleep 1000"], process_group=0)
        os.kill(os.getpid(), signal.SIGKILL)


def train(generation):
    """True if the training is complete."""
    global step
    stop.clear()
    link.entered(generation, step)
    first = True
    while step < steps:
        board.mark(COMPUTE)
        for name, at, who in troubles:
            if int(at) == step and who in ("*", str(rank)) and once(f"{name}-{at}-{rank}"):
                board.fault_now()
                trouble(name)
        if stop.wait(0 if os.path.exists(os.path.join(folder, "hurry")) else seconds):
            return False
        step += 1
        board.progress(step)
        if first:
            link.send(p.Resumed(generation=generation, step=step))
            first = False
        told = False
        while pause["number"] and step >= pause["at"]:
            board.mark(OUTSIDE)
            if pause["agreed"] and not told:
                told = True
                link.send(p.Paused(generation=generation, step=step))
            message = link.receive()
            if isinstance(message, p.Stop | p.Exit):
                held.append(message)
                return False
            if isinstance(message, p.Continue) and pause["number"] <= message.number:
                pause["number"] = 0
    return True


link.connect()
print(f"training on {rank}", flush=True)
board.mark(OUTSIDE)
link.send(p.Out(step=step, clean=True, fresh=True, fingerprint="x"))
while True:
    try:
        message = held.pop() if held else link.receive()
    except LinkLost:
        sys.exit(1)
    if isinstance(message, p.Stop):
        board.mark(OUTSIDE)
        link.send(p.Out(step=step, clean=True, attempt=message.attempt, fingerprint="x"))
    elif isinstance(message, p.Join):
        digests = {"state": f"d{step}"} if step == message.step else {}
        link.send(p.Joined(generation=message.generation, digests=digests))
    elif isinstance(message, p.Repair):
        step = message.step
        link.send(p.Repaired(generation=message.generation, ok=True, step=step))
    elif isinstance(message, p.Go):
        if pause["number"] <= message.pauses:
            pause["number"] = 0
        if train(message.generation):
            board.mark(FINISHED)
            link.send(p.Finished(step=step))
    elif isinstance(message, p.Dump):
        open(os.path.join(folder, "dumped"), "w").write(str(step))
        link.send(p.Dumped(ok=True, step=step, path="dumped"))
    elif isinstance(message, p.Exit):
        sys.exit(1)
    elif isinstance(message, p.Release):
        print(f"done {rank} {step}", flush=True)
        sys.exit(0)
'''


@dataclass
class Result:
    code: int
    out: str
    err: str
    seconds: float
    events: list[dict[str, Any]] = field(default_factory=list)

    @property
    def incidents(self) -> list[dict[str, Any]]:
        return [event for event in self.events if event["event"] == "incident"]

    def __str__(self) -> str:
        return f"exit code {self.code} after {self.seconds:.1f} s\n--- stdout\n{self.out}\n--- stderr\n{self.err}"


def environment(**extra: str) -> dict[str, str]:
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("PET_")}
    return {**inherited, "PYTHONPATH": SOURCE, "OMP_NUM_THREADS": "1", **extra}


def start(*argv: object, env: dict[str, str] | None = None, **more: Any) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [*COMMAND, *map(str, argv)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(**(env or {})),
        **more,
    )


def finish(launcher: subprocess.Popen[str], began: float, events: Path | None = None, timeout: float = 60.0) -> Result:
    try:
        out, err = launcher.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        launcher.kill()
        out, err = launcher.communicate()
        raise AssertionError(f"the launcher did not end:\n{out}\n{err}") from None
    lines = events.read_text().splitlines() if events is not None and events.exists() else []
    return Result(launcher.returncode, out, err, time.monotonic() - began, [json.loads(line) for line in lines])


def launch(*argv: object, env: dict[str, str] | None = None, events: Path | None = None, **more: Any) -> Result:
    began = time.monotonic()
    extra = ["--ft-events", events] if events is not None else []
    return finish(start(*extra, *argv, env=env, **more), began, events)


def wait_for(condition: Any, what: str, seconds: float = 60.0) -> Any:
    """The first true value of the condition."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if value := condition():
            return value
        time.sleep(0.01)
    raise AssertionError(f"{what} did not happen within {seconds:g} s")


def read_events(file: Path, name: str = "") -> list[dict[str, Any]]:
    """What a running job has written down so far: all of it, or the events of one name."""
    lines = file.read_text().splitlines(keepends=True) if file.exists() else []
    events = [json.loads(line) for line in lines if line.endswith("\n")]
    return [event for event in events if not name or event["event"] == name]


def in_charge(launcher: int, events: Path) -> psutil.Process:
    """The process of the controller in charge, where it has one of its own."""
    address = read_events(events, "control")[-1]["address"]
    port = int(address.rpartition(":")[2])
    for child in psutil.Process(launcher).children():
        if any(link.status == "LISTEN" and link.laddr.port == port for link in child.net_connections()):
            return child
    raise AssertionError(f"nobody listens on {address}")
