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
    "apertus": ["swiss-ai/Apertus-8B-Instruct-2509"],
    "bamba": ["ibm-fms/Bamba-9B"],
    "biogpt": ["microsoft/biogpt"],
    "bitnet": ["microsoft/bitnet-b1.58-2B-4T-bf16"],
    "codegen": ["Salesforce/codegen-16B-mono"],
    "cohere2": ["CohereForAI/c4ai-command-r7b-12-2024"],
    "exaone4": ["LGAI-EXAONE/EXAONE-4.0-32B"],
    "falcon": ["tiiuae/falcon-7b"],
    "falcon_mamba": ["tiiuae/falcon-mamba-7b", "tiiuae/Falcon3-Mamba-7B-Base"],
    "gemma": ["google/gemma-2b"],
    "gemma3_text": ["google/gemma-3-1b-it"],
    "glm": ["THUDM/glm-4-9b-chat"],
    "glm4_moe_lite": ["zai-org/GLM-4.7-Flash"],
    "gpt_bigcode": ["bigcode/gpt_bigcode-santacoder"],
    "gpt_neo": ["EleutherAI/gpt-neo-125m", "EleutherAI/gpt-neo-1.3B", "EleutherAI/gpt-neo-2.7B"],
    "granitemoe": ["ibm-granite/granite-3.1-1b-a400m-instruct"],
    "helium": ["kyutai/helium-1-preview-2b"],
    "internlm3": ["internlm/internlm3-8b-instruct"],
    "iquestcoder": [
        "IQuestLab/IQuest-Coder-V1-40B-Instruct",
        "IQuestLab/IQuest-Coder-V1-14B-Instruct",
    ],
    "lfm2_moe": ["LiquidAI/LFM2-8B-A1B"],
    "minicpm3": ["openbmb/MiniCPM3-4B"],
    "ministral": ["mistralai/Ministral-8B-Instruct-2410"],
    "mistral": [
        "mistralai/Mistral-7B-v0.1",
        "mistralai/Mistral-7B-v0.3",
        "mistralai/Mistral-Large-Instruct-2407",
    ],
    "mpt": ["mosaicml/mpt-7b"],
    "nemotron": ["nvidia/Minitron-4B-Base", "nvidia/Minitron-8B-Base"],
    "olmo": ["allenai/OLMo-1B-hf", "allenai/OLMo-7B-hf"],
    "olmoe": ["allenai/OLMoE-1B-7B-0924"],
    "phi": ["microsoft/phi-2", "microsoft/phi-1_5"],
    "phi3": ["microsoft/Phi-3-mini-4k-instruct", "microsoft/phi-4"],
    "qwen2": ["Qwen/Qwen2-0.5B-Instruct", "Qwen/Qwen2-1.5B-Instruct", "Qwen/Qwen2.5-3B-Instruct"],
    "qwen2_moe": ["Qwen/Qwen1.5-MoE-A2.7B-Chat"],
    "qwen3": [
        "Qwen/Qwen3-0.6B",
        "Qwen/Qwen3-1.7B",
        "Qwen/Qwen3-8B",
        "Qwen/Qwen3-32B",
        "Qwen/Qwen3-4B",
        "Qwen/Qwen3-14B",
    ],
    "seed_oss": ["ByteDance-Seed/Seed-OSS-36B-Instruct"],
    "smollm3": ["HuggingFaceTB/SmolLM3-3B"],
    "solar_open": ["upstage/Solar-Open-100B"],
    "stablelm": ["stabilityai/stablelm-3b-4e1t", "stabilityai/stablelm-2-zephyr-1_6b"],
    "starcoder2": ["bigcode/starcoder2-7b"],
    "xglm": ["facebook/xglm-564M"],
    "youtu": ["tencent/Youtu-LLM-2B"],
}


every_card = pytest.mark.parametrize("id", cards.IDS)


@cache
def counted(id: str) -> dict:
    return accounting.parameters(built(id))
