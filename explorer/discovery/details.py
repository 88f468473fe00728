"""What discovery records about a host besides where its values are: data only, no detection.

Paths of modules, parameters and buffers count from the root of the model while a block is being
searched, and from the block in a finished `HostAnatomy` (see `HostDetails.relative_to`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from explorer.discovery.trace_graph import TraceGraph


@dataclass(frozen=True)
class Step:
    """One operation on the residual stream, or on a sublayer's result before it is added.

    kind: ``"add"`` (of an addend), ``"scale"`` or ``"shift"`` (times or plus ``by``: a number, or
    the path of a parameter or buffer from the block), ``"norm"`` (by the module at path ``by``).
    ops: indices of the operations in the trace. made: the id of the tensor they make. key: of an
    add, the id of the tensor that is added.
    """

    kind: str
    ops: tuple[int, ...]
    made: int
    key: int = 0
    by: float | str = ""


@dataclass(frozen=True)
class OutputSteps:
    """What happens to a sublayer's result before the block adds it, in order.

    complete: whether nothing else happens to it.
    """

    steps: tuple[Step, ...] = ()
    complete: bool = True

    @property
    def norms(self) -> tuple[str, ...]:
        """Paths of the norms, from the block."""
        return tuple(str(step.by) for step in self.steps if step.kind == "norm")

    @property
    def has_scale(self) -> bool:
        return any(step.kind == "scale" for step in self.steps)

    @property
    def has_shift(self) -> bool:
        return any(step.kind == "shift" for step in self.steps)


@dataclass(frozen=True)
class RouterScoring:
    """How a router's logits become the weights of the chosen experts, read off the trace.

    function: ``"softmax"``, ``"sigmoid"`` or ``"none"``, applied to the logits before the top-k.
    bias: path of a tensor [num_experts] that is added for the selection only, or "".
    masked: whether groups of experts are masked out before the top-k.
    after: ``"softmax"``, ``"sigmoid"`` or ``"none"``, applied to the chosen scores.
    renormalised: whether the chosen weights are divided by their sum.
    factor: what the weights are multiplied with last: a number, or the path of a parameter
        [num_experts]; None where it is something else.
    choice_only: whether the scores decide the selection and enter no weight.
    repeated: whether the slots are chosen one after another, each the largest score left.
    """

    function: str
    bias: str = ""
    masked: bool = False
    after: str = "none"
    renormalised: bool = False
    factor: float | str | None = 1.0
    choice_only: bool = False
    repeated: bool = False

    @property
    def words(self) -> str:
        """The scoring in words, for a table."""
        parts = [
            self.function
            if self.function != "none"
            else f"{self.after} of the chosen"
            if self.after != "none"
            else "as projected"
        ]
        parts += ["plus a selection bias"] if self.bias else []
        parts += ["within the best groups"] if self.masked else []
        parts += ["one after another"] if self.repeated else []
        return ", ".join(parts)


@dataclass(frozen=True)
class AttentionOperations:
    """One softmax attention as operations of a trace, by their indices in ``TraceGraph.ops``.

    softmax: the softmax over the keys. score_product: the product of queries and keys.
    value_product: the first product of the attention probabilities with the values. between: the
    operations that make the softmax's input of products (scale, mask, bias, cap, layout), in order.

    The indices are valid for the graph they were found in, and for the call of the block they
    were found in.
    """

    softmax: int
    score_product: int
    value_product: int
    between: tuple[int, ...] = ()

    def queries(self, graph: TraceGraph) -> int:
        """The id of the tensor of queries that the score product reads."""
        return graph.ops[self.score_product].reads[-2]

    def keys(self, graph: TraceGraph) -> int:
        """The id of the tensor of keys that the score product reads."""
        return graph.ops[self.score_product].reads[-1]

    def probabilities(self, graph: TraceGraph) -> int:
        """The id of the tensor that the softmax makes."""
        return graph.ops[self.softmax].makes[0]


@dataclass(frozen=True)
class HostDetails:
    """What discovery knows about one host of a block, beside the places of its values.

    Every host:
        own_widths: last axis of the values that are not as wide as the residual stream, by name.
        output_steps: what happens to the host's result before the block adds it.
        convolved_output: whether a convolution follows the host's last product with weights.

    ``layers`` (the block itself):
        returns: how many things the block returns in a tuple; None where it returns a tensor.

    Attention and recurrent mixers:
        modules_before, modules_after: names of the child modules that are called before and after
            the attention function or the recurrence.
        output_projection: path of the module that makes the mixer's output, or "".

    Softmax attention:
        score_cap: the number c of ``c * tanh(scores / c)``; None without a cap.
        position_bias: whether a bias that differs between heads is added to the scores.
        summed_scores: whether the scores are a sum of products, or have a bias made from the text.
        scaling_sinks: whether the sinks scale the heads' outputs in place of joining the softmax.
        output_norms: paths of the norms between the heads' outputs and the output projection.
        attention: the attention's operations in the trace; None where none was found, as under an
            implementation that runs as one kernel, or where there are several.

    Dense MLP (and a shared expert):
        normed_neurons: whether a norm makes the neurons.
        down_parameter: path of the MLP's own parameter that is its down projection; "" where the
            down projection is a module.

    Mixture of experts:
        router: path of the module that makes the selection, "" where that is the MLP itself.
        experts: path of the module that holds all experts, or "".
        expert_tables: paths of the two embeddings with a row per expert and of the activation.
        expert_stacks: the same for two modules with a matrix per expert.
        shared: path of the shared expert's module, or "".
        shared_gated: whether the shared expert's output is multiplied before it is added.
        routed_projection: path of the module that brings the experts' sum back to the stream's
            width, where they work on another; else "".
        routed_steps: norms and factors between the routed output and what is added to it.
        runs_all_experts: whether every expert runs on every token, weighted before it runs.
        null_experts: whether more indices can be chosen than there are experts.
        scoring: how logits become weights.

    Recurrent mixers:
        kernel: name of the function that runs the recurrence, or "".
        constants: by value name, the path of the parameter or buffer it is read from, and a sign.
    """

    own_widths: Mapping[str, int] = field(default_factory=dict)
    output_steps: OutputSteps = OutputSteps()
    convolved_output: bool = False
    returns: int | None = None
    modules_before: tuple[str, ...] = ()
    modules_after: tuple[str, ...] = ()
    output_projection: str = ""
    score_cap: float | None = None
    position_bias: bool = False
    summed_scores: bool = False
    scaling_sinks: bool = False
    output_norms: tuple[str, ...] = ()
    attention: AttentionOperations | None = None
    normed_neurons: bool = False
    down_parameter: str = ""
    router: str = ""
    experts: str = ""
    expert_tables: tuple[str, ...] = ()
    expert_stacks: tuple[str, ...] = ()
    shared: str = ""
    shared_gated: bool = False
    routed_projection: str = ""
    routed_steps: tuple[Step, ...] = ()
    runs_all_experts: bool = False
    null_experts: bool = False
    scoring: RouterScoring | None = None
    kernel: str = ""
    constants: Mapping[str, tuple[str, float]] = field(default_factory=dict)

    def relative_to(self, block: str) -> HostDetails:
        """Return the details with every path counted from the block at ``block``."""

        def relative(path: str) -> str:
            return path.removeprefix(block).lstrip(".")

        scoring = self.scoring
        if scoring is not None:
            factor = scoring.factor
            scoring = replace(
                scoring,
                bias=relative(scoring.bias),
                factor=relative(factor) if isinstance(factor, str) else factor,
            )
        return replace(
            self,
            output_projection=relative(self.output_projection),
            output_norms=tuple(map(relative, self.output_norms)),
            down_parameter=relative(self.down_parameter),
            router=relative(self.router),
            experts=relative(self.experts),
            expert_tables=tuple(map(relative, self.expert_tables)),
            expert_stacks=tuple(map(relative, self.expert_stacks)),
            shared=relative(self.shared),
            routed_projection=relative(self.routed_projection),
            routed_steps=tuple(
                replace(step, by=relative(step.by)) if isinstance(step.by, str) else step
                for step in self.routed_steps
            ),
            scoring=scoring,
            constants={
                name: (relative(path), sign) for name, (path, sign) in self.constants.items()
            },
        )
