"""A training loop of its own, made fault tolerant with MindIO's callbacks. In a job of a cluster train_start.sh starts
it; four processes without a cluster, on the CPU, in bash, which fails if one of them does:

    (for rank in 0 1 2 3; do RANK=$rank WORLD_SIZE=4 python examples/resumable/train.py --steps 50 & pids+=" $!"; done
    for pid in $pids; do wait $pid || code=1; done; exit $code)

The optimizer is sharded, and every shard is kept twice: with four ranks 0 and 2 hold one half of it, 1 and 3 the other.
A rank that loses its state gets it back from the other holder. The order of the calls is that of any framework; what is
special here is only how groups are built: gloo has no abort, so `Collectives` takes the place of a device that has.

Try `--fault 10:1:uce` (rank 1 loses its memory in step 10): the hashes at the end are the same as without.
"""

import argparse
import contextlib
import hashlib
import json
import os
import shutil
import signal
import sys
import time
import uuid
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from evertrain.torch import lazy_dynamo
from evertrain.torch.tft_collectives import Collectives
from mindio_ttp import framework_ttp as tft

lazy_dynamo.install()  # the first step of an optimizer would load torch's compiler, half of the time until it is done
REPLICAS, GLOBAL_BATCH, SAMPLES = 2, 12, 1200
SLOW = 1.0
"""Seconds of a step, while something is done to the job."""
LOST = {"hurt": 1, "broken": 3}
"""Processes that such a rank loses: the one that is repaired, the next in its pod, the first in another."""


class Shards:
    """The model's parameters as one vector, of which this rank updates a part with its own Adam."""

    def __init__(self, seed: int, rank: int, dp_ranks: list[int]) -> None:
        torch.manual_seed(seed)
        self.model = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1))
        flat = nn.utils.parameters_to_vector(self.model.parameters()).detach()
        self.count = len(dp_ranks) // REPLICAS
        self.parts = [part.clone() for part in flat.chunk(self.count)]
        self.index = dp_ranks.index(rank) % self.count
        self.holders = [dp_ranks[i :: self.count] for i in range(self.count)]
        self.mine = nn.Parameter(self.parts[self.index].clone())
        self.adam = torch.optim.Adam([self.mine], lr=1e-2)
        self.mine.grad = torch.zeros_like(self.mine)
        self.adam.step()  # creates the moments; a step with zero gradients changes nothing else
        self.adam.state[self.mine]["step"].zero_()

    def tensors(self) -> list[torch.Tensor]:
        """Everything that has to survive."""
        state = self.adam.state[self.mine]
        return [self.mine.data, state["exp_avg"], state["exp_avg_sq"], state["step"]]

    def gather(self, group, world: list[int]) -> None:
        """Make the model whole: each part from the first of its holders that is there."""
        # New tensors each time: a collective that was stopped may still write into those that it was given.
        self.parts = [torch.empty_like(part) for part in self.parts]
        for index, part in enumerate(self.parts):
            if index == self.index:
                part.copy_(self.mine.data)
            owner = next(rank for rank in self.holders[index] if rank in world)
            group.broadcast(part, world.index(owner)).wait()
        nn.utils.vector_to_parameters(torch.cat(self.parts), self.model.parameters())

    def gradient(self) -> torch.Tensor:
        return torch.cat([parameter.grad.flatten() for parameter in self.model.parameters()])

    def update(self, gradient: torch.Tensor) -> None:
        self.mine.grad = gradient.chunk(self.count)[self.index].clone()
        self.adam.step()


