"""The public bug reports that the catalogue has to express.

The faults name the reports that they express (``Fault.bugs``); this is the other side, so that none can be lost.
"""

from __future__ import annotations

from collections.abc import Mapping

from moe_conformance.faults.model import Fault

KNOWN_BUGS: Mapping[str, tuple[str, ...]] = {
    "flashinfer#3595": ("flashinfer#3644",),
    "flashinfer#3925": ("flashinfer#3926",),
    "flashinfer#4614": (),
    "flashinfer#3671": ("flashinfer#3754",),
    "flashinfer#3931": (),
    "vllm#46408": (),
    "vllm#42034": (),
    "vllm#57946": (),
    "sglang#24850": (),
    "flashinfer#3547": (),
    "flashinfer#3066": (),
    "transformers#48205": (),
    "prime-rl#2035": (),
    "flashinfer#5349": (),
    "Primus-Turbo#345": (),
    "rtp-llm#1325": (),
    "flashinfer#4017": (),
    "flashinfer#2643": (),
    "TransformerEngine#2908": (),
    "sglang#35188": (),
    "sglang#4727": (),
    "vllm#45884": ("vllm#45907",),
    "DLBlas#171": (),
    "sglang#8333": ("sglang#8364",),
    "vllm#24119": (),
    "vllm#45037": (),
    "sglang#35152": (),
    "kvcache-ai/sglang#86": (),
    "sglang#12998": (),
    "vllm#32437": (),
    "sglang#34456": (),
    "vllm-plugin-FL#251": (),
    "vllm#43694": (),
    "sglang#6274": ("sglang#7889",),
    "TensorRT-LLM#16778": (),
    "vllm#46643": (),
    "sglang#40105": ("flashinfer#3598", "flashinfer#3976", "flashinfer#5221"),
    "vllm#49378": (),
    "sglang#31475": ("sglang#35535",),
    "tpu-inference#3151": (),
    "sglang#32963": ("sglang#32511", "sglang#32012"),
    "sglang#20110": (),
    "sglang#37199": (),
    "vllm-ascend#10557": (),
    "vllm#54152": (),
    "sglang#11632": (),
    "TensorRT-LLM#6850": (),
    "sglang#28619": (),
    "sglang#39286": (),
    "vllm#40794": (),
    "vllm#28841": ("ATOM#449", "ATOM#526"),
    "flashinfer#2482": (),
    "Megatron-LM#4038": (),
    "aiter#2329": ("aiter#2521",),
    "flashinfer#1223": ("flashinfer#1229",),
    "flashinfer#1986": (),
    "vllm#21325": (),
    "sglang#34921": (),
    "vllm#55973": (),
    "tokenspeed#351": (),
    "vllm#45448": ("tokenspeed#842",),
    "flashinfer#3835": (),
    "TensorRT-LLM#14668": (),
    "TensorRT-LLM#13294": (),
    "vllm#34948": (),
    "sglang#30209": (),
    "tokenspeed#415": (),
    "sglang#38773": ("sglang#38780",),
    "sglang#22455": (),
    "vllm#51106": (),
    "DeepEP#374": (),
    "flashinfer#2695": ("flashinfer#2817", "flashinfer#2821"),
    "flashinfer#4637": (),
    "TensorRT-LLM#12523": (),
    "TensorRT-LLM#15226": (),
    "TensorRT-LLM#14314": (),
}
"""A report, as repository and number, and the further reports of the same defect. Performance reports are left out: no
output of theirs is wrong."""


def expressed(faults: Mapping[str, Fault]) -> dict[str, tuple[str, ...]]:
    """The faults that express each report of the table."""
    return {bug: tuple(fault.id for fault in faults.values() if bug in fault.bugs) for bug in KNOWN_BUGS}
