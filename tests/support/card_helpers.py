"""What the tests of cards share."""

from __future__ import annotations

from functools import cache

import pytest

from explorer.accounting import counts as accounting
from explorer.checkpoints import cards
from tests.support.configs import built

REQUIRED = {
    "llama": ["HuggingFaceTB/SmolLM2-135M-Instruct"],
    "qwen3_moe": [
        "Qwen/Qwen3-30B-A3B",
        "Qwen/Qwen3-235B-A22B",
        "Qwen/Qwen3-Coder-480B-A35B-Instruct",
    ],
    "qwen3_next": ["Qwen/Qwen3-Next-80B-A3B-Instruct", "Qwen/Qwen3-Coder-Next"],
    "qwen3_5_moe_text": [
        "Qwen/Qwen3.5-35B-A3B",
        "Qwen/Qwen3.5-122B-A10B",
        "Qwen/Qwen3.5-397B-A17B",
        "Qwen/Qwen3.6-35B-A3B",
    ],
    "gpt2": ["openai-community/gpt2", "openai-community/gpt2-xl"],
    "gpt_neox": ["EleutherAI/pythia-160m", "EleutherAI/gpt-neox-20b"],
    "gptj": ["EleutherAI/gpt-j-6b"],
    "bloom": ["bigscience/bloom-560m", "bigscience/bloom"],
    "opt": ["facebook/opt-125m", "facebook/opt-6.7b"],
    "gemma2": ["google/gemma-2-2b", "google/gemma-2-9b", "google/gemma-2-27b"],
    "olmo2": ["allenai/OLMo-2-1124-7B", "allenai/OLMo-2-1124-13B", "allenai/OLMo-2-0425-1B"],
    "cohere": ["CohereForAI/c4ai-command-r-v01", "CohereForAI/c4ai-command-r-plus"],
    "granite": ["ibm-granite/granite-3.0-2b-base", "ibm-granite/granite-3.0-8b-base"],
    "mixtral": ["mistralai/Mixtral-8x7B-v0.1", "mistralai/Mixtral-8x22B-v0.1"],
    "gpt_oss": ["openai/gpt-oss-20b", "openai/gpt-oss-120b"],
    "deepseek_v3": ["deepseek-ai/DeepSeek-V3", "moonshotai/Moonlight-16B-A3B"],
    "mamba": ["state-spaces/mamba-130m-hf", "state-spaces/mamba-2.8b-hf"],
    "mamba2": ["mistralai/Mamba-Codestral-7B-v0.1"],
    "jamba": ["ai21labs/Jamba-v0.1"],
    "nemotron_h": ["nvidia/Nemotron-H-8B-Base-8K", "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16"],
    "falcon_h1": ["tiiuae/Falcon-H1-0.5B-Base"],
    "recurrent_gemma": ["google/recurrentgemma-2b"],
    "lfm2": ["LiquidAI/LFM2-1.2B", "LiquidAI/LFM2-350M"],
    "kimi_linear": ["moonshotai/Kimi-Linear-48B-A3B-Instruct"],
}


every_card = pytest.mark.parametrize("id", cards.IDS)


@cache
def counted(id: str) -> dict:
    return accounting.parameters(built(id))