class Job:
    """What the callbacks of one process work on."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        self.dp_ranks = list(range(size))
        self.world = self.dp_ranks  # fewer after scaling in
        self.directory = Path(options.dir)
        self.collectives: Collectives  # made in `start`
        self.step = 0
        self.reborn = False
        self.slow = False
        self.faults = {tuple(fault.split(":")) for fault in options.fault}
        generator = torch.Generator().manual_seed(options.seed)
        self.inputs = torch.randn(SAMPLES, 16, generator=generator)
        self.targets = self.inputs.sin().sum(1, keepdim=True)

    def build(self) -> Shards:
        return Shards(self.options.seed, self.rank, self.dp_ranks)

    # --- callbacks, in the order of a recovery

    def rebuild_group(self, fault_ranks, args, ctx):
        self.note("rebuild_group")
        self.collectives.leave_all()  # new groups are built where they are used, under the name of this recovery

    def repair(self, step, need_rebuild, error_ranks, info, args, ctx=None):
        self.suffer()
        kind = tft.RepairType(info["repair_type"])
        self.note(kind.name)
        if need_rebuild:
            args[0] = self.build()
        if kind in (tft.RepairType.RT_LOAD_CKPT, tft.RepairType.RT_LOAD_REBUILD):
            self.step = self.load(args[0])
            tft.tft_report_load_ckpt_step(self.step)
            return
        ranks = sorted(info["rank_list"])
        group = self.collectives.join("repair", ranks)
        for src, dst in zip(info["src"], info["dst"], strict=True):
            for tensor in args[0].tensors():
                if kind == tft.RepairType.RT_SEND:
                    group.send([tensor], ranks.index(dst), 0).wait()
                else:
                    received = torch.empty_like(tensor)
                    group.recv([received], ranks.index(src), 0).wait()
                    tensor.copy_(received)

    def rollback(self, step, args, ctx=None):
        self.note("rollback")
        self.step = int(args[0].tensors()[3].item())  # the step that the state is of
        self.complete_record(self.rank)

    def downgrade_rebuild(self, dp_ranks, world_ranks, args, param):
        self.note("downgrade_rebuild")
        self.collectives.leave_all()
        self.world = world_ranks
        self.rollback(0, args)
        if self.rank == self.world[0]:
            for rank in set(self.dp_ranks) - set(self.world):
                self.complete_record(rank)

    def upgrade_rebuild(self, ranks, args, param):
        self.note("upgrade_rebuild")
        self.collectives.leave_all()
        self.world = self.dp_ranks

    # --- checkpoints

    def save(self, step, save_info, args, ctx):
        self.note("save")
        folder = self.directory / f"iter_{step:07d}_tmp"
        folder.mkdir(exist_ok=True)
        torch.save(args[0].tensors(), folder / f"shard_{args[0].index}.pt")

    def rename(self, step, args):
        self.note("rename")
        folder = self.directory / f"iter_{step:07d}"
        written = folder.with_name(folder.name + "_tmp")
        if folder.exists():  # a checkpoint of this very step; it has the same bits
            shutil.rmtree(written, ignore_errors=True)
        else:
            written.rename(folder)
        (self.directory / "latest_checkpointed_iteration.txt").write_text(str(step))

    def load(self, shards: Shards) -> int:
        tracker = self.directory / "latest_checkpointed_iteration.txt"
        if not tracker.exists():
            return 0
        step = int(tracker.read_text())
        saved = torch.load(self.directory / f"iter_{step:07d}" / f"shard_{shards.index}.pt", weights_only=True)
        for tensor, value in zip(shards.tensors(), saved, strict=True):
            tensor.copy_(value)
        return step

    def periodic(self, group, shards: Shards) -> None:
        if self.rank == next(rank for rank in shards.holders[shards.index] if rank in self.world):
            self.save(self.step, [], [shards], None)
        group.barrier().wait()
        if self.rank == self.world[0]:
            self.rename(self.step, [shards])

    # --- for trying it out

    def begin_record(self, *what: object) -> str:
        """What goes into this step, before anybody may count it as done: who dies in its update can't tell any more."""
        line = json.dumps([self.step + 1, *what]) + "\n"
        written = self.directory / f"doing.{self.rank}.new"
        written.write_text(line)
        written.rename(self.directory / f"doing.{self.rank}")
        return line

    def record(self, line: str, rank: int) -> None:
        with open(self.directory / f"steps.{rank}", "a") as file:
            file.write(line)

    def record_time(self) -> None:
        """When a step was done, for whoever wants to compare it with what is said of a recovery."""
        with open(self.directory / f"times.{self.rank}", "a") as file:
            file.write(f"{self.step} {time.time():.3f}\n")

    def complete_record(self, rank: int) -> None:
        """The last step of a process that died may not be on record, although all have done it with its share."""
        doing, record = self.directory / f"doing.{rank}", self.directory / f"steps.{rank}"
        if not doing.exists():
            return
        lines = record.read_text().splitlines() if record.exists() else []
        line, recorded = doing.read_text(), json.loads(lines[-1])[0] if lines else 0
        if recorded < json.loads(line)[0] <= self.step:
            self.record(line, rank)

    def note(self, event: str) -> None:
        with open(self.directory / f"events.{self.rank}", "a") as file:
            file.write(f"{event} {os.getpid()}\n")

    def inject(self) -> None:
        for fault in list(self.faults):
            step, rank, kind = fault
            happened = self.directory / f"fault.{step}.{rank}.{kind}"  # once, however often the job starts again
            if (int(step), int(rank)) == (self.step, self.rank) and not happened.exists():
                happened.touch()
                self.faults.discard(fault)
                FAULTS[kind](self)

    def may_go(self) -> bool:
        return (self.directory / "go").exists()

    def take_time(self) -> None:
        self.slow = self.slow and not self.may_go()
        time.sleep(SLOW if self.slow else self.options.pace)

    def suffer(self) -> None:
        """Of a rank that is broken, nothing can be repaired, and some more processes do not live."""
        broken = self.directory / f"broken.{self.rank}"
        left = int(broken.read_text()) if broken.exists() else 0
        if left:
            broken.write_text(str(left - 1))
            os.kill(os.getpid(), signal.SIGKILL)


