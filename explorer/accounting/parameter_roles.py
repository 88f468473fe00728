"""Which part of a model a parameter belongs to, by how the model is built and what it ran."""

from __future__ import annotations

from functools import cached_property
from typing import Any

from torch import nn

from explorer.accounting.cache_probe import CacheProbe

#: The parts that parameters are counted by, in the order shown. A mixer reads earlier tokens from a
#: state instead of keys: state-space, linear attention, gated recurrence, convolution.
PARTS = (
    "embedding",
    "head",
    "attention",
    "mixer",
    "router",
    "routed experts",
    "shared expert",
    "dense mlp",
    "norms",
    "other",
)


class Parts:
    """Assigns parameters to parts.

    ``run`` is what one run of the model kept, None where it does not run. Without a run the token
    mixers are unknown, and what would be one of them or an MLP is "other".
    """

    def __init__(self, model: Any, run: CacheProbe | None) -> None:
        self.modules = dict(model.named_modules())
        self.config = model.config.get_text_config()
        self.run = run
        self.mixers = {
            owner.path: "attention" if owner.attends else "mixer"
            for owner in (run.owners if run else ())
        }
        embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
        self.embedding = getattr(embedding, "weight", None)
        self.head = [] if head is None else list(head.parameters())
        self.tied = any(one is self.embedding for one in self.head)

    def part(self, path: str, parameter: nn.Parameter) -> str:
        """Return the part that the parameter at ``path`` belongs to."""
        owner = path.rpartition(".")[0]
        if parameter is not self.embedding and any(parameter is one for one in self.head):
            return "head"
        if parameter is self.embedding or isinstance(self.modules[owner], nn.Embedding):
            return "embedding"
        above = list(_paths_above(path))
        if any(one in self.experts for one in above):
            return "routed experts"
        mixer = next((one for one in above if one in self.mixers), None)
        if mixer is not None:  # its own norms and vectors count with it
            return self.mixers[mixer]
        for host, (router, block) in self.mixtures.items():
            if router is not None and router in above:
                return "router"
            if host in above and not block:  # without a router the rest is unknown
                return "shared expert" if router is not None else "other"
        if self._only_vectors(owner):
            return "norms"
        block = self._block(path)
        if block is None or owner == block or self.run is None or not self.mixers:
            return "other"
        # An output projection may be beside the module that attends, within the same sublayer.
        beside = next(
            (one for one in self.mixers if one.startswith(above[above.index(block) + 1] + ".")),
            None,
        )
        return "dense mlp" if beside is None else self.mixers[beside]

    def classes(self, part: str) -> list[str]:
        """Return the classes of a part's token mixers, "attention" or "mixer", in block order."""
        # A module shared between blocks goes by its first path alone.
        found = (
            self.modules[path]
            for path, kind in self.mixers.items()
            if kind == part and path in self.modules
        )
        return list(dict.fromkeys(type(module).__name__ for module in found))

    def routing(self, path: str) -> tuple[int, int | None]:
        """Return the number of experts around the parameter at ``path``, and the top-k if known."""
        experts = next(one for one in _paths_above(path) if one in self.experts)
        chosen = self.run.slots.get(experts) if self.run else None
        if chosen is None:
            around = (*(self.modules[one] for one in _paths_above(experts)), self.config)
            settings = (
                getattr(one, name, None)
                for one in around
                for name in ("top_k", "num_experts_per_tok")
            )
            chosen = next((number for number in settings if isinstance(number, int)), None)
        return self.experts[experts], chosen

    @property
    def experts_missing(self) -> bool:
        """Whether no experts were found although tokens go to some, or may, without a run."""
        return not self.experts and (self.run is None or bool(self.run.slots))

    @cached_property
    def _expected(self) -> int | None:
        """The number of experts in the configuration, by transformers' name for every family."""
        number = getattr(self.config, "num_local_experts", None)
        return number if isinstance(number, int) else None

    @cached_property
    def experts(self) -> dict[str, int]:
        """The number of experts, by the path of the module that holds them."""
        stacks = {
            path: count
            for path in self.modules
            if (count := self._stacked(path) or self._listed(path))
        }
        return {path: count for path, count in stacks.items() if self._are_experts(path, count)}

    @cached_property
    def mixtures(self) -> dict[str, tuple[str | None, bool]]:
        """By path of the module with router and experts: the router, and whether it is a block."""
        found = {}
        for path, count in self.experts.items():
            host = path.rpartition(".")[0]
            found[host] = self._router(path, count), host == self._block(path)
        return found

    def _stacked(self, path: str) -> int | None:
        """Return how many matrices a module's own parameters stack; None if they are no stacks."""
        own = [one for one in self.modules[path]._parameters.values() if one is not None]
        stacks = [one for one in own if one.dim() == 3 and min(one.shape[1:]) > 1]
        counts = {one.shape[0] for one in own if one.dim() > 1}
        return counts.pop() if stacks and len(counts) == 1 else None

    def _listed(self, path: str) -> int | None:
        """Return the length of a list of modules of the same structure; None for anything else."""
        module = self.modules[path]
        if not isinstance(module, nn.ModuleList) or len(module) < 2:
            return None
        built = {
            tuple((name, tuple(one.shape)) for name, one in child.named_parameters())
            for child in module
        }
        return len(module) if len(built) == 1 and built != {()} else None

    def _are_experts(self, path: str, count: int) -> bool:
        """Return whether a stack of ``count`` matrices or modules is one of experts.

        Tokens are sent there, or a router beside it has that many outputs, or the configuration has
        that many experts. A token mixer has a matrix for each head, so there it takes both.
        """
        if self.run is not None and path in self.run.slots:
            return True
        expected, routed = self._expected == count, self._router(path, count) is not None
        return expected and routed if self._mixes(path) else expected or routed

    def _router(self, experts: str, count: int) -> str | None:
        """Return the router: of the nearest modules with an output per expert, the smallest."""
        host = experts.rpartition(".")[0]
        found = []
        for path, module in self.modules[host].named_modules():
            whole = f"{host}.{path}" if host else path
            if (
                not path
                or isinstance(module, nn.Embedding)
                or whole == experts
                or whole.startswith(f"{experts}.")
            ):
                continue
            own = (one for one in module._parameters.values() if one is not None)
            sizes = [one.numel() for one in own if one.dim() == 2 and count in one.shape]
            if sizes and not self._mixes(whole):
                found.append(
                    (path.count("."), min(sizes), whole.removesuffix(path) + path.split(".")[0])
                )
        return min(found)[2] if found else None

    def _mixes(self, path: str) -> bool:
        """Return whether a module is, is inside or contains a token mixer."""
        return any(
            one == path or one.startswith(f"{path}.") or path.startswith(f"{one}.")
            for one in self.mixers
        )

    def _only_vectors(self, path: str) -> bool:
        module = self.modules[path]
        own: list[Any] = [one for one in module._parameters.values() if one is not None]
        return not any(True for _ in module.children()) and all(one.dim() == 1 for one in own)

    def _block(self, path: str) -> str | None:
        """Return the block that a path is in: the element of the outermost list of modules."""
        above = list(_paths_above(path))
        return next(
            (
                one
                for one in above
                if isinstance(self.modules[one.rpartition(".")[0]], nn.ModuleList)
            ),
            None,
        )


def _paths_above(path: str) -> list[str]:
    """Return the modules around what is at ``path``, outermost first, without the model itself."""
    steps = path.split(".")
    return [".".join(steps[:i]) for i in range(1, len(steps))]
