"""Layers split over several processes, as Hugging Face models declare it (``base_model_tp_plan``).

Each process, a *rank*, holds a share of every large matrix and the keys and values of its own heads. A plan
names a *style* for each module of a layer:

- ``colwise``: the rank has a share of a linear's outputs, and the next module goes on with that share;
- ``rowwise``: it has the matching share of inputs, and the ranks' results are summed;
- ``colwise_gather_output``, ``rowwise_split_input``: the same where the modules between want the whole;
- ``packed_colwise``: gate and up of experts in one tensor, of each of which it has a share;
- ``moe_tp_experts``: a module whose results are summed;
- the rest says how to train, or that everybody has all of it.

Only shares are read from the checkpoint. The sums are the one place where ranks wait for each other, and
the order in which they add changes the last bits of a number: text can differ in near-ties, as between other
batch shapes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

from aparte.errors import UserError

if TYPE_CHECKING:
    from aparte.model.parts import Blueprint
    from aparte.model.stage import Stage

#: Styles by what they do to a matrix: the share of its outputs, or of its inputs.
OUTPUTS = ("colwise", "colwise_gather_output", "colwise_rep")
INPUTS = ("rowwise", "rowwise_split_input", "rowwise_rep")
#: Outputs that are put together again, inputs that are whole before they are split, results that are summed.
GATHERED = ("colwise_gather_output", "colwise_rep")
SPLIT = ("rowwise_split_input", "rowwise_rep")
SUMMED = (*INPUTS, "moe_tp_experts")
#: Gate and up in one tensor.
PACKED = ("packed_colwise",)
#: What every rank has all of.
WHOLE = ("replicated_with_grad_allreduce", "replicate", "sequence_parallel")
KNOWN = (*OUTPUTS, *INPUTS, *PACKED, "moe_tp_experts", *WHOLE)
_LAYER = "layers.*."
#: Projections whose outputs are heads.
_HEADS = ("q_proj", "k_proj", "v_proj", "qkv_proj", "query_key_value")


class Split:
    """The share of ``rank`` among ``size`` processes of the default process group."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank = rank
        self.size = size

    def lead(self, stage: Stage) -> Stage:
        """What stands for ``stage`` in this process; the rank that has the sockets leads the others."""
        return stage

    def check(self, blueprint: Blueprint) -> None:
        """Raises :class:`UserError` if the model's layers cannot be split over so many."""
        config, plan = blueprint.config, self.plan(blueprint)
        attention = [name for name, style in plan.items() if style == "colwise" and name.endswith(_HEADS)]
        counts: dict[str, Any] = {}
        if attention:
            counts["attention heads"] = config.num_attention_heads
            counts["heads of keys and values"] = getattr(config, "num_key_value_heads", None)
        for what, count in counts.items():
            if isinstance(count, int) and count % self.size:
                raise UserError(
                    f"This model cannot be split over {self.size}: it has {count} {what}, and {count} is not "
                    f"divisible by {self.size}. Use a --tensor-parallel that divides it."
                )
        for index in range(blueprint.layers):
            layer = blueprint.empty_layer(index)
            if attention and (
                whole := [name for name, _ in layer.named_parameters() if _by_head(layer, name)]
            ):
                raise UserError(
                    f"This model cannot be split: {whole[0]} has values for each head, and the model's plan "
                    "splits the heads but not them. Serve it without --tensor-parallel."
                )
            self.shrink(layer, plan)

    def plan(self, blueprint: Blueprint) -> dict[str, str]:
        """Style by the name of a module or tensor in a layer. Raises :class:`UserError` without a plan."""
        declared = getattr(blueprint.config, "base_model_tp_plan", None) or {}
        plan = {
            name.removeprefix(_LAYER): style for name, style in declared.items() if name.startswith(_LAYER)
        }
        kind = blueprint.checkpoint.config_dict["model_type"]
        if not plan or not blueprint.family.known:
            raise UserError(
                f"Models of the family {kind!r} do not say how to split their layers, or it is not tested "
                "here. Serve it without --tensor-parallel."
            )
        if unknown := sorted(set(plan.values()) - set(KNOWN)):
            raise UserError(
                f"Models of the family {kind!r} want to be split in the style {unknown[0]!r}, which is not "
                "known here. Serve it without --tensor-parallel."
            )
        return plan

    def share(self, name: str, tensor: torch.Tensor, plan: dict[str, str]) -> torch.Tensor:
        """This rank's part of the tensor ``name`` of a layer, of the same number of dimensions."""
        style = plan.get(name) or plan.get(name.rpartition(".")[0])
        if style in OUTPUTS:
            return self._part(name, tensor, 0)
        if style in INPUTS:
            if name.endswith(".bias"):  # added once
                return tensor if self.rank == 0 else torch.zeros_like(tensor)
            return self._part(name, tensor, -1)
        if style in PACKED:
            gate, up = tensor.chunk(2, dim=-2)
            return torch.cat([self._part(name, gate, -2), self._part(name, up, -2)], dim=-2)
        return tensor

    def shrink(self, layer: nn.Module, plan: dict[str, str]) -> None:
        """Give a layer without weights the shapes of this rank's share."""
        for name, tensor in list(layer.named_parameters()):
            share = self.share(name, tensor.data, plan)
            if share.shape != tensor.shape:
                path, _, own = name.rpartition(".")
                module = layer.get_submodule(path)
                setattr(module, own, nn.Parameter(share, requires_grad=False))
                if isinstance(module, nn.Linear) and own == "weight":
                    module.out_features, module.in_features = share.shape

    def join(self, layer: nn.Module, plan: dict[str, str]) -> None:
        """Put the exchange between ranks around the modules of a layer that need it."""
        modules = dict(layer.named_modules())
        for name, style in plan.items():
            if (module := modules.get(name)) is None:
                continue  # a tensor, or a module that this layer does not have
            wrapped = module
            if style in SPLIT:
                wrapped = OfShare(wrapped, self)
            if style in SUMMED:
                wrapped = Summed(wrapped)
            if style in GATHERED:
                wrapped = Gathered(wrapped, self.size)
            if wrapped is not module:
                path, _, own = name.rpartition(".")
                setattr(layer.get_submodule(path), own, wrapped)

    def _part(self, name: str, tensor: torch.Tensor, dim: int) -> torch.Tensor:
        length = tensor.shape[dim]
        if length % self.size:
            raise UserError(
                f"This model cannot be split over {self.size}: {name} is {length} wide, and {length} is not "
                f"divisible by {self.size}. Use a --tensor-parallel that divides it."
            )
        each = length // self.size
        return tensor.narrow(dim, self.rank * each, each).contiguous()


