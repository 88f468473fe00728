"""What the tests of specimens share."""

from __future__ import annotations

import pytest
import torch

from explorer import specimens
from explorer.specimens.recipes import FAMILIES

TRAINED = "qwen3_next"


#: Whose sizes were chosen by hand, all of them apart; the others' are made by rules and told apart
#: by what finding knows.
BY_HAND = ("llama", "qwen3_moe", "qwen3_next", "qwen3_5_moe_text")


@pytest.fixture(scope="module")
def built():
    torch.set_num_threads(1)
    return {family: specimens.build(family) for family in FAMILIES}