def raising(text: str):
    def fault(job: Job) -> None:
        say(f"rank {job.rank} raises {text!r}")
        raise RuntimeError(text)

    return fault


def breaking_down(kind: str):
    """Worse than it looks: it seems that running the step again would do."""

    def fault(job: Job) -> None:
        (job.directory / f"broken.{job.rank}").write_text(str(LOST[kind]))
        raising("UCE ERROR")(job)

    return fault


def make_chip_faulty(job: Job) -> None:
    """That of this rank, on the node that it is on first, fails the stress test."""
    from evertrain.taskd.worker import cpu_stress, operations

    noted = job.directory / f"faulty.{job.rank}"
    if not noted.exists():
        noted.write_text(node())
    if noted.read_text() == node():
        operations.register_stress_test(lambda op: 2 if op == operations.AIC else cpu_stress.detect(op))


def node() -> str:
    return os.environ.get("XDL_IP", "")


def hold(job: Job) -> None:
    """Until there is a file `go`: time to do something to the job."""
    while not job.may_go():
        time.sleep(0.02)


def slow_down(job: Job) -> None:
    """From here on, until there is a file `go`: time to do something while the job trains."""
    job.slow = True


FAULTS = {
    "uce": raising("UCE ERROR"),
    "corrupted": raising("HBM MULTI BIT ECC"),
    "network": raising("HCCL OP RETRY FAILED"),
    "error": raising("an ordinary error"),
    "kill": lambda job: os.kill(os.getpid(), signal.SIGKILL),
    **{kind: breaking_down(kind) for kind in LOST},
    "hold": hold,
    "slow": slow_down,
}


def start(job: Job) -> None:
    """Rank 0 hosts the controller, unless a platform does."""
    address, port = os.environ.get("MASTER_ADDR", "127.0.0.1"), int(os.environ.get("TTP_PORT", "8000"))
    size = len(job.dp_ranks)
    if job.rank == 0 and "MINDX_TASK_ID" not in os.environ:
        plain_store(job).unlink(missing_ok=True)  # of an earlier run; nobody uses it before the controller is there
        tft.tft_init_controller(0, size, False, True, True)
        tft.tft_start_controller(address, port, False, "")
    tft.tft_init_processor(job.rank, size, False, False, "", True, True, True)
    tft.tft_start_processor(address, port)
    job.reborn = tft.tft_is_reboot_node()
    job.collectives = Collectives(job.rank, dist.FileStore(str(store_file(job)), -1))
    if job.reborn:
        job.faults.clear()  # they have happened


def store_file(job: Job) -> Path:
    """Where the ranks meet: in a file, which is not lost with any of them.

    Processes that begin together have a new one, for which torchrun's store gives the name: what those before have left
    must not be in it. Who joins later finds the name beside it.
    """
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return plain_store(job)
    noted = job.directory / "store.name"
    if job.reborn:
        return job.directory / noted.read_text()
    met, *_ = next(dist.rendezvous("env://"))
    if job.rank == 0:
        name = f"store-{uuid.uuid4().hex}"
        written = noted.with_suffix(".new")
        written.write_text(name)
        written.rename(noted)
        met.set("store", name)
    return job.directory / met.get("store").decode()


def plain_store(job: Job) -> Path:
    """Without torchrun."""
    return job.directory / f"store-{os.environ.get('RUN_ID', '')}"


