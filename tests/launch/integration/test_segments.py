"""A loader's worker that is killed while it hands over a batch leaves it in shared memory: the launcher removes it."""

from __future__ import annotations

from pathlib import Path

from tests.launch.launching import launch

SCRIPT = '''
import os, torch
from torch.utils.data import DataLoader, Dataset
from evertrain.torch import Training

class Killed(Dataset):
    """Each worker leaves what one leaves that is killed between shm_open and shm_unlink."""
    def __len__(self):
        return 64
    def __getitem__(self, index):
        name = f"torch_{os.getpid()}_{os.environ['MARK']}_0"
        open(f"/dev/shm/{name}", "w").close()
        print("left", name, flush=True)
        return torch.zeros(4)

model = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
loader = DataLoader(Killed(), 4, num_workers=1)
training = Training(model=model, optimizer=optimizer, sampler=loader.sampler)

@training.resilient
def train():
    for step, batch in training.steps(loader, until=6):
        training.model(batch).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

train()
'''


def test_what_the_workers_of_a_killed_rank_left_is_removed(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    options = ("--nproc-per-node=2", "--ft-warm=0", "--ft-fault=kill@step=3,rank=1")
    result = launch(*options, script, events=tmp_path / "events.jsonl", env={"MARK": str(tmp_path.stat().st_ino)})
    assert result.code == 0, result
    left = {line.split("left ")[1] for line in result.out.splitlines() if "left " in line}
    assert len(left) >= 3, result
    assert not [name for name in left if (Path("/dev/shm") / name).exists()], result
