"""The public reports that the catalogue has to express, by the row's id in the project's list of known bugs.

The faults name the rows that they express (``Fault.bugs``); this is the other side, so that a row cannot be lost.
"""

from __future__ import annotations

from collections.abc import Mapping

from moe_conformance.faults.model import Fault

KNOWN_BUGS: Mapping[str, str] = {
    "B01": "flashinfer#3595, #3644",
    "B02": "flashinfer#3925, #3926",
    "B03": "flashinfer#4614",
    "B04": "flashinfer#3671, #3754",
    "B06": "flashinfer#3931",
    "B08": "vllm#46408",
    "B09": "vllm#42034",
    "B10": "vllm#57946",
    "B11": "sglang#24850",
    "B13": "flashinfer#3547",
    "B14": "flashinfer#3066",
    "B15": "transformers#48205",
    "B16": "prime-rl#2035",
    "B18": "flashinfer#5349",
    "B19": "Primus-Turbo#345",
    "B20": "rtp-llm#1325",
    "B21": "flashinfer#4017",
    "B22": "flashinfer#2643",
    "B24": "TransformerEngine#2908",
    "B25": "sglang#35188",
    "B26": "sglang#4727",
    "B27": "vllm#45884, #45907",
    "B29": "DLBlas#171",
    "B30": "sglang#8333, #8364",
    "B32": "vllm#24119",
    "B33": "vllm#45037",
    "B34": "sglang#35152",
    "B35": "kvcache-ai/sglang#86",
    "B37": "sglang#12998",
    "B39": "vllm#32437",
    "B40": "sglang#34456",
    "B41": "vllm-plugin-FL#251",
    "B42": "vllm#43694",
    "B43": "sglang#6274, #7889",
    "B46": "TensorRT-LLM#16778",
    "B47": "vllm#46643",
    "B49": "sglang#40105; flashinfer#3598, #3976, #5221",
    "B52": "vllm#49378",
    "B53": "sglang#31475, #35535",
    "B54": "tpu-inference#3151",
    "B56": "sglang#32963, #32511, #32012",
    "B57": "sglang#20110",
    "B58": "sglang#37199",
    "B60": "vllm-ascend#10557",
    "B61": "vllm#54152",
    "B63": "sglang#11632",
    "B64": "TensorRT-LLM#6850",
    "B65": "sglang#28619",
    "B67": "sglang#39286",
    "B68": "vllm#40794",
    "B70": "vllm#28841, ATOM#449, ATOM#526",
    "B71": "flashinfer#2482",
    "B73": "Megatron-LM#4038",
    "B74": "aiter#2329, #2521",
    "B75": "flashinfer#1223, #1229",
    "B76": "flashinfer#1986",
    "B78": "vllm#21325",
    "B80": "sglang#34921",
    "B81": "vllm#55973",
    "B83": "tokenspeed#351",
    "B84": "vllm#45448; tokenspeed#842",
    "B85": "flashinfer#3835",
    "B86": "TensorRT-LLM#14668",
    "B87": "TensorRT-LLM#13294",
    "B89": "vllm#34948",
    "B90": "sglang#30209",
    "B91": "tokenspeed#415",
    "B92": "sglang#38773, #38780",
    "B93": "sglang#22455",
    "B95": "vllm#51106",
    "B97": "DeepEP#374",
    "B98": "flashinfer#2695, #2817, #2821",
    "B100": "flashinfer#4637",
    "B101": "TensorRT-LLM#12523",
    "B103": "TensorRT-LLM#15226",
    "B104": "TensorRT-LLM#14314",
}
"""Row: repository and number. B106, the only performance note, is left out: no output of it is wrong."""


def expressed(faults: Mapping[str, Fault]) -> dict[str, tuple[str, ...]]:
    """Row: the faults that express it, for every row."""
    return {bug: tuple(fault.id for fault in faults.values() if bug in fault.bugs) for bug in KNOWN_BUGS}
