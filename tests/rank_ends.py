"""Runs of ranks that end badly; without the libraries of a training, so that they start soon."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import tiny
import torch
import torch.distributed as dist

from testbed import ranks

NODE = tiny.node(tiny.graph(), "pretrain")


def together_once() -> None:
    dist.all_reduce(torch.ones(1))


def fails(node: Any = NODE, inputs: Any = None, out: Path = Path(), tracker: Any = None, saves: Any = None) -> None:
    """Rank 1 has an error of its own while the other waits for it."""
    together_once()
    if ranks.here()[0] == 1:
        raise FloatingPointError("the loss of rank 1 is nan")
    together_once()
    raise AssertionError("rank 1 was not there")


def ends(node: Any = NODE, inputs: Any = None, out: Path = Path(), tracker: Any = None, saves: Any = None) -> None:
    """Rank 1 waits for rank 0, which has an error of its own."""
    together_once()
    if ranks.here()[0] == 0:
        raise RuntimeError("rank 0 has had enough")
    together_once()


def waits(node: Any = NODE, inputs: Any = None, out: Path = Path(), tracker: Any = None, saves: Any = None) -> None:
    """Rank 1 waits for rank 0, which has something else to do."""
    pid = torch.tensor(os.getpid() * ranks.here()[0])
    dist.all_reduce(pid)
    if ranks.here()[0] == 0:
        print(int(pid), flush=True)
        time.sleep(600)
    together_once()


def lead() -> None:
    """Be rank 0 of two, for long."""
    with ranks.together(2, "rank_ends:waits", NODE, {}):
        waits()
