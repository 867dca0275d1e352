"""Loaded once by the server from which `jobs` forks ranks. Only one thread: a fork does not copy threads."""

import torch
import torch._dynamo  # noqa: F401  the first optimizer would load it

from tests.mindio import jobs

torch.set_num_threads(1)
jobs.load_example()
