"""Runs every real model's profile on the emulated TRTLLM producers: what passes, how long, how much memory.

``python benchmarks/trtllm_models.py`` runs what ``results/trtllm-models.json`` does not hold yet, one profile at a time
(``--again`` runs all, names of models run those), and writes the file and the table of ``docs/trtllm.md``; ``--table``
writes the table alone.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "trtllm-models.json"
DOCS = ROOT / "docs" / "trtllm.md"
BEGIN, END = "<!-- models: written by benchmarks/trtllm_models.py -->", "<!-- end of models -->"
PRODUCERS = ("trtllm-bf16@emulated", "trtllm-nvfp4@emulated")
RANKS = "1,2,4"
LONGEST_CASE_S = "300"


def measure(model: str, producer: str) -> dict[str, Any]:
    """One profile in a process of its own: verdicts of the cases that the producer takes part in, seconds, GB, and the
    intermediate size that it was cut to."""
    from moe_conformance.cases.models import models

    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "moe_conformance", "run", "--producer", producer, "--consumer", "reference"]
        command += ["--profile", f"model:{model}", "--tp", RANKS, "--timeout", LONGEST_CASE_S, "-n", "1"]
        started = time.perf_counter()
        process = subprocess.Popen([*command, "--report", folder], stdout=subprocess.DEVNULL)
        # The usage of the process and of the worker that it waited for; Popen.wait would not tell.
        _, status, usage = os.wait4(process.pid, 0)
        seconds = time.perf_counter() - started
        cases = json.loads((Path(folder) / "report.json").read_text(encoding="utf-8"))["cases"]
    verdicts = Counter(case["verdict"] for case in cases if case["producer"])
    return {
        "intermediate_size": models()[model].reduced_intermediate_size,
        "verdicts": dict(sorted(verdicts.items())),
        "exit_status": os.waitstatus_to_exitcode(status),
        "seconds": round(seconds, 1),
        "cpu_seconds": round(usage.ru_utime + usage.ru_stime, 1),
        "gigabytes": round(usage.ru_maxrss / 2**20, 2),
    }


def table(results: dict[str, dict[str, Any]]) -> str:
    """The results as Markdown, a row for each model and producer."""
    from moe_conformance.cases.models import models
    from moe_contract.discovery import load_producer

    lines = ["| model | H | I of I | E | K | producer | defers | pass | unsupported | other | CPU s | GB |"]
    lines.append("|---|---|---|---|---|---|---|---|---|---|---|---|")
    for name, model in models().items():
        for producer in PRODUCERS:
            found = results.get(f"{name} {producer}")
            if found is None:
                continue
            verdicts = Counter(found["verdicts"])
            declaration = load_producer(producer).declaration
            served = model.method in declaration.routing_methods and (declaration.expert_biases or not model.biases)
            served = served and model.activation in declaration.activations
            defers = ("yes" if declaration.defers(model.method, model.hidden_size) else "no") if served else "-"
            other = sum(verdicts.values()) - verdicts["pass"] - verdicts["unsupported"]
            sizes = f"{model.hidden_size} | {found['intermediate_size']} of {model.intermediate_size}"
            lines.append(
                f"| {name} | {sizes} | {model.num_experts} | {model.top_k} | {producer.removesuffix('@emulated')} "
                f"| {defers} | {verdicts['pass']} | {verdicts['unsupported']} | {other} "
                f"| {found['cpu_seconds']:.0f} | {found['gigabytes']:.1f} |"
            )
    return "\n".join(lines)


def documented(text: str, rows: str) -> str:
    """``text`` with the table between its two markers replaced."""
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n{rows}\n{END}{after}"


def main() -> int:
    """The command; 1 where a profile ended with another status than 0."""
    from moe_conformance.cases.models import models

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", nargs="*", help="models that are run anew")
    parser.add_argument("--again", action="store_true", help="run what is in the file as well")
    parser.add_argument("--table", action="store_true", help="run nothing")
    options = parser.parse_args()
    results = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else {}
    for producer in () if options.table else PRODUCERS:
        for model in models():
            key = f"{model} {producer}"
            if key not in results or options.again or model in options.models:
                results[key] = measure(model, producer)
                print(key, results[key], flush=True)
                RESULTS.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    DOCS.write_text(documented(DOCS.read_text(encoding="utf-8"), table(results)), encoding="utf-8")
    return int(any(found["exit_status"] for found in results.values()))


if __name__ == "__main__":
    sys.exit(main())
