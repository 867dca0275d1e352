"""A small transformer learns to spell sentences of a tiny grammar, on as many processes as you like.

    evertrain launch --standalone --nproc-per-node 4 examples/pytorch/train.py --steps 100

An ordinary data-parallel script. The lines that make it survive faults are marked with (1), (2) and (3). At its end
each rank prints hashes of everything it learned and of every sample it consumed: they are the same bits whether or not
processes were killed on the way. It also runs under plain `python` and plain `torchrun`, only without protection.
"""

import argparse
import contextlib
import hashlib
import json
import os
import random

import torch
from torch import nn
from torch.optim import lr_scheduler
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from evertrain.torch import Training

SIZES = {"tiny": (64, 2), "small": (128, 4), "medium": (256, 6)}  # width and layers
CONTEXT = 32  # characters that the model sees at once
ALPHABET = " .abcdefghijklmnopqrstuvwxyz"


class Sentences(Dataset):
    """Text from a grammar of three rules, cut into windows. Each item carries its index, for the sample log."""

    WORDS = {
        "who": ["the cat", "a small dog", "my old friend", "the queen of spades", "nobody"],
        "does": ["sees", "follows", "paints", "forgets", "never understands"],
        "what": ["the moon", "a quiet river", "the train to the north", "itself", "every step"],
    }

    def __init__(self, samples: int, seed: int) -> None:
        choose = random.Random(seed).choice  # a generator of its own: the global ones belong to the training
        text = ""
        while len(text) <= samples * CONTEXT:
            text += " ".join(choose(words) for words in self.WORDS.values()) + ". "
        self.samples = samples
        self.codes = torch.tensor([ALPHABET.index(letter) for letter in text])

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> dict:
        window = self.codes[index * CONTEXT : (index + 1) * CONTEXT + 1]
        return {"x": window[:-1], "y": window[1:], "index": index}


