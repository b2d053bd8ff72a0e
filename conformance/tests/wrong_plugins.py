"""A module of wrong backends, written to a folder for the tests of the runner and the command line."""

from __future__ import annotations

from pathlib import Path

MODULE = "wrong"
SOURCE = '''
import ctypes
import os
import signal
import time

import torch

from moe_contract import ContractViolation, UnfinalizedMoEOutput, consumer, finalize


def tail(group, output, residual, norm_weight, eps, weight_bias):
    """A right tail, in float64."""
    local = finalize(
        output.routed, routed_scaling_factor=output.routed_scaling_factor, shared_output=output.shared_output
    )
    total = sum(part.float() for part in group.all_gather(local)) + residual.float()
    residual_out = total.to(residual.dtype)
    x = residual_out.double()
    root = torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    norm_out = (x * root * (norm_weight.double() + weight_bias)).to(residual.dtype)
    return residual_out, norm_out


@consumer(name="right")
def right(group, output, residual, norm_weight, *, eps, weight_bias):
    return tail(group, output, residual, norm_weight, eps, weight_bias)


@consumer(name="last-row")
def last_row(group, output, residual, norm_weight, *, eps, weight_bias):
    routed = output.routed
    if isinstance(routed, UnfinalizedMoEOutput):
        index = routed.expanded_idx_to_permuted_idx.long()
        rows, weights = routed.gemm2_permuted.double(), routed.expert_weights.double()
        summed = (rows[index] * weights.unsqueeze(-1)).sum(1) * output.routed_scaling_factor
        if output.shared_output is not None:
            summed = summed + output.shared_output.double()
        output = type(output)(summed.to(residual.dtype))
    return tail(group, output, residual, norm_weight, eps, weight_bias)


@consumer(name="norm-too-wide")
def norm_too_wide(group, output, residual, norm_weight, *, eps, weight_bias):
    residual_out, norm_out = tail(group, output, residual, norm_weight, eps, weight_bias)
    width = residual.shape[1]
    return residual_out, (norm_out.double() * ((width + 64) / width) ** 0.5).to(residual.dtype)


@consumer(name="raises")
def raises(group, output, residual, norm_weight, *, eps, weight_bias):
    raise KeyError("no such buffer")


@consumer(name="nonsense")
def nonsense(group, output, residual, norm_weight, *, eps, weight_bias):
    return "nonsense"


@consumer(name="sleeps")
def sleeps(group, output, residual, norm_weight, *, eps, weight_bias):
    time.sleep(3600)


@consumer(name="holds")
def holds(group, output, residual, norm_weight, *, eps, weight_bias):
    ctypes.PyDLL(None).sleep(3600)  # PyDLL keeps the interpreter's lock, as a stuck kernel launch does


@consumer(name="exits")
def exits(group, output, residual, norm_weight, *, eps, weight_bias):
    os._exit(7)


@consumer(name="segfaults")
def segfaults(group, output, residual, norm_weight, *, eps, weight_bias):
    os.kill(os.getpid(), signal.SIGSEGV)


@consumer(name="leaves")
def leaves(group, output, residual, norm_weight, *, eps, weight_bias):
    raise SystemExit(3)


@consumer(name="garbles")
def garbles(group, output, residual, norm_weight, *, eps, weight_bias):
    raise RuntimeError("bad " + chr(0xDCFF) + chr(27) + "[31m")


@consumer(name="gpu-only", devices={"cuda"}, requires="an NVIDIA GPU")
def gpu_only(group, output, residual, norm_weight, *, eps, weight_bias):
    return tail(group, output, residual, norm_weight, eps, weight_bias)
'''


def write_wrong_plugins(folder: Path) -> None:
    """Writes ``wrong.py``, whose consumers are named ``wrong:last_row`` and so on."""
    (folder / f"{MODULE}.py").write_text(SOURCE, encoding="utf-8")
