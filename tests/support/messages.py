"""The sentences that people read when something cannot be had, each written here and nowhere else.

A test names the sentence and what is named in it:

    refused("no_block", lambda: model.record(PROMPT, layers=[9]), block=9)
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest

from explorer.checkpoints.cards import UnknownCheckpoint
from explorer.checkpoints.load import NotTraceable
from explorer.errors import LoadError
from explorer.model.errors import AlreadyPassed, NotRecorded, OutsideTrace, PromptError, Unavailable
from explorer.specimens.errors import UnknownFamily
from explorer.vocabulary import UnknownValue


class Message(NamedTuple):
    """The class of an error and its sentence; what stands in braces differs from case to case."""

    error: type[Exception]
    text: str


MESSAGES = {
    # -- loading
    "nothing_named": Message(
        LoadError,
        "Say what to load: 'specimen:<family>', the id of a checkpoint, a checkpoint folder or a "
        ".gguf file.",
    ),
    "no_such_family": Message(
        UnknownFamily, "There is no specimen of the family '{family}'; {hint}"
    ),
    "bare_family": Message(
        LoadError,
        "'{family}' is a family: load its small model as 'specimen:{family}' or a checkpoint such "
        "as '{checkpoint}' with weights=False.",
    ),
    "no_such_card": Message(UnknownCheckpoint, "No checkpoint card is called '{name}': {hint}"),
    "no_such_user": Message(
        LoadError,
        "There is no user '{user}' on this machine, whose folder {path} names; write the path out.",
    ),
    "name_too_long": Message(
        LoadError,
        "What to load has {count} characters, more than an id or a path that is there: it begins "
        "'{start}'.",
    ),
    "no_such_path": Message(
        LoadError, "There is nothing at {path}; give a checkpoint folder or a .gguf file."
    ),
    "no_such_file": Message(LoadError, "There is no file {path}; give the path of a .gguf file."),
    "no_such_dtype": Message(
        LoadError, "{dtype} is not a dtype; give one of torch's, such as torch.bfloat16."
    ),
    "not_on_hub": Message(LoadError, "The hub has no checkpoint '{name}'{hint}"),
    "hub_away": Message(
        LoadError, "There is no checkpoint '{name}' here and the hub cannot be reached{hint}"
    ),
    "weights_away": Message(
        LoadError,
        "The weights of {name} are not here and the hub cannot be reached; load it with "
        "weights=False for its shapes, or give the folder they are in.",
    ),
    "gated": Message(
        LoadError,
        "{name} is given out by its owners on request: ask for it there and log in to the hub.",
    ),
    "no_config": Message(
        LoadError, "{path} has no config.json; give the folder of a transformers checkpoint."
    ),
    "no_such_attention": Message(
        LoadError,
        "specimen:{family} cannot be loaded ({class} does not support an attention implementation "
        "through torch.nn.functional.scaled_dot_product_attention yet).",
    ),
    "unreadable": Message(LoadError, "{path} cannot be loaded ({reason})."),
    "no_language_model": Message(
        LoadError, "{path} is a {model_type}, of which transformers has no causal language model."
    ),
    "sizes_differ": Message(
        LoadError,
        "The weights in {path} do not have the sizes its configuration says; fetch both again.",
    ),
    "weights_lacking": Message(
        LoadError,
        "{path} lacks the weights {name} and {count} more, which its configuration calls for; "
        "fetch it again.",
    ),
    "damaged_weights": Message(
        LoadError, "{path} is truncated or damaged ({reason}); fetch it again."
    ),
    "pickles": Message(
        LoadError,
        "{path} holds its weights as pickles ({names}), which can run code when read; convert "
        "them to safetensors.",
    ),
    "pickle": Message(
        LoadError,
        "{path} is a pickle, which can run code when read; convert it to safetensors and give its "
        "folder.",
    ),
    "other_forms": Message(
        LoadError,
        "{path} holds weights in a form that is not read here ({names}); convert them to "
        "safetensors.",
    ),
    "other_form": Message(
        LoadError,
        "{path} is {kind}, which is not read here; convert it to safetensors and give its folder.",
    ),
    "gguf_inside": Message(
        LoadError, "{path} holds its weights in {name}; give the path of that file."
    ),
    "no_weights": Message(
        LoadError, "{path} has no weights; add its .safetensors files or load with weights=False."
    ),
    "too_many_blocks": Message(
        LoadError,
        "{path} holds weights of {blocks}, and its configuration has {own}; fetch both again.",
    ),
    "single_file": Message(
        LoadError,
        "{path} is a single file; give the checkpoint folder it is in, with its config.json.",
    ),
    "no_index": Message(LoadError, "{path} is not an index of weights; fetch it again."),
    "shard_missing": Message(
        LoadError, "{path} lacks {names}, which its index names; fetch what is missing."
    ),
    "no_tokenizer": Message(
        LoadError, "{path} has no tokenizer that transformers can read; add its tokenizer.json."
    ),
    "empty_tokenizer": Message(LoadError, "{path} has no tokenizer; add its tokenizer.json."),
    "own_code": Message(
        LoadError,
        "{path} brings modeling code of its own; read it, then load with trust_remote_code=True.",
    ),
    "not_gguf": Message(LoadError, "{path} is not a GGUF file; fetch it again."),
    "damaged_gguf": Message(
        LoadError,
        "{path} cannot be read ({reason}); if it is truncated or damaged, fetch it again.",
    ),
    "not_traceable": Message(
        NotTraceable,
        "{label} is of the class {model_class}, whose forward does not go the way the standard "
        "values are found ({reason}).",
    ),
    "not_true_or_false": Message(LoadError, "{name} is True or False, not {given}."),
    "no_implementation": Message(
        LoadError, "{name} is the name of an implementation, not {given}."
    ),
    "no_number": Message(
        LoadError, "{path} says {name} is {value}, which is no number; fetch it again."
    ),
    "size_of_nothing": Message(
        LoadError, "{path} says {name} is {value}, which no model has; fetch it again."
    ),
    "not_pickled": Message(
        TypeError,
        "A loaded model cannot be pickled: keep what it was loaded from, its weights "
        "(model.hf.state_dict()) and its recordings, which can.",
    ),
    "quantised": Message(
        LoadError,
        "{path} is quantised by {method}, which is not read here; give a checkpoint that is not "
        "quantised, or a GGUF file of it.",
    ),
    "blocks_not_whole": Message(
        LoadError,
        "{path} has {name} in blocks of {block} that are not all whole, which transformers reads "
        "wrongly; give a checkpoint that is not quantised, or a GGUF file of it.",
    ),
    "adapter_alone": Message(
        LoadError,
        "{path} is an adapter of {base}; put adapter_config.json and adapter_model.safetensors "
        "into that model's folder and give that folder.",
    ),
    "adapter_of_another_kind": Message(
        LoadError,
        "The adapter in {path} says {name} = {value}, which is not read here; merge it into the "
        "weights with peft, or take it out of the folder.",
    ),
    "adapter_does_not_fit": Message(
        LoadError,
        "The adapter in {path} has {name}, which does not fit the model beside it; fetch both "
        "again.",
    ),
    "adapter_without_weights": Message(
        LoadError,
        "{path} has an adapter without weights; add its adapter_model.safetensors, or take "
        "adapter_config.json out of the folder.",
    ),
    "no_adapter_config": Message(
        LoadError, "{path} is not the configuration of an adapter; fetch it again."
    ),
    "no_model": Message(LoadError, "{path} is a {model_type}, of which transformers has no model."),
    "key_not_followed": Message(
        LoadError,
        "{path} says {key}, which transformers' model of it cannot follow; load the checkpoint's "
        "safetensors instead.",
    ),
    "tensor_without_place": Message(
        LoadError,
        "{path} holds the tensor {name}, which transformers' model of it has no place for; load "
        "the checkpoint's safetensors instead.",
    ),
    "count_too_large": Message(
        LoadError, "{path} says {name} is {count}, more than any model has; fetch it again."
    ),
    "more_blocks_than_tensors": Message(
        LoadError, "{path} says it has {blocks} blocks and holds {tensors} tensors; fetch it again."
    ),
    "more_parameters_than_bytes": Message(
        LoadError,
        "{path} says it has {count} parameters and its weights take {size} bytes; fetch both "
        "again.",
    ),
    "outside_folder": Message(
        LoadError, "{path} names {name}, which is not in its folder; fetch it again."
    ),
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
