"""Giving the engine's envoys their classes, their standard names and their values."""

# Aliases are the engine's.
# pyright: reportPrivateUsage=false

from __future__ import annotations

from typing import Any

import torch

from explorer import vocabulary
from explorer.discovery.anatomy import Anatomy, HostAnatomy
from explorer.engine.nnsight_api import Envoy
from explorer.model.envoys import HOST_CLASSES, MODULELESS_CLASSES, BlocksEnvoy, HostEnvoy
from explorer.model.host_values import HostValues


def envoy_classes(module: torch.nn.Module, anatomy: Anatomy) -> dict[type | str, type]:
    """Return the envoy class of each host.

    The keys are the classes of their modules, or paths where one class has several hosts' values.
    """
    path = anatomy.backbone.blocks
    blocks: Any = module.get_submodule(path)
    paths: dict[type[Any], dict[str, list[str]]] = {}
    for block in anatomy.blocks:
        for host in block.hosts.values():
            if host.hook_points and not host.inline:
                native: type[Any] = blocks[block.layers[0]].get_submodule(host.module).__class__
                of_host = paths.setdefault(native, {}).setdefault(host.name, [])
                of_host += [f"{path}.{layer}.{host.module}".rstrip(".") for layer in block.layers]
    classes: dict[type | str, type] = {path: BlocksEnvoy}
    for native, hosts in paths.items():
        for name, of_host in hosts.items():
            keys = [native] if len(hosts) == 1 else of_host
            classes |= dict.fromkeys(keys, HOST_CLASSES[name])
    return classes


def bind_host(block: Any, host: HostAnatomy, values: HostValues) -> None:
    """Give a block's host its values, and it and the modules below it their standard names."""
    attribute = vocabulary.HOSTS[host.name].attribute
    if host.inline:
        part = MODULELESS_CLASSES[host.name](block.path, values)
        if (taken := block.__dict__.get(attribute)) is not None and isinstance(taken, Envoy):
            object.__setattr__(block, f"E_{attribute}", taken)  # a module that is no such host
        object.__setattr__(block, attribute, part)
    else:
        object.__setattr__(envoy_at(block, host.module), "_host_values", values)
        if host.module and host.name != "shared_experts":
            add_alias(block, attribute, envoy_at(block, host.module), host.module)
    details = host.details
    for path, alias in (
        (details.router, "router"),
        (details.experts, "experts"),
        (details.shared, "shared_experts"),
    ):
        if not path:
            continue
        if host.module:
            owner = envoy_at(block, host.module)
            path = path.removeprefix(host.module).lstrip(".")
            add_alias(owner, alias, envoy_at(owner, path), path)
        else:
            add_alias(block.mlp, alias, envoy_at(block if host.inline else block.mlp, path), path)


def envoy_at(envoy: Any, path: str) -> Any:
    """Return the envoy of a module below another.

    The engine, or `add_alias`, may have mounted it under another name than its own.
    """
    for part in path.split(".") if path else ():
        if part.isdigit():
            envoy = envoy[int(part)]
        else:
            mounted = f"E_{part}"
            envoy = envoy.__dict__[mounted if mounted in envoy.__dict__ else part]
    return envoy


def add_alias(envoy: Any, alias: str, target: Envoy, path: str) -> None:
    """Give ``target``, at ``path``, its standard name on ``envoy``, on this block alone.

    Another module that has this name is mounted as the engine mounts those whose own names it
    needs: ``E_lm_head``.
    """
    if envoy.__dict__.get(alias) is target:
        return
    if alias in envoy.__dict__:
        object.__setattr__(envoy, f"E_{alias}", envoy.__dict__[alias])
    object.__setattr__(envoy, alias, target)
    if isinstance(envoy, HostEnvoy):
        envoy._aliases[alias] = path
