"""Where a specimen's numbers come from: a seed, or the committed weights file."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import nn

from explorer.specimens.errors import SpecimenError

#: Step sizes of the recurrences start between these, so that some heads forget
#: within a few tokens and others remember for hundreds.
STEP_RANGE = (0.01, 0.3)
DECAY_RATE_RANGE = (0.3, 1.5)
CONV_STD = 0.5


def fill(model: nn.Module, seed: int, std: float, norm_std: float) -> None:
    """Draws every parameter from ``seed``, in place; the process's own random state is not touched.

    Matrices are normal with deviation ``std``, routers and gates included, so that no router is
    flat. Norm weights keep the value the class starts them at (1, or 0 where it multiplies by
    1 + weight) plus noise of deviation ``norm_std``, so that the two conventions can be told apart;
    so do other numbers of one value throughout, among them the buffers that a checkpoint stores
    (a selection bias, a block's scale), which would go unseen at 0 or 1. Vectors that the class
    draws (sinks, a router's bias) are drawn as the class draws them, plus the same noise.
    """
    if empty := [name for name, parameter in model.named_parameters() if not parameter.numel()]:
        raise SpecimenError(f"A specimen has a number in each parameter; {empty[0]} is empty.")
    _draw_vectors_again(model, seed)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(_draw(name, parameter, generator, std, norm_std))
        stored = model.state_dict().keys()
        for name, buffer in model.named_buffers():
            if name in stored and buffer.is_floating_point() and buffer.dim() and _constant(buffer):
                buffer.add_(norm_std * torch.randn(buffer.shape, generator=generator))


def _draw_vectors_again(model: Any, seed: int) -> None:
    """Draw the class's random vectors again from ``seed``: nothing fixed them when it was built."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        for module in model.modules():
            if any(p.dim() == 1 and not _constant(p) for p in module.parameters(recurse=False)):
                model._init_weights(module)


def _draw(
    name: str, parameter: torch.Tensor, generator: torch.Generator, std: float, norm_std: float
) -> torch.Tensor:
    shape, leaf = parameter.shape, name.rsplit(".", 1)[-1]
    if leaf == "A_log":
        return _uniform(shape, generator, *DECAY_RATE_RANGE).log()
    if leaf == "dt_bias":
        low, high = map(math.log, STEP_RANGE)
        step = _uniform(shape, generator, low, high).exp()
        return step + torch.log(-torch.expm1(-step))  # the inverse of softplus
    noise = torch.randn(shape, generator=generator)
    if parameter.dim() == 1 or (_constant(parameter) and bool(parameter.any())):
        return parameter + norm_std * noise
    short = "conv1d" in name or (parameter.dim() == 3 and shape[1] == 1)  # one filter per channel
    return noise * (CONV_STD if short else std)


def _constant(tensor: torch.Tensor) -> bool:
    """Whether all numbers of a tensor are equal."""
    return bool((tensor == tensor.flatten()[0]).all())


def _uniform(
    shape: torch.Size, generator: torch.Generator, low: float, high: float
) -> torch.Tensor:
    return low + (high - low) * torch.rand(shape, generator=generator)


def save(model: nn.Module, path: Path) -> None:
    """Write the parameters, rounded to bfloat16, as safetensors."""
    tensors = {
        name: p.detach().to(torch.bfloat16).contiguous() for name, p in model.named_parameters()
    }
    save_file(tensors, str(path), metadata={"format": "pt"})


def load(model: nn.Module, path: Path) -> None:
    """Fill every parameter from a safetensors file, in place, in the parameter's own dtype.

    Raises SpecimenError with one sentence where the file is missing, damaged or of another model.
    """
    stored = _read(path)
    wanted = dict(model.named_parameters())
    if stored.keys() != wanted.keys():
        odd = sorted(stored.keys() ^ wanted.keys())
        raise SpecimenError(
            f"The weights file {path.name} is of another model: {odd[0]} is on one side only."
        )
    with torch.no_grad():
        for name, parameter in wanted.items():
            if stored[name].shape != parameter.shape:
                raise SpecimenError(
                    f"The weights file {path.name} is of another model: {name} is "
                    f"{list(stored[name].shape)}, the configuration asks for "
                    f"{list(parameter.shape)}."
                )
            parameter.copy_(stored[name])


def _read(path: Path) -> dict[str, torch.Tensor]:
    if not path.is_file():
        raise SpecimenError(
            f"The weights file {path.name} is missing; train it with python -m "
            f"explorer.specimens.training {path.stem}."
        )
    try:
        return load_file(str(path))
    except (SafetensorError, OSError) as error:
        raise SpecimenError(
            f"The weights file {path.name} is damaged or cut short and cannot be read ({error})."
        ) from error
