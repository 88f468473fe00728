"""Every reason why a value is not available, as people read it.

`explorer.discovery` chooses among these; no other module words one. Each is a sentence without its
full stop, of a kind of `explorer.vocabulary.availability`.
"""

from __future__ import annotations

from collections.abc import Sequence

from explorer.vocabulary.availability import (
    Unavailability,
    needs_setting,
    not_in_block,
    not_present,
    not_traced,
)

# -- any value ------------------------------------------------------------------------------

#: The reason of a value of which nothing else is known.
NOT_FOUND = not_traced("no tensor of the forward was recognised as this value")
OTHER_AXES = not_traced("a tensor was found, but its axes are not those of the value")
SHARED_MODULE = not_traced("a module that other blocks share takes or returns it")
SOURCE_NOT_FOUND = not_traced("what it is computed from was not found")
NOT_RETURNED = not_traced("no call returns it")
NOT_PASSED = not_traced("no call takes or returns it")

# -- the model and its blocks -----------------------------------------------------------------

NO_FINAL_NORM = not_present("this model has no norm between the last block and the head")
NO_MLP = not_in_block("this block has no MLP")
NO_DENSE_BRANCH = not_in_block("this block has no dense MLP beside a mixture of experts")
NO_SHARED_HOST = not_in_block("this block's MLP has no shared expert")
NO_OTHER_SUBLAYER = not_in_block("this block has no sublayer besides its mixer and its MLP")
NO_MIXER = not_in_block("this block has no mixer: nothing in it reads another position")
OTHER_SUBLAYER = not_traced("another sublayer of this block may be its MLP, and is not traced")
INSIDE_MIXER = not_traced("the inside of this block's mixer is not traced")
ONE_SUBLAYER = not_present("this block has one sublayer")
ADDS_ONCE = not_present("this block adds to its residual stream once")
PARALLEL = not_present("this block is parallel: its sublayers read the same stream")
NO_ONE_POINT = not_traced("a sublayer of this block does not read the residual stream at one point")
MID_NOT_RETURNED = not_traced("no call returns the residual stream between the sublayers")
MLP_INPUT_NOT_PASSED = not_traced("no call takes or returns what the MLP reads")


def other_mixer(mixers: Sequence[str], meanings: Sequence[str]) -> Unavailability:
    """The block's mixers, host names with their meanings, are others than the value's."""
    return not_in_block(f"this block's mixer is {' and '.join(mixers)}: {' and '.join(meanings)}")


def feeds_sublayer(module: str, host: str) -> Unavailability:
    """The output of ``module``, a mixer with more around it, enters the sublayer ``host``."""
    return not_traced(
        f"it may be inside {module}, whose output enters {host} and is not itself added to the "
        "residual stream; the inside is not traced"
    )


def no_norm_before(host: str) -> Unavailability:
    return not_present(f"this block has no norm before {host}")


def norm_then_scaled(host: str) -> Unavailability:
    return not_traced(f"{host} reads the output of the norm before it multiplied with a number")


# -- attention --------------------------------------------------------------------------------

HEADS_NOT_RETURNED = not_traced("no call returns the heads' outputs")
HEADS_NOT_FOUND = not_traced("the heads' outputs were not found")
NO_AXIS_OF_HEADS = not_traced("no call takes or returns it with an axis of heads")
ATTENTION_OUTPUT_NOT_COMPUTED = not_traced("no module computes the attention's output")
SCORES_NOT_PASSED = not_traced("the modeling code passes this tensor to no call")
NO_SINKS = not_present("this attention has no sink logits")
SINKS_NOT_RETURNED = not_traced(
    "its softmax has a column for a sink, and no call returns the sink logits"
)
SCALING_SINKS_NOT_RETURNED = not_traced(
    "its sink logits scale the heads' outputs after the softmax, and no call returns them"
)
NO_HEAD_GATE = not_present("this attention does not gate its heads")
HEAD_GATE_NOT_RETURNED = not_traced("no call in the attention's forward returns the gate")


def no_probabilities(attention: str) -> Unavailability:
    """``attention``: the name of the implementation, such as "sdpa"."""
    return needs_setting(
        f"the {attention} attention does not compute its probabilities as a tensor; "
        'load the model with attn_implementation="eager"'
    )


