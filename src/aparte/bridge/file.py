"""A trained bridge on disk: one safetensors file, with what it was trained for in its header."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from aparte.bridge.net import BridgeNet
from aparte.config import DEFAULT_MODEL, Cut, cache_dir
from aparte.errors import CheckpointError, MismatchError, UserError
from aparte.fingerprint import Fingerprint
from aparte.model.fingerprint import take_fingerprint
from aparte.model.parts import Blueprint, convert

FORMAT = "aparte-bridge-1"
SHIPPED = Path(__file__).with_name("shipped")


@dataclass(frozen=True)
class Bridge:
    """The network, and its draft vocabulary ``[V']``, increasing.

    Its layer was built as the model's layer number ``layer``.
    """

    net: BridgeNet
    draft_ids: torch.Tensor
    layer: int


def save_bridge(path: Path, net: BridgeNet, draft_ids: torch.Tensor, model: Fingerprint) -> None:
    """Write the network in half precision."""
    tensors = {name: value.detach().half().cpu().contiguous() for name, value in net.state_dict().items()}
    # Means and deviations of outsized dimensions may not fit half precision.
    tensors |= {name: value.detach().float().cpu() for name, value in net.named_buffers() if "." not in name}
    tensors["draft_ids"] = draft_ids.to(torch.int32).cpu()
    header = {"format": FORMAT, "cut": model.cut, "config": model.config, "tensors": model.tensors}
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    save_file(tensors, partial, header)
    partial.replace(path)


def load_bridge(path: Path, blueprint: Blueprint, cut: Cut) -> Bridge:
    """The bridge in ``path``, for the model and cut at hand, in the numbers that it computes with.

    Raises :class:`MismatchError` if it was trained for others, :class:`CheckpointError` if it is none.
    """
    bridge = read_bridge(path, blueprint, cut)
    convert(bridge.net, blueprint.precision, fused=blueprint.fused)
    return bridge


def read_bridge(path: Path, blueprint: Blueprint, cut: Cut) -> Bridge:
    """The same as it was trained, in float32."""
    try:
        with safe_open(path, framework="pt") as file:
            header = file.metadata() or {}
            if header.get("format") != FORMAT:
                raise CheckpointError(f"{path} is not a bridge. Train one with `aparte bridge train`.")
            _check(path, header, take_fingerprint(blueprint, cut, "this model"))
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        draft_ids = tensors.pop("draft_ids").long()
        layer = cut.middle(blueprint.layers).stop - 1
        net = BridgeNet(blueprint.empty_layer(layer), blueprint.hidden_size)
        net.load_state_dict({name: value.float() for name, value in tensors.items()}, assign=True)
    except (OSError, SafetensorError, KeyError, RuntimeError) as error:
        raise CheckpointError(
            f"{path} can't be read as a bridge ({type(error).__name__}). Train it again with "
            "`aparte bridge train`, or leave it out with another --decode."
        ) from error
    if not len(draft_ids) or int(draft_ids.min()) < 0 or int(draft_ids.max()) >= blueprint.vocab_size:
        raise CheckpointError(f"{path} names tokens that the model does not have. Train the bridge again.")
    return Bridge(net.eval().requires_grad_(False), draft_ids, layer)


def _check(path: Path, header: dict[str, str], model: Fingerprint) -> None:
    if header.get("cut") != model.cut:
        raise MismatchError(
            f"The bridge {path} was trained for cut {header.get('cut')}, and this is cut {model.cut}. "
            f"Train one for it with `aparte bridge train --cut {model.cut}`."
        )
    # On a device that fetched only its own shards the middle's tensors can't be compared.
    if header.get("config") != model.config or (model.tensors and header.get("tensors") != model.tensors):
        raise MismatchError(
            f"The bridge {path} was trained for another model. Train one with `aparte bridge train`."
        )


def find_bridge(name: str, cut: Cut) -> Path | None:
    """Where the bridge of model ``name`` at ``cut`` lies: one trained here, else the one that ships."""
    trained = bridge_path(name, cut)
    if trained.exists():
        return trained
    shipped = shipped_bridge(name) if name == DEFAULT_MODEL and cut == Cut() else None
    return shipped if shipped and shipped.exists() else None


def shipped_bridge(name: str) -> Path:
    """The bridge that comes with aparte. Raises :class:`UserError` for a model without one."""
    if name != DEFAULT_MODEL:
        raise UserError(f"No bridge ships for {name}: only one for {DEFAULT_MODEL} does.")
    return SHIPPED / f"{name}.safetensors"


def require_bridge(name: str, cut: Cut) -> Path:
    """The same. Raises :class:`UserError` if there is none."""
    path = find_bridge(name, cut)
    if path is None:
        raise UserError(
            f"There is no bridge for {name} at cut {cut}. Train one with `aparte bridge train {name} "
            f"--cut {cut}`, or draft with something else."
        )
    return path


def bridge_path(name: str, cut: Cut) -> Path:
    """Where ``aparte bridge train`` puts the bridge of model ``name``: in the cache folder."""
    place = Path(name).expanduser()
    name = str(place.resolve()) if place.exists() else name  # the same one from every folder
    plain = "".join(char if char.isalnum() or char in "-." else "_" for char in name)
    return cache_dir() / "bridges" / f"{plain}-{cut.front}-{cut.back}.safetensors"
