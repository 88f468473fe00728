"""Turn what was found on a block into its anatomy: hook points, sizes and reasons, by host."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from explorer.discovery.anatomy import BlockAnatomy, HostAnatomy, why_without
from explorer.discovery.candidates import HostFindings, TensorCandidate
from explorer.discovery.details import HostDetails
from explorer.discovery.hook_point import HookPoint
from explorer.discovery.sublayer import BlockFindings
from explorer.vocabulary import BY_HOST, HOSTS, MIXERS, Value, reasons


def block_anatomy(
    layers: tuple[int, ...],
    prompt: BlockFindings,
    step: BlockFindings | None,
    sizes: Mapping[str, int],
    shared: set[str],
) -> BlockAnatomy:
    """Return the anatomy of the blocks ``layers``, which equal the one that was searched.

    prompt, step: what was found in a prompt and in a decoding step; None where that runs no other
    code. sizes: lengths of the axes batch, seq (of the prompt) and step. shared: paths of modules
    that occur in the model more than once.
    """
    hosts = {}
    for name, findings in prompt.hosts.items():
        in_step = step.hosts.get(name) if step is not None else None
        _leave_shared_modules(findings, shared)
        if in_step is not None:
            _leave_shared_modules(in_step, shared)
        hosts[name] = _Host(name, prompt, findings, in_step, sizes).anatomy()
    order = _order(prompt, hosts)
    step_order = _order(step, hosts) if step is not None else ()
    mlp = prompt.hosts.get("mlp")
    for name in HOSTS:
        if name == "model" or name in hosts:
            continue
        reason = why_without(name, prompt.hosts, prompt.feeding)
        if name == "shared_experts" and mlp and "shared_expert_output" in mlp.candidates:
            reason = reasons.SHARED_IN_MLP
        missing = dict.fromkeys(BY_HOST[name], reason)
        hosts[name] = HostAnatomy(name, "", {}, {}, missing, HostDetails())
    return BlockAnatomy(
        layers,
        hosts,
        tuple(prompt.sublayers),
        order,
        tuple(prompt.steps),
        prompt.mid_step,
        step_order,
    )


def _leave_shared_modules(findings: HostFindings, shared: set[str]) -> None:
    """Move candidates out of modules that other blocks share, or drop them.

    A value at the boundary of a shared module is read at the block's own call of that module;
    inside the module, blocks cannot be distinguished.
    """

    def is_shared(path: str) -> bool:
        return any(path == other or path.startswith(f"{other}.") for other in shared)

    for name, candidate in list(findings.candidates.items()):
        call = candidate.call
        if not is_shared(call.module):
            continue
        if call.made_in is not None and not call.labels and not is_shared(call.made_in[0]):
            module, labels = call.made_in
            own_call = replace(call, module=module, labels=labels)
            findings.candidates[name] = replace(candidate, call=own_call)
        else:
            findings.missing[name] = reasons.SHARED_MODULE
            del findings.candidates[name]


def _order(
    findings: BlockFindings, hosts: Mapping[str, HostAnatomy]
) -> tuple[tuple[str, str], ...]:
    """Return host and name of every value with a hook point, in the order they pass."""
    passed = [
        (candidate.time, list(BY_HOST[host]).index(name), host, name)
        for host, found in findings.hosts.items()
        for name, candidate in found.candidates.items()
        if host in hosts and name in hosts[host].hook_points
    ]
    return tuple((host, name) for _, _, host, name in sorted(passed))


class _Host:
    """The anatomy of one host in the making."""

    def __init__(
        self,
        name: str,
        block: BlockFindings,
        findings: HostFindings,
        in_step: HostFindings | None,
        sizes: Mapping[str, int],
    ) -> None:
        self.name, self.block, self.findings, self.in_step = name, block, findings, in_step
        self.call_sizes = sizes
        self.sizes = {**sizes, **findings.sizes}
        self.hook_points: dict[str, tuple[HookPoint, ...]] = {}
        self.missing = dict(findings.missing)
        self.own_widths: dict[str, int] = {}
        self.prompt_only: set[str] = set()

    def anatomy(self) -> HostAnatomy:
        """Return the anatomy of the host, with paths counted from the block."""
        values = BY_HOST[self.name].values()
        for value in values:
            if not value.derived:
                self._add(value)
        details = self.findings.details.relative_to(self.block.path)
        replayed = set(MIXERS[self.name].replayed) if self.name in MIXERS else set()
        for value in values:
            if value.derived and value.source not in self.hook_points:
                self.missing[value.name] = (
                    self.missing.get(value.source or "") or reasons.SOURCE_NOT_FOUND
                )
            elif value.fixed and value.name not in details.constants:
                self.missing[value.name] = reasons.NOT_FOUND
            elif value.derived and self.prompt_only & replayed:
                self.prompt_only.add(value.name)
        lengths = ("query", "key")
        return HostAnatomy(
            self.name,
            _relative_path(self.findings.module, self.block.path),
            {axis: size for axis, size in self.findings.sizes.items() if axis not in lengths},
            self.hook_points,
            self.missing,
            replace(details, own_widths=self.own_widths),
            frozenset(self.prompt_only),
        )

    def _add(self, value: Value) -> None:
        """Add a value's hook points, of the prompt and of a decoding step, or why it has none."""
        candidate = self.findings.candidates.get(value.name)
        if candidate is None:
            self.missing.setdefault(value.name, reasons.NOT_FOUND)
            return
        sizes = self.sizes
        place = candidate.hook_point(value.axes, sizes)
        if place is None and (width := _own_width(value, candidate)) is not None:
            sizes = {**sizes, "hidden_size": width}
            place = candidate.hook_point(value.axes, sizes)
            self.own_widths[value.name] = width
        if place is None:
            self.missing.setdefault(value.name, reasons.OTHER_AXES)
            return
        found = [place]
        if self.in_step is not None:
            in_step = self._in_step(value, place, self.in_step, sizes.get("hidden_size", 0))
            if in_step is None:
                self.prompt_only.add(value.name)
            else:
                found.append(in_step)
        unique: dict[tuple, HookPoint] = {}
        for one in found:
            # At an equal place the prompt's comes first: its axes are longer than one.
            module = _relative_path(one.module, self.block.path)
            unique.setdefault((one.call_site, one.element), replace(one, module=module))
        self.hook_points[value.name] = tuple(unique.values())

    def _in_step(
        self, value: Value, in_prompt: HookPoint, findings: HostFindings, hidden_size: int
    ) -> HookPoint | None:
        """Return a value's hook point in a decoding step."""
        candidate = findings.candidates.get(value.name)
        if candidate is None:
            return None
        by_key = value.layout in ("Keys", "Values")
        seq = findings.sizes.get("key", 0) if by_key else self.call_sizes["step"]
        sizes = {**self.sizes, **findings.sizes, "hidden_size": hidden_size, "seq": seq}
        place = candidate.hook_point(value.axes, sizes)
        if place is None or place.call_site == in_prompt.call_site:
            return place
        # A prompt makes this call too, with another value.
        return None if place.call_site[:2] in self.block.visited else place


def _own_width(value: Value, candidate: TensorCandidate) -> int | None:
    """Return the last axis of a value that need not be as wide as the residual stream."""
    if not value.own_width or candidate.optional_tensor is None or candidate.tensor.dim() < 2:
        return None
    return candidate.tensor.shape[-1]


def _relative_path(path: str, block: str) -> str:
    """Return a path counted from the block, so that one finding serves every equal block."""
    return path.removeprefix(block).lstrip(".")