def register(job: Job) -> None:
    replica = {"rank_list": job.dp_ranks, "replica_cnt": REPLICAS, "replica_shift": 0}
    tft.tft_set_optimizer_replica(job.rank, [replica])

    def noting(name, callback):
        return lambda *args: (job.note(name), callback(*args))[1]

    tft.tft_register_stop_handler(noting("stop", job.collectives.stop))
    tft.tft_register_clean_handler(noting("clean", job.collectives.clean))
    tft.tft_register_rebuild_group_handler(job.rebuild_group)
    tft.tft_register_repair_handler(job.repair)
    tft.tft_register_rollback_handler(job.rollback)
    tft.tft_register_save_ckpt_handler(job.save)
    tft.tft_register_rename_handler(job.rename)
    tft.tft_register_stream_sync_handler(lambda: job.note("stream_sync"))
    tft.tft_register_zit_downgrade_rebuild_handler(job.downgrade_rebuild)
    tft.tft_register_zit_upgrade_rebuild_handler(job.upgrade_rebuild)
    tft.tft_register_zit_upgrade_repair_handler(job.repair)
    tft.tft_register_zit_upgrade_rollback_handler(job.rollback)


@tft.tft_exception_handler
def train(shards: Shards, job: Job) -> Shards:
    if job.reborn:
        job.reborn = False
        say(f"rank {job.rank} is ready to join")
        raise RuntimeError("ARF FINISH")  # ready to join the others, who have been training
    with job.collectives.training():
        group = job.collectives.join("world", job.world)
        place = job.world.index(job.rank)
        while job.step < job.options.steps:
            shards.gather(group, job.world)
            batch = [(job.step * GLOBAL_BATCH + i) % SAMPLES for i in range(GLOBAL_BATCH)][place :: len(job.world)]
            loss = (shards.model(job.inputs[batch]) - job.targets[batch]).square().sum() / GLOBAL_BATCH
            shards.model.zero_grad()
            loss.backward()
            job.inject()
            job.take_time()
            gradient = torch.cat([shards.gradient(), loss.detach().reshape(1)])
            group.allreduce([gradient]).wait()
            line = job.begin_record(batch, gradient[-1].item(), digest(shards.parts))
            job.collectives.barrier(group)

            tft.tft_start_updating_os()
            shards.update(gradient[:-1])
            job.step += 1
            job.record(line, job.rank)
            job.record_time()  # the next line may not return: it raises if all are being stopped
            tft.tft_end_updating_os(job.step)

            if place == 0:
                say(f"step {job.step}/{job.options.steps}  loss {gradient[-1].item():.4f}  {len(job.world)} ranks")
            if job.options.checkpoint_every and job.step % job.options.checkpoint_every == 0:
                job.periodic(group, shards)
            tft.tft_pause_train(job.step)
        shards.gather(group, job.world)
    return shards


@contextlib.contextmanager
def taskd_worker(job: Job):
    """Link failover, stress test and timings on the cluster's order, while the training pauses or runs."""
    from taskd.api import destroy_taskd_worker, init_taskd_worker, start_taskd_worker

    if job.options.faulty_chip == job.rank:
        make_chip_faulty(job)
    if not init_taskd_worker(job.rank, framework="pt") or not start_taskd_worker():
        raise RuntimeError("TaskD's worker does not start; its log says why")
    yield
    destroy_taskd_worker()


def say(text: str) -> None:
    """A line in one piece: the processes of a pod share its log."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def digest(tensors: list[torch.Tensor]) -> str:
    return hashlib.sha256(b"".join(tensor.numpy().tobytes() for tensor in tensors)).hexdigest()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--dir", default="mindio-example", help="checkpoints, the store, logs of samples and callbacks")
    parser.add_argument("--checkpoint-every", type=int, default=0)
    parser.add_argument("--pace", type=float, default=0.0, help="seconds that a step takes longer, to watch it")
    parser.add_argument("--fault", action="append", default=[], help=f"STEP:RANK:KIND of {', '.join(FAULTS)}")
    parser.add_argument("--taskd", action="store_true", help="obey TaskD: link failover, stress test, profiling")
    parser.add_argument("--faulty-chip", type=int, metavar="RANK", help="its chip fails a stress test")
    options = parser.parse_args()
    Path(options.dir).mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)

    job = Job(options)
    say(f"rank {job.rank} is process {os.getpid()}")
    job.suffer()
    start(job)
    shards = job.build()
    if not job.reborn:
        job.step = job.load(shards)
        job.complete_record(job.rank)
    register(job)
    with taskd_worker(job) if options.taskd else contextlib.nullcontext():
        shards = train(shards, job)
    result = {"rank": job.rank, "step": job.step, "weights": digest(shards.parts), "state": digest(shards.tensors())}
    say(json.dumps(result))


if __name__ == "__main__":
    main()
