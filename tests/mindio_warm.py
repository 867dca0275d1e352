"""Loaded once by the server from which `mindio_jobs` forks ranks. Only one thread: a fork does not copy threads."""

import torch
import torch._dynamo  # noqa: F401  the first optimizer would load it

import mindio_jobs

torch.set_num_threads(1)
mindio_jobs.load_example()
