"""One run in several processes, under torchrun: who is who, and what they agree on.

Each process has its share of every batch and the same weights; gradients are averaged by torch's
DistributedDataParallel. Without torchrun there is one process, and nothing here does anything.
"""
import datetime
import os
from collections.abc import Callable
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from tinymask import runs

Loaded = TypeVar("Loaded")


def start(name: str, batch_size: int) -> tuple[int, int, torch.device]:
    """(rank, processes, device). Under torchrun each process has its share of every batch."""
    if not {"RANK", "LOCAL_RANK", "WORLD_SIZE"} <= os.environ.keys() or os.environ["WORLD_SIZE"] == "1":
        return 0, 1, runs.pick_device(name)
    try:
        local, world = int(os.environ["LOCAL_RANK"]), int(os.environ["WORLD_SIZE"])
        if batch_size % world:
            runs.fail(f"--batch-size {batch_size} is not a multiple of {world} processes")
        cuda = runs.pick_device(name).type == "cuda"
        device = runs.pick_device(f"cuda:{local}" if cuda else "cpu")
        if not dist.is_initialized():
            patience = datetime.timedelta(hours=12)  # the others wait while the first downloads
            dist.init_process_group("nccl" if cuda else "gloo", timeout=patience)
    except (ArithmeticError, ValueError, RuntimeError) as error:
        runs.fail(f"torchrun's RANK, LOCAL_RANK, WORLD_SIZE in the environment: {runs.first_line(error)}")
    return dist.get_rank(), world, device


def mean_loss(loss: Tensor) -> float:
    """After a step, the mean loss of all processes."""
    total = loss.detach().clone()
    if dist.is_initialized():
        dist.all_reduce(total.div_(dist.get_world_size()))
    return total.item()


def first_alone(load: Callable[[], Loaded]) -> Loaded:
    """What load() returns: called in the first process, which may download or decode, and then in the others."""
    if dist.is_initialized() and dist.get_rank() > 0:
        try:
            dist.barrier()
        except RuntimeError:
            raise SystemExit(2) from None  # the first process has left, and said why
    loaded = load()
    if dist.is_initialized() and dist.get_rank() == 0:
        dist.barrier()
    return loaded
