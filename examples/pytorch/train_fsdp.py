"""The speller of train.py with weights and optimizer sharded by FSDP2, on a mesh of replicas and shards.

    evertrain launch --standalone --nproc-per-node 4 examples/pytorch/train_fsdp.py --mesh 2x2

A lost process gets its shard back from the rank that holds the same shard in another replica. At its end each rank
prints hashes of the whole model and optimizer, gathered from all shards: they are the same bits whether or not
processes were killed on the way. It also runs under plain `torchrun`, only without protection.
"""

import argparse
import json
import os
import warnings

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.optim import lr_scheduler
from torch.utils.data import DataLoader, DistributedSampler
from train import SIZES, SampleLog, Sentences, Speller, fingerprint

from evertrain.torch import Training

warnings.filterwarnings("ignore", ".*returned a view tensor")  # nothing here changes the logits in place


def whole(state: object) -> object:
    """A state with every sharded tensor in it put together."""
    if isinstance(state, dict):
        return {key: whole(value) for key, value in state.items()}
    if isinstance(state, list):
        return [whole(value) for value in state]
    return state.full_tensor() if isinstance(state, DTensor) else state


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mesh", default="2x2", help="replicas x shards; their product is the number of processes")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--batch-size", type=int, default=8, help="samples per rank and micro-batch")
    parser.add_argument("--accumulate", type=int, default=1, help="micro-batches per step")
    parser.add_argument("--samples", type=int, default=2048, help="size of the data set")
    parser.add_argument("--model-size", choices=SIZES, default="tiny")
    parser.add_argument("--clip", type=float, default=1.0, help="largest norm of the gradient; 0 for no limit")
    parser.add_argument("--seed", type=int, default=1234)
    parser.add_argument("--checkpoint-dir", help="where checkpoints are written to and continued from")
    parser.add_argument("--checkpoint-every", type=int, default=0, help="steps between checkpoints; 0 for none")
    parser.add_argument("--log-every", type=int, default=10, help="steps between two lines of rank 0; 0 for none")
    return parser.parse_args()


def main() -> None:
    args = arguments()
    replicas, shards = map(int, args.mesh.split("x"))
    mesh = init_device_mesh("cpu", (replicas, shards), mesh_dim_names=("replicate", "shard"))
    torch.manual_seed(args.seed)
    dataset = Sentences(args.samples, args.seed)
    model = Speller(*SIZES[args.model_size])
    for block in model.blocks.layers:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    scheduler = lr_scheduler.CosineAnnealingLR(optimizer, T_max=args.steps)

    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    sampler = DistributedSampler(dataset, world_size, rank, shuffle=True, seed=args.seed, drop_last=True)
    loader = DataLoader(dataset, args.batch_size, sampler=sampler, drop_last=True)
    log = SampleLog(args.samples, len(loader))
    training = Training(
        model=model, optimizer=optimizer, scheduler=scheduler, sampler=sampler, extra={"samples": log}, seed=args.seed,
        checkpoint_dir=args.checkpoint_dir, checkpoint_every=args.checkpoint_every,
    )  # fmt: skip

    @training.resilient
    def train() -> str:
        for step, batches in training.steps(loader, until=args.steps, accumulate=args.accumulate):
            ids, mean_loss = [], 0.0
            for batch in training.micro(batches):
                logits = training.model(batch["x"])
                loss = nn.functional.cross_entropy(logits.flatten(0, 1), batch["y"].flatten()) / args.accumulate
                loss.backward()
                ids.append(batch["index"])
                mean_loss += loss.item()
            consumed = training.gather(torch.stack(ids))
            if args.clip:
                nn.utils.clip_grad_norm_(model.parameters(), args.clip)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            log.append(step, consumed)
            if training.rank == 0 and args.log_every and (step + 1) % args.log_every == 0:
                print(f"step {step + 1}/{args.steps}  loss {mean_loss:.4f}", flush=True)

        # A collective, too: here a rank that is lost in it is replaced.
        return fingerprint(*(whole(part.state_dict()) for part in (model, optimizer, scheduler)))

    learned = train()
    result = {"rank": training.rank, "step": training.step, "sha256": learned, "samples_sha256": log.digest}
    print(json.dumps(result) + "\n", end="", flush=True)


if __name__ == "__main__":
    main()
