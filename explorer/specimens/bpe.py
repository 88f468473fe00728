"""The specimens' tokenizer: a small byte-level BPE of our own.

Every byte is an entry, so any text can be written and read back exactly; the
remaining entries are merges learned from the training text
(`explorer.specimens.training.tokenizer`).
"""

from __future__ import annotations

from pathlib import Path

from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

PATH = Path(__file__).with_name("tokenizer.json")
END = "<|endoftext|>"
ENTRIES = 2048


def load_tokenizer(model_max_length: int) -> PreTrainedTokenizerFast:
    """Load the committed tokenizer: no beginning token, one for end and padding, left padding.

    With left padding the last position of every row, where generation goes on, is a real token.
    """
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_file(str(PATH)),
        eos_token=END,
        pad_token=END,
        padding_side="left",
        clean_up_tokenization_spaces=False,
        model_max_length=model_max_length,
    )