def sinks_in_kernel(attention: str) -> Unavailability:
    """``attention``: as for `no_probabilities`."""
    return needs_setting(
        f"the {attention} attention takes the sink logits into its kernel; "
        'load the model with attn_implementation="eager"'
    )


def several_attentions(module: str, what: str) -> Unavailability:
    return not_traced(f"{module} computes its attention in several {what}")


def gates_each(what: str) -> Unavailability:
    """``what``: "head" or "channel"."""
    return not_present(f"this attention has a gate for each {what}")


# -- recurrence and convolution ---------------------------------------------------------------

NO_SKIP = not_present("this mixer has no skip connection around its state")
NO_KERNEL_GATE = not_present("this mixer's kernel has no gate")
NO_CONVOLUTION = not_present("this mixer has no short convolution")
NO_CONVOLUTION_GATE = not_present("this mixer does not gate its convolution")
GATE_NOT_RETURNED = not_traced("no call in the mixer's forward returns the gate")
CONVOLUTION_INPUT_NOT_RETURNED = not_traced(
    "no call in the mixer's forward returns the convolution's input"
)
CONVOLUTION_OUTPUT_NOT_RETURNED = not_traced(
    "no call in the mixer's forward returns the convolution's output"
)
CONVOLUTION_IN_PARTS = not_traced("its short convolution does not run as one operation")
CONVOLUTION_OF_OTHER_CHANNELS = not_traced(
    "its convolution runs over other channels than its values have"
)

# -- the MLP and the mixture ------------------------------------------------------------------

NOT_ROUTED = not_present("this MLP is dense: it has no router")
NOT_DENSE = not_present("this MLP is a mixture of experts: every expert has neurons of its own")
DENSE_BESIDE = not_present(
    "this MLP is a mixture of experts, each with neurons of its own; "
    "those of the dense MLP beside it are under dense_mlp"
)
MLP_OUTPUT_NOT_COMPUTED = not_traced("no module computes the MLP's output")
ACTIVATION_NOT_RETURNED = not_traced("no call returns the activation")
NO_TOP_K = not_traced("no top-k produces the expert indices")
ROUTER_SCORES_NOT_PASSED = not_traced("no call takes or returns the scores")
ROUTER_LOGITS_NOT_RETURNED = not_traced("no call returns the result of the router's projection")
NONE_REJECTED = not_present("every expert is chosen, so none is rejected")
SCORED_BY_HALVES = not_present(
    "this router scores the two halves of every expert's key separately, "
    "so that no tensor holds a score for each expert"
)
EXPERTS_ADD_AT_ONCE = needs_setting(
    "this experts implementation adds each expert's output to the sum at once; "
    'load the model with experts_implementation="grouped_mm" or "batched_mm"'
)
EXPERTS_ONE_BY_ONE = not_traced(
    "this mixture runs its experts one after another and adds each output to the sum at once, "
    "so that no tensor holds the outputs by slot"
)
SORTED_BY_EXPERT = not_traced(
    "this mixture runs its tokens sorted by expert, so that no tensor holds the outputs by slot"
)
SUMMED_AT_ONCE = not_present("this mixture computes the sum over its experts in one product")
NO_SHARED_EXPERT = not_present("this mixture has no shared expert")
DENSE_NOT_SHARED = not_present(
    "this mixture has no shared expert; "
    "the dense MLP beside it reads something else, and is under dense_mlp"
)
DENSE_ADDS_IT = not_present("what is added to the routed output is dense_mlp.mlp_output")
SHARED_IN_MLP = not_present(
    "this block's shared expert is a part of its MLP without a module; it is under dense_mlp"
)
SHARED_EXPERT_NOT_RETURNED = not_traced("no call returns what the shared expert adds")
ADDED_BESIDE_EXPERTS = not_traced("something is added after the experts, but not to their sum")


def selects_modules(module: str, operation: str) -> Unavailability:
    """``operation``: how the module selects what it runs."""
    return not_traced(
        f"{module} selects what it runs (by {operation}), "
        "and no module inside takes expert indices and weights"
    )