class Speller(nn.Module):
    def __init__(self, width: int, layers: int, dropout: float = 0.1) -> None:
        super().__init__()
        self.letters = nn.Embedding(len(ALPHABET), width)
        self.places = nn.Embedding(CONTEXT, width)
        block = nn.TransformerEncoderLayer(width, width // 16, 4 * width, dropout, batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(block, layers, norm=nn.LayerNorm(width), enable_nested_tensor=False)
        self.head = nn.Linear(width, len(ALPHABET))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        no_peeking = nn.Transformer.generate_square_subsequent_mask(CONTEXT, device=x.device)
        return self.head(self.blocks(self.letters(x) + self.places.weight, mask=no_peeking, is_causal=True))


class SampleLog:
    """Which samples went into which step, as a chain of hashes. Its state_dict makes it roll back with the model."""

    def __init__(self, samples: int, batches_per_epoch: int) -> None:
        self.batches_per_epoch = batches_per_epoch
        self.batches, self.digest, self.seen = 0, "", torch.zeros(samples, dtype=torch.bool)

    def append(self, step: int, ids: torch.Tensor) -> None:
        """Add one step of all ranks; `ids` has the shape (ranks, micro-batches, samples)."""
        for batch in ids.transpose(0, 1):  # one micro-batch of all ranks
            if self.batches % self.batches_per_epoch == 0:
                self.seen.zero_()
            if self.seen[batch].any() or batch.unique().numel() != batch.numel():
                raise RuntimeError(f"step {step} consumes a sample for the second time in this epoch")
            self.seen[batch] = True
            self.batches += 1
        entry = json.dumps([self.digest, step, ids.flatten(1).sort().values.tolist()])
        self.digest = hashlib.sha256(entry.encode()).hexdigest()

    def state_dict(self) -> dict:
        return {"batches": self.batches, "digest": self.digest, "seen": self.seen}

    def load_state_dict(self, state: dict) -> None:
        self.batches, self.digest, self.seen = state["batches"], state["digest"], state["seen"].clone()


def fingerprint(*states: object) -> str:
    """SHA-256 over the bits of every tensor and the exact value of everything else, in a fixed order."""
    sha = hashlib.sha256()

    def feed(value: object) -> None:
        if isinstance(value, torch.Tensor):
            sha.update(f"{value.dtype}{tuple(value.shape)}".encode())
            sha.update(value.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy())
        elif isinstance(value, dict):
            for key in sorted(value, key=str):
                sha.update(str(key).encode())
                feed(value[key])
        elif isinstance(value, (list, tuple)):
            for item in value:
                feed(item)
        else:
            sha.update(repr(value).encode())

    feed(states)
    return sha.hexdigest()


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--batch-size", type=int, default=8, help="samples per rank and micro-batch")
    parser.add_argument("--accumulate", type=int, default=1, help="micro-batches per step")
    parser.add_argument("--samples", type=int, default=2048, help="size of the data set")
    parser.add_argument("--workers", type=int, default=0, help="processes of the DataLoader")
    parser.add_argument("--model-size", choices=SIZES, default="tiny")
    parser.add_argument("--scheduler", choices=("cosine", "step"), default="cosine")
    parser.add_argument("--clip", type=float, default=1.0, help="largest norm of the gradient; 0 for no limit")
    parser.add_argument("--amp", action="store_true", help="mixed precision with a GradScaler")
    parser.add_argument("--sharded", action="store_true", help="shard the optimizer's state over the ranks")
    parser.add_argument("--replica-cnt", type=int, default=2, help="ranks that hold the same shard")
    parser.add_argument("--seed", type=int, default=1234)
    parser.add_argument("--checkpoint-dir", help="where checkpoints are written to and continued from")
    parser.add_argument("--checkpoint-every", type=int, default=0, help="steps between checkpoints; 0 for none")
    parser.add_argument("--log-every", type=int, default=10, help="steps between two lines of rank 0; 0 for none")
    return parser.parse_args()


def main() -> None:
    args = arguments()
    torch.manual_seed(args.seed)
    dataset = Sentences(args.samples, args.seed)
    device = torch.device(f"cuda:{os.environ.get('LOCAL_RANK', 0)}" if torch.cuda.is_available() else "cpu")
    model = Speller(*SIZES[args.model_size]).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    if args.scheduler == "cosine":
        scheduler = lr_scheduler.CosineAnnealingLR(optimizer, T_max=args.steps)
    else:
        scheduler = lr_scheduler.StepLR(optimizer, step_size=max(args.steps // 3, 1))
    scaler = torch.amp.GradScaler(device.type, enabled=args.amp)
    precision = torch.autocast(device.type, torch.bfloat16) if args.amp else contextlib.nullcontext()

    rank, world_size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    # drop_last: without it the sampler repeats samples to fill the last batch.
    sampler = DistributedSampler(dataset, world_size, rank, shuffle=True, seed=args.seed, drop_last=True)
    loader = DataLoader(dataset, args.batch_size, sampler=sampler, num_workers=args.workers, drop_last=True)
    log = SampleLog(args.samples, len(loader))

    training = Training(  # (1) what has to survive
        model=model, optimizer=optimizer, scheduler=scheduler, sampler=sampler, scaler=scaler if args.amp else None,
        extra={"samples": log}, seed=args.seed,
        checkpoint_dir=args.checkpoint_dir, checkpoint_every=args.checkpoint_every,
        sharded=args.sharded, replica_cnt=args.replica_cnt,
    )  # fmt: skip

    @training.resilient  # (2) what is entered again after a fault
    def train() -> dict:
        for step, batches in training.steps(loader, until=args.steps, accumulate=args.accumulate):  # (3)
            ids, mean_loss = [], 0.0
            for batch in training.micro(batches):  # gradients are summed over the ranks in the last one
                with precision:
                    logits = training.model(batch["x"].to(device))
                    loss = nn.functional.cross_entropy(logits.flatten(0, 1), batch["y"].to(device).flatten())
                scaler.scale(loss / args.accumulate).backward()
                ids.append(batch["index"])
                mean_loss += loss.item() / args.accumulate
            consumed = training.gather(torch.stack(ids).to(device))  # a collective: before the update
            scaler.unscale_(optimizer)
            if args.clip:
                nn.utils.clip_grad_norm_(model.parameters(), args.clip)
            scaler.step(optimizer)
            scaler.update()
            scheduler.step()
            optimizer.zero_grad()
            if consumed is None:
                continue  # a rank is missing and this one does its work: the step is not complete yet
            log.append(step, consumed.cpu())
            if training.rank == 0 and args.log_every and (step + 1) % args.log_every == 0:
                print(f"step {step + 1}/{args.steps}  loss {mean_loss:.4f}", flush=True)
        return training.optimizer_state_dict()  # the whole of it, if it is sharded

    whole = train()
    learned = fingerprint(model.state_dict(), whole, scheduler.state_dict(), scaler.state_dict())
    result = {"rank": training.rank, "step": training.step, "sha256": learned, "samples_sha256": log.digest}
    print(json.dumps(result) + "\n", end="", flush=True)  # one write, so that lines of several ranks can't mix


if __name__ == "__main__":
    main()