def _by_head(layer: nn.Module, name: str) -> bool:
    """Whether a norm's weight is one row per head."""
    return "norm" in name and layer.get_parameter(name).ndim > 1


class Summed(nn.Module):
    """The sum of all ranks' results."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, *args: Any, **options: Any) -> torch.Tensor:
        """``[..., D] -> [..., D]``, the same in every rank."""
        result: torch.Tensor = self.inner(*args, **options).contiguous()
        dist.all_reduce(result)
        return result


class Gathered(nn.Module):
    """All ranks' results side by side."""

    def __init__(self, inner: nn.Module, size: int) -> None:
        super().__init__()
        self.inner = inner
        self._size = size

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``[..., in] -> [..., size x out]``."""
        own: torch.Tensor = self.inner(x).contiguous()
        parts = [torch.empty_like(own) for _ in range(self._size)]
        dist.all_gather(parts, own)
        return torch.cat(parts, dim=-1)


class OfShare(nn.Module):
    """A linear that is given everything and takes the inputs that it has weights for."""

    def __init__(self, inner: nn.Module, split: Split) -> None:
        super().__init__()
        self.inner = inner
        self._rank, self._size = split.rank, split.size

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``[..., size x in] -> [..., out]``."""
        result: torch.Tensor = self.inner(x.chunk(self._size, dim=-1)[self._rank])
        return result
