"""What every stage does around its own work: device, seeds of streams, checkpoints."""

from __future__ import annotations

import dataclasses
import hashlib
import inspect
import json
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from lightning.fabric import Fabric
from lightning.fabric.plugins.environments.cluster_environment import ClusterEnvironment
from lightning.fabric.strategies.ddp import DDPStrategy
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from models.config import ModelConfig
from models.transformer import Transformer
from synthetic_tasks import Tokenizer
from testbed import optim, ranks
from testbed.config import Edge, Optimizer
from testbed.errors import UserError
from testbed.nodes import Node
from testbed.store import MANIFEST

MODEL = "model.safetensors"
OPTIMIZERS = "optimizer.safetensors"


class EdgeError(UserError):
    """A spec states of a checkpoint what turns out not to be so."""


def fabric() -> Fabric:
    """Lightning Fabric in fp32 on a CUDA GPU where there is one: one device, or one a rank (`testbed.ranks`)."""
    logging.getLogger("lightning.fabric").setLevel(logging.WARNING)
    rank, size = ranks.here()
    several: dict[str, Any] = {}
    if size > 1:
        # Buffers are constants; the setting changed its name in torch 2.13.
        names = inspect.signature(DistributedDataParallel.__init__).parameters
        buffers = "forward_sync_buffers" if "forward_sync_buffers" in names else "broadcast_buffers"
        still: dict[str, Any] = {buffers: False}
        several = {"strategy": DDPStrategy(**still), "plugins": [_Started(rank, size)]}
    engine = Fabric(
        accelerator="cuda" if torch.cuda.is_available() else "cpu", devices=size, precision="32-true", **several
    )
    engine.launch()
    return engine


class _Started(ClusterEnvironment):
    """Tells Fabric that the ranks are there and have found each other."""

    creates_processes_externally = True
    main_address = ranks.LOOPBACK
    main_port = 0

    def __init__(self, rank: int, size: int) -> None:
        self._rank, self._size = rank, size

    @staticmethod
    def detect() -> bool:
        return False

    def world_size(self) -> int:
        return self._size

    def set_world_size(self, size: int) -> None:
        assert size == self._size

    def global_rank(self) -> int:
        return self._rank

    def set_global_rank(self, rank: int) -> None:
        assert rank == self._rank

    def local_rank(self) -> int:
        return self._rank

    def node_rank(self) -> int:
        return 0


def conditions() -> dict[str, Any]:
    """What a summary tells of the numeric class."""
    device = "cuda:0" if torch.cuda.is_available() else "cpu"
    return {"device": device, "dtype": "float32", "devices": ranks.here()[1]}


def start(
    node: Node, parent: Path | None, tokenizer: Tokenizer, config: Optimizer, device: torch.device
) -> tuple[Transformer, list[torch.optim.Optimizer]]:
    """The model a stage starts with, on its device, and its optimizers, with the parent's moments where the edge
    carries them.

    Raises EdgeError where the parent is not what the edge states, ValueError where it has nothing to carry.
    """
    if parent is None:
        torch.manual_seed(node.context.seeds.init)
        model = Transformer(node.context.model, len(tokenizer))
    else:
        model = load_parent(parent, tokenizer)
    # Moved first: a parent's moments are loaded to where the weights are.
    model = model.to(device)
    optimizers = optim.build(model, config)
    edge: Edge | None = getattr(node.config, "edge", None)
    if parent is not None and edge is not None:
        left = summary_of(parent).get("rate_state", edge.parent)
        if left != edge.parent:
            whose = f"the learning rate of `{getattr(node.config, 'parent', '')}`"
            raise EdgeError(
                f"edge.parent is stated as {edge.parent}, but {whose} was {left} where it was left; state that, or "
                "name another step"
            )
        if edge.optimizer == "carry":
            load_optimizers(parent, optimizers)
    return model, optimizers


