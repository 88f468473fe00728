"""The sentences that people read when something cannot be loaded, for `messages`."""

from __future__ import annotations

from typing import NamedTuple

from explorer.checkpoints.cards import UnknownCheckpoint
from explorer.checkpoints.load import NotTraceable
from explorer.errors import LoadError
from explorer.specimens.errors import UnknownFamily


class Message(NamedTuple):
    """The class of an error and its sentence; what stands in braces differs from case to case."""

    error: type[Exception]
    text: str


LOADING = {
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
}
