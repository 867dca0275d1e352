"""A training loop of its own, made fault tolerant with MindIO's callbacks. Four processes, CPU:

    for rank in 0 1 2 3; do RANK=$rank WORLD_SIZE=4 python examples/mindio/train.py --steps 50 & done; wait

The optimizer is sharded, and every shard is kept twice: with four ranks 0 and 2 hold one half of it, 1 and 3 the other.
A rank that loses its state gets it back from the other holder. The order of the calls is that of any framework; what is
special here is only how groups are built: gloo has no abort, so `Collectives` takes the place of a device that has.

Try `--fault 10:1:uce` (rank 1 loses its memory in step 10): the hashes at the end are the same as without.
"""

import argparse
import hashlib
import json
import os
import shutil
import signal
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from evertrain.torch.tft_collectives import Collectives
from mindio_ttp import framework_ttp as tft

REPLICAS, GLOBAL_BATCH, SAMPLES = 2, 12, 1200


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

    def downgrade_rebuild(self, dp_ranks, world_ranks, args, param):
        self.note("downgrade_rebuild")
        self.collectives.leave_all()
        self.world = world_ranks
        self.rollback(0, args)

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

    def note(self, event: str) -> None:
        with open(self.directory / f"events.{self.rank}", "a") as file:
            file.write(f"{event} {os.getpid()}\n")

    def inject(self) -> None:
        for fault in list(self.faults):
            step, rank, kind = fault
            if (int(step), int(rank)) == (self.step, self.rank):
                self.faults.discard(fault)
                FAULTS[kind](self)


def raising(text: str):
    def fault(job: Job) -> None:
        raise RuntimeError(text)

    return fault


FAULTS = {
    "uce": raising("UCE ERROR"),
    "corrupted": raising("HBM MULTI BIT ECC"),
    "network": raising("HCCL OP RETRY FAILED"),
    "error": raising("an ordinary error"),
    "kill": lambda job: os.kill(os.getpid(), signal.SIGKILL),
}


def start(job: Job) -> None:
    """Rank 0 hosts the controller, unless a platform does."""
    address, port = os.environ.get("MASTER_ADDR", "127.0.0.1"), int(os.environ.get("TTP_PORT", "8000"))
    size = len(job.dp_ranks)
    store = job.directory / f"store{os.environ.get('RUN_ID', '')}"
    if job.rank == 0 and "MINDX_TASK_ID" not in os.environ:
        store.unlink(missing_ok=True)  # of an earlier run; nobody uses it before the controller is there
        tft.tft_init_controller(0, size, False, True, True)
        tft.tft_start_controller(address, port, False, "")
    tft.tft_init_processor(job.rank, size, False, False, "", True, True, True)
    tft.tft_start_processor(address, port)
    job.reborn = tft.tft_is_reboot_node()
    job.collectives = Collectives(job.rank, dist.FileStore(str(store), -1))  # a store that is not lost with a rank
    if job.reborn:
        job.faults.clear()  # they have happened


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
            gradient = torch.cat([shards.gradient(), loss.detach().reshape(1)])
            group.allreduce([gradient]).wait()
            job.collectives.barrier(group)

            tft.tft_start_updating_os()
            shards.update(gradient[:-1])
            job.step += 1
            tft.tft_end_updating_os(job.step)

            with open(job.directory / f"steps.{job.rank}", "a") as file:
                file.write(json.dumps([job.step, batch, gradient[-1].item(), digest(shards.parts)]) + "\n")
            if job.options.checkpoint_every and job.step % job.options.checkpoint_every == 0:
                job.periodic(group, shards)
            tft.tft_pause_train(job.step)
        shards.gather(group, job.world)
    return shards


def digest(tensors: list[torch.Tensor]) -> str:
    return hashlib.sha256(b"".join(tensor.numpy().tobytes() for tensor in tensors)).hexdigest()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--dir", default="mindio-example", help="checkpoints, the store, logs of samples and callbacks")
    parser.add_argument("--checkpoint-every", type=int, default=0)
    parser.add_argument("--fault", action="append", default=[], help=f"STEP:RANK:KIND of {', '.join(FAULTS)}")
    options = parser.parse_args()
    Path(options.dir).mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)

    job = Job(options)
    start(job)
    shards = job.build()
    if not job.reborn:
        job.step = job.load(shards)
    register(job)
    shards = train(shards, job)
    result = {"rank": job.rank, "step": job.step, "weights": digest(shards.parts), "state": digest(shards.tensors())}
    print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