def derive(seed: int, purpose: str) -> int:
    """A seed for one purpose (63 bits), so that streams of different purposes share nothing."""
    digest = hashlib.sha256(f"{purpose}/{seed}".encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1


def summary_of(path: Path) -> dict[str, Any]:
    """What the run of a finished artifact returned."""
    summary: dict[str, Any] = json.loads((path / MANIFEST).read_text(encoding="utf-8"))["summary"]
    return summary


def positions_of(path: Path) -> dict[str, dict[str, int]]:
    """How far a stage and its ancestors have read: rows, and their length, of each corpus (by key), problems of each
    stream of RL problems (by its name)."""
    positions: dict[str, dict[str, int]] = summary_of(path)["positions"]
    return positions


def save_model(out: Path, model: Transformer, tokenizer: Tokenizer) -> None:
    """Write model.safetensors, model.json and tokenizer.json."""
    # A tied head is the embedding: it is written once.
    state = {name: t.detach().cpu().contiguous() for name, t in model.state_dict().items()}
    if model.config.tied:
        del state["head.weight"]
    _save(state, out / MODEL)
    (out / "model.json").write_text(json.dumps(dataclasses.asdict(model.config), indent=1) + "\n", encoding="utf-8")
    tokenizer.save(out / "tokenizer.json")


def _save(tensors: dict[str, Tensor], path: Path, metadata: dict[str, str] | None = None) -> None:
    """Write safetensors. Raises OSError where that is not possible, as other files do."""
    try:
        save_file(tensors, path, metadata=metadata)
    except SafetensorError as error:
        raise OSError(str(error)) from error
    # It makes files that their owner alone may read; others may read what they may of the folder.
    path.chmod(path.parent.stat().st_mode & 0o666)


def load_model(path: Path) -> tuple[Transformer, Tokenizer]:
    """Model (on the CPU, in evaluation mode) and tokenizer of a stage's folder."""
    tokenizer = Tokenizer.load(path / "tokenizer.json")
    config = ModelConfig(**json.loads((path / "model.json").read_text(encoding="utf-8")))
    model = Transformer(config, len(tokenizer))
    load_weights(path, model)
    return model.eval(), tokenizer


def load_parent(path: Path, tokenizer: Tokenizer) -> Transformer:
    """The parent's model. Raises ValueError where it was trained with another vocabulary."""
    model, parents = load_model(path)
    if parents.digest != tokenizer.digest:
        raise ValueError(
            f"the parent stage was trained with another vocabulary ({parents!r}) than this stage's ({tokenizer!r}); "
            "both must come from the same tasks and settings"
        )
    return model


def load_weights(path: Path, model: Transformer) -> None:
    """Read the weights of a folder into a model of the same shape, in place."""
    state = load_file(path / MODEL)
    if model.config.tied:
        state["head.weight"] = state["embedding.weight"]
    model.load_state_dict(state)


def save_optimizers(out: Path, optimizers: Sequence[torch.optim.Optimizer]) -> None:
    """Write the moments of every parameter by its place, `<optimizer>.<parameter>.<name>`."""
    tensors = {
        f"{number}.{place}.{name}": value.detach().cpu().contiguous()
        for number, optimizer in enumerate(optimizers)
        for place, state in optimizer.state_dict()["state"].items()
        for name, value in state.items()
    }
    _save(tensors, out / OPTIMIZERS, {"layout": json.dumps(_layout(optimizers))})


def load_optimizers(path: Path, optimizers: Sequence[torch.optim.Optimizer]) -> None:
    """Read moments; rates and other settings stay those of the optimizers given.

    Raises ValueError where the folder holds none, or those of other optimizers.
    """
    if not (path / OPTIMIZERS).exists():
        raise ValueError("the parent stage left no optimizer state: set `edge.optimizer: reset`")
    with safe_open(path / OPTIMIZERS, framework="pt") as file:
        layout = json.loads(file.metadata()["layout"])
        states: list[dict[int, dict[str, Tensor]]] = [{} for _ in layout]
        for key in file.keys():  # noqa: SIM118 (no mapping)
            number, place, name = key.split(".")
            states[int(number)].setdefault(int(place), {})[name] = file.get_tensor(key)
    if layout != _layout(optimizers):
        raise ValueError("the parent stage used other optimizers: set `edge.optimizer: reset`")
    for optimizer, state in zip(optimizers, states, strict=True):
        optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})


def _layout(optimizers: Sequence[torch.optim.Optimizer]) -> list[list[Any]]:
    """What tells optimizers apart: their kinds and how many parameters their groups hold."""
    return [[type(o).__name__, [len(group["params"]) for group in o.param_groups]] for o in optimizers]


def flat(model: nn.Module) -> Tensor:
    """Every parameter once, in one fp64 vector on the CPU."""
    return torch.cat([p.detach().double().flatten().cpu() for p in model.parameters()])


def relative_change(before: Tensor, after: Tensor) -> float:
    """Norm of the change over the norm of what was there."""
    return float((after - before).norm() / before.norm())


def finite_norm(model: nn.Module, clip: float, where: str) -> float:
    """Clip gradients to the global norm `clip` (0: leave them) and return the norm before.

    Raises FloatingPointError where it is not finite, so that no optimizer step is taken.
    """
    norm = float(nn.utils.clip_grad_norm_(model.parameters(), clip or float("inf")))
    if not norm < float("inf"):
        raise FloatingPointError(f"{where}: the gradient norm is {norm}; no step was taken")
    return norm
