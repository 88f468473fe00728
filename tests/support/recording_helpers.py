"""What the tests of recordings share."""

from __future__ import annotations

import pytest

from tests.support.models import PROMPT, specimen


@pytest.fixture(scope="module")
def rec():
    return specimen("qwen3_5_moe_text").record(PROMPT)
