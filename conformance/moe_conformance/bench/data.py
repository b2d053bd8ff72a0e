"""Inputs of a point, made on the GPU: drawing them on the host would take longer than timing them."""

from __future__ import annotations

import torch
from torch import Tensor

from moe_conformance.bench.model import Mode, Point
from moe_conformance.cases.tail_data import PADDING_ROWS, TailInputs
from moe_contract import MoEOutput, UnfinalizedMoEOutput
from moe_contract.dtypes import torch_dtype

EPS = 1e-6
SCALE = 2.5
"""The routed scaling factor of DeepSeek-V3 (its public configuration)."""


def make_inputs(point: Point, seed: int, device: torch.device) -> TailInputs:
    """All slots present, rows in random order, shared output and scale. In solo mode every rank has the same."""
    generator = torch.Generator(device).manual_seed(seed)
    dtype = torch_dtype(point.dtype)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, dtype=dtype, device=device, generator=generator)

    def output() -> MoEOutput:
        routes = point.tokens * point.top_k
        rows = normal(routes + PADDING_ROWS, point.hidden_size)
        order = torch.randperm(routes + PADDING_ROWS, device=device, generator=generator)[:routes]
        weights = torch.rand(point.tokens, point.top_k, device=device, generator=generator).to(dtype)
        index = order.view(point.tokens, point.top_k).to(torch.int32)
        return MoEOutput(UnfinalizedMoEOutput(rows, weights, index), normal(point.tokens, point.hidden_size), SCALE)

    alike = point.mode is Mode.SOLO
    outputs = (output(),) * point.ranks if alike else tuple(output() for _ in range(point.ranks))
    return TailInputs(outputs, normal(point.tokens, point.hidden_size), normal(point.hidden_size), EPS)


def num_bytes(point: Point) -> int:
    """Device memory of one set of inputs and outputs, 16-bit elements."""
    copies = 1 if point.mode is Mode.SOLO else point.ranks
    return copies * point.tokens * (point.top_k + 3) * point.hidden_size * 2
