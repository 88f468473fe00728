"""The sentences that people read when something cannot be had, each written here and nowhere else.

Those of loading stand in `loading_messages`.

A test names the sentence and what is named in it:

    refused("no_block", lambda: model.record(PROMPT, layers=[9]), block=9)
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest

from explorer.model.errors import AlreadyPassed, NotRecorded, OutsideTrace, PromptError, Unavailable
from explorer.vocabulary import UnknownValue
from tests.support.loading_messages import LOADING, Message

MESSAGES = {
    **LOADING,
    # -- prompts
    "no_prompt": Message(
        PromptError,
        "A prompt is a text, a list of texts or of token ids, a tensor of ids [batch seq], or "
        "what the tokenizer returns.",
    ),
    "empty_text": Message(PromptError, "The prompt is empty; write at least one word."),
    "empty_ids": Message(PromptError, "The prompt is empty; give at least one token."),
    "no_text": Message(PromptError, "The prompt holds bytes that are no text; write it in UTF-8."),
    "too_long": Message(
        PromptError, "The prompt has {count} tokens and the model takes at most {most}; shorten it."
    ),
    "no_chat_template": Message(
        PromptError, "This model's tokenizer has no chat template; give the prompt as a text."
    ),
    "template_refuses": Message(
        PromptError, "The model's chat template cannot take these messages ({reason})."
    ),
    "longer_than_made_for": Message(
        UserWarning,
        "The prompt has {count} tokens and the model was made for {most}: it runs, and what it "
        "computes beyond them may be poor.",
    ),
    "first_token_twice": Message(
        UserWarning,
        "The prompt begins with {token}, which the tokenizer adds too, so the model reads it "
        "twice; leave it out of the text.",
    ),
    "ids_out_of_range": Message(PromptError, "Token ids of this model run from 0 to {last}."),
    "sparse_ids": Message(
        PromptError, "The token ids of a prompt are a dense tensor; give ids.to_dense()."
    ),
    "meta_ids": Message(
        PromptError,
        "The prompt's token ids are on the meta device, which keeps no numbers; give them on "
        "another.",
    ),
    "mask_of_another_shape": Message(
        PromptError,
        "The attention mask has the shape of the token ids, {shape}; this one is {given}.",
    ),
    "no_mask": Message(
        PromptError, "An attention mask is 1 at tokens and 0 at padding, with a token in each row."
    ),
    "tokenizer_stops": Message(
        PromptError, "The model's tokenizer cannot read this prompt ({reason})."
    ),
    # -- what is asked of a model
    "no_value": Message(UnknownValue, "There is no value '{name}'; {hint}."),
    "no_value_names": Message(
        ValueError,
        'values is a list of value names, such as ["decays", "logits"]; {given} is not one.',
    ),
    "no_block_numbers": Message(
        ValueError, "layers is a list of block numbers (blocks 0 to {last}); {given} is not one."
    ),
    "no_blocks_asked": Message(
        ValueError, "layers is empty: name a block, or leave it out for all."
    ),
    "no_block": Message(ValueError, "There is no block {block}: {label} has blocks 0 to {last}."),
    "not_on_blocks": Message(
        Unavailable, "{name} is unavailable on the blocks asked for: {reason}."
    ),
    "padding_changes": Message(
        PromptError,
        "Padding on the {side} of a text changes what {family} computes of it (its logits by "
        "{effect}); run the texts one at a time, or texts of one length.",
    ),
    "no_edits": Message(
        ValueError, "edits is a list of edits, such as [zero_head(0, 3)]; {given} is not one."
    ),
    "no_edit": Message(
        ValueError,
        "An edit is an Edit, as zero_head(0, 3) makes one, with a function that changes its value; "
        "{given} is not one.",
    ),
    "edit_without_block": Message(
        ValueError,
        "The edit of {name} is on a block given by its number, or on None for the model; {given} "
        "is neither.",
    ),
    "edit_by_number": Message(
        ValueError, "The {what} to edit is given by its number; {given} is not one."
    ),
    "edit_needs_block": Message(Unavailable, "{name} is a value of a block: say which."),
    "edit_needs_none": Message(
        Unavailable, "{name} is a value of the whole model: edit it with layer None."
    ),
    "nothing_to_edit": Message(
        Unavailable, "{name} is None in this call, so there is nothing to edit."
    ),
    "edit_other_shape": Message(
        ValueError, "The edit of {name} returned {given} where {wanted} belongs."
    ),
    # -- in a trace
    "passed": Message(
        AlreadyPassed,
        "{expression} was asked for after the forward had passed it: it had reached {reached}."
        "{order} Ask for it first, ask in a tracer.invoke() block of its own, or use model.record, "
        "which takes any order.",
    ),
    "outside_trace": Message(
        OutsideTrace,
        "{expression} is a value of the forward pass: read it inside `with model.trace(prompt):`, "
        "or take it from `model.record(prompt, ['{name}'])`.",
    ),
    "part_of_model": Message(
        OutsideTrace,
        "{expression} is served while the whole model runs: read it inside `with "
        "model.trace(prompt):`.",
    ),
    "unavailable": Message(Unavailable, "{expression} is unavailable: {reason}."),
    "derived": Message(
        Unavailable, "{expression} is computed from other values and cannot be written."
    ),
    "constant": Message(
        Unavailable, "{expression} is a constant of the model: change its parameter or buffer."
    ),
    "written_into_derived": Message(
        Unavailable,
        "{expression} is computed from other values: what is written into it reaches nothing. "
        "Clone it first, or write what it is computed from.",
    ),
    "other_shape": Message(ValueError, "{expression} is a tensor {wanted}; it was given {given}."),
    "other_dtype": Message(ValueError, "{expression} is of {wanted}; it was given {given}."),
    "experts_out_of_range": Message(
        ValueError, "There are experts 0 to {last}; expert_indices were given {given}."
    ),
    # -- asked of a recording
    "no_recording_key": Message(
        NotRecorded,
        'A recording is asked by value name, with a block for a value of one: rec["decays", 0]. '
        "{given} is no such thing.",
    ),
    "recorded_on_blocks": Message(
        NotRecorded, "{name} is a value of a block: say which, of blocks 0 to {last}."
    ),
    "recorded_on_model": Message(
        NotRecorded, "{name} is a value of the whole model: ask for it without a block."
    ),
    "block_not_recorded": Message(
        NotRecorded, "There is no block {block}: this recording has blocks 0 to {last}."
    ),
    "other_mixer": Message(NotRecorded, "block {block} has no {host}: its mixer is {mixer}."),
    "not_asked_for": Message(NotRecorded, "{name} was not asked for when this was recorded."),
    "no_recurrence": Message(
        NotRecorded, "block {block} has no recurrence to run again: its mixer is {mixer}."
    ),
    "no_head": Message(
        ValueError, "head {head} does not exist: there are {count} heads, 0 to {last}"
    ),
    "no_token": Message(ValueError, "token {token} is outside a sequence of {count} tokens"),
    "by_number": Message(
        ValueError, "A {what} is given by its number, counted from 0; {given} is not one."
    ),
}


def sentence(message: str, /, **named: object) -> re.Pattern[str]:
    """The pattern of a sentence. What is not given in ``named`` may be anything."""
    parts: list[str | None] = re.split(r"\{(\w+)\}", MESSAGES[message].text)
    unknown = named.keys() - set(parts[1::2])
    assert not unknown, f"the sentence {message!r} names no {', '.join(sorted(unknown))}"
    for index in range(1, len(parts), 2):
        parts[index] = str(named[parts[index]]) if parts[index] in named else None
    return re.compile("".join(".*" if part is None else re.escape(part) for part in parts))


def refused(message: str, ask: Callable[[], Any], /, **named: object) -> Exception:
    """Ask, and be refused with the error and the whole sentence of that name; return the error."""
    with pytest.raises(MESSAGES[message].error) as caught:
        ask()
    said = str(caught.value)
    assert sentence(message, **named).fullmatch(said), said
    assert "\n" not in said and len(said) < 500, said
    return caught.value
