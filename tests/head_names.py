"""Public heads by name, as three catalogues list them, with the format of each and the architecture of its target.

From SafeAILab/EAGLE's README (cb7e0841), SpecForge's docs/community_resources/specbundle.md (a6b6b023) and speculators'
README (c05b95b3). No head's files were read: the format is its catalogue's or its maker's.
"""

from __future__ import annotations

from typing import NamedTuple

FORMATS = {
    "S": "SafeAILab EAGLE-3",
    "F": "SpecForge",
    "G": "SpecForge, gpt-oss",
    "N": "NVIDIA Model Optimizer",
    "V": "vLLM's reader",
    "R": "speculators",
    "1": "SafeAILab EAGLE-1/2",
    "2": "SafeAILab EAGLE-1/2, Qwen2",
    "D": "DFlash",
    "K": "DSpark",
    "P": "P-EAGLE",
    "B": "block draft",
}
ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "llama4": "Llama4ForConditionalGeneration",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "qwen3_next": "Qwen3NextForCausalLM",
    "qwen3_vl": "Qwen3VLMoeForConditionalGeneration",
    "deepseek_v3": "DeepseekV3ForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "minicpm": "MiniCPMForCausalLM",
    "olmoe": "OlmoeForCausalLM",
    "granite": "GraniteMoeForCausalLM",
    "gpt_oss": "GptOssForCausalLM",
    "glm": "Glm4MoeLiteForCausalLM",
    "ling": "BailingMoeV2ForCausalLM",
    "gemma4": "Gemma4ForConditionalGeneration",
    "dflash": "of a block draft",
    "other": "of a block draft",
}
NOT_SERVED = {
    "llama4": "its layers attend within chunks of 8,192 positions",
    "qwen3_next": "most of its layers keep a state, no keys and values",
    "qwen3_vl": "its positions have three axes (`mrope_section`)",
    "minicpm": "its folder needs Python of its own",
    "granite": "it scales embeddings and logits outside of its layers",
    "ling": "its folder needs Python of its own",
    "gemma4": "its layers have two head sizes, and some read another's keys",
    "dflash": "no target of its own was tried",
    "other": "a block draft of a format that is not served",
}
"""Why a target, or such a head, does not run here."""
NAMES = """
S llama yuhuili/EAGLE3-Vicuna1.3-13B
S llama yuhuili/EAGLE3-LLaMA3.1-Instruct-8B
S llama yuhuili/EAGLE3-LLaMA3.3-Instruct-70B
S llama yuhuili/EAGLE3-DeepSeek-R1-Distill-LLaMA-8B
F llama4 lmsys/sglang-EAGLE3-Llama-4-Scout-17B-16E-Instruct-v1
F llama4 lmsys/sglang-EAGLE3-Llama-4-Maverick-17B-128E-Instruct-v1
N llama4 nvidia/Llama-4-Maverick-17B-128E-Eagle3
V qwen3 AngelSlim/Qwen3-1.7B_eagle3
V qwen3 AngelSlim/Qwen3-4B_eagle3
V qwen3 Tengyunw/qwen3_8b_eagle3
V qwen3 AngelSlim/Qwen3-8B_eagle3
S qwen3 Zjcxy-SmartAI/Eagle3-Qwen3-8B-zh
V qwen3 AngelSlim/Qwen3-14B_eagle3
V qwen3_moe Tengyunw/qwen3_30b_moe_eagle3
V qwen3_moe AngelSlim/Qwen3-a3B_eagle3
V qwen3 AngelSlim/Qwen3-32B_eagle3
S qwen3 Zjcxy-SmartAI/Eagle3-Qwen3-32B-zh
N qwen3_moe nvidia/Qwen3-235B-A22B-Eagle3
F qwen3_moe lmsys/Qwen3-235B-A22B-EAGLE3
S minicpm openbmb/MiniCPM4-8B
S olmoe wantsleep/OLMoE_1B_7B_Eagle3
S granite wantsleep/granite-3.1-1b-a400m-EAGLE3
G gpt_oss lmsys/EAGLE3-gpt-oss-120b-bf16
N gpt_oss nvidia/gpt-oss-120b-Eagle3
F glm thoughtworks/GLM-4.7-Flash-Eagle3
1 llama yuhuili/EAGLE-Vicuna-7B-v1.3
1 llama yuhuili/EAGLE-Vicuna-13B-v1.3
1 llama yuhuili/EAGLE-Vicuna-33B-v1.3
1 llama yuhuili/EAGLE-llama2-chat-7B
1 llama yuhuili/EAGLE-llama2-chat-13B
1 llama yuhuili/EAGLE-llama2-chat-70B
1 mixtral yuhuili/EAGLE-mixtral-instruct-8x7B
1 llama yuhuili/EAGLE-LLaMA3-Instruct-8B
1 llama yuhuili/EAGLE-LLaMA3-Instruct-70B
2 qwen2 yuhuili/EAGLE-Qwen2-7B-Instruct
2 qwen2 yuhuili/EAGLE-Qwen2-72B-Instruct
1 llama yuhuili/EAGLE-LLaMA3.1-Instruct-8B
2 qwen2 Zjcxy-SmartAI/Eagle-Qwen2.5-14B-Instruct
F llama lmsys/SGLang-EAGLE3-Llama-3.1-8B-Instruct-SpecForge
F llama lmsys/SGLang-EAGLE3-Llama-3.3-70B-Instruct-SpecForge
F llama4 lmsys/SGLang-EAGLE3-Llama-4-Scout-17B-16E-Instruct-SpecForge
F qwen3_moe lmsys/SGLang-EAGLE3-Qwen3-30B-A3B-Instruct-2507-SpecForge-Nex
F qwen3_moe lmsys/SGLang-EAGLE3-Qwen3-235B-A22B-Instruct-2507-SpecForge-Meituan
F qwen3_next lmsys/SGLang-EAGLE3-Qwen3-Next-80B-A3B-Instruct-FP8-perfect-blend-regenerated
F qwen3_moe lmsys/SGLang-EAGLE3-Qwen3-Coder-30B-A3B-Instruct-SpecForge
F qwen3_moe lmsys/SGLang-EAGLE3-Qwen3-Coder-480B-A35B-Instruct-SpecForge-EigenAI
F ling AQ-MedAI/Ling-Flash-2.0-eagle3
F deepseek_v3 AQ-MedAI/Kimi-K2-Instruct-eagle3
G gpt_oss zhuyksir/EAGLE3-gpt-oss-20b-bf16
F qwen3_moe nex-agi/SGLANG-EAGLE3-Qwen3-30B-A3B-Nex-N1
F qwen3 nex-agi/SGLANG-EAGLE3-Qwen3-32B-Nex-N1
R llama RedHatAI/Llama-3.1-8B-Instruct-speculator.eagle3
R llama RedHatAI/Llama-3.3-70B-Instruct-speculator.eagle3
R qwen3 RedHatAI/Qwen3-14B-speculator.eagle3
R qwen3_moe RedHatAI/Qwen3-235B-A22B-Instruct-2507-speculator.eagle3
R qwen3_moe RedHatAI/Qwen3-235B-A22B-speculator.eagle3
R qwen3_moe RedHatAI/Qwen3-30B-A3B-Instruct-2507-speculator.eagle3
R qwen3 RedHatAI/Qwen3-32B-speculator.eagle3
R qwen3 RedHatAI/Qwen3-8B-speculator.eagle3
R qwen3_vl RedHatAI/Qwen3-VL-235B-A22B-Instruct-speculator.eagle3
R gemma4 RedHatAI/gemma-4-26B-A4B-it-speculator.eagle3
R gemma4 RedHatAI/gemma-4-31B-it-speculator.eagle3
R gpt_oss RedHatAI/gpt-oss-120b-speculator.eagle3
R gpt_oss RedHatAI/gpt-oss-20b-speculator.eagle3
K dflash RedHatAI/GLM-5.2-speculator.dspark
B other RedHatAI/Kimi-K3-speculator.dspark
K dflash RedHatAI/Mistral-Small-4-119B-2603-speculator.dspark
D dflash RedHatAI/Mistral-Small-4-119B-2603.dflash
D dflash RedHatAI/NVIDIA-Nemotron-3-Super-120B-A12B-speculator.dflash
D dflash RedHatAI/NVIDIA-Nemotron-3-Ultra-550B-A55B-speculator.dflash
D dflash RedHatAI/Qwen3-30B-A3B-Instruct-2507-speculator.dflash
D dflash RedHatAI/Qwen3-30B-A3B-speculator.dflash
D dflash RedHatAI/Qwen3-8B-speculator.dflash
P qwen3 RedHatAI/Qwen3-8B-speculator.peagle
K dflash RedHatAI/Qwen3.6-35B-A3B-speculator.dspark
D dflash RedHatAI/gemma-4-31B-it-speculator.dflash
"""


class Named(NamedTuple):
    """A head. format: one of `head_catalogue.FORMATS`, DFlash, DSpark, P-EAGLE, or a block draft of another format.
    why_not: why it can't run, empty if it can.
    """

    name: str
    format: str
    architecture: str
    why_not: str


HEADS = [
    Named(name, FORMATS[form], ARCHITECTURES[kind], NOT_SERVED.get(kind, ""))
    for form, kind, name in map(str.split, NAMES.strip().splitlines())
]
