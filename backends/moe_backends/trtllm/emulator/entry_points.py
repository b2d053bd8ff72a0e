"""The emulated entry points: a call binds to the version's recorded signature and returns what that version returns."""

from __future__ import annotations

import ast
import inspect
import itertools
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from moe_backends.common.nvfp4 import nvfp4_linear
from moe_backends.common.routing import RoutedTokens, route
from moe_backends.trtllm.bindings import BLOCK_MAJOR_K, SEPARATE_SINCE
from moe_backends.trtllm.entry_points import Prepares
from moe_backends.trtllm.returns import Entry, EntryCall, RoutingInput, mislabelled
from moe_backends.trtllm.routing import METHODS, folding_methods, unpack
from moe_backends.trtllm.signatures import signature
from moe_backends.trtllm.versions import EMULATED, Version
from moe_contract import ExpertWeights, Installation, Routing, UnfinalizedMoEOutput, finalize

from .experts import Bf16Experts, Nvfp4Experts, run
from .on_demand import OnDemandWeights, is_large
from .permutation import allocated_rows, default_tile, padded_rows, place


class Emulator:
    """FlashInfer's MoE entry points in PyTorch, on any device.

    Args:
        version: whose signatures, return forms, folding and labels it has.
        seed: of the order of rows within an expert's segment, which differs from call to call.
    """

    def __init__(self, version: Version = EMULATED, seed: int = 0) -> None:
        self.version = version
        self._seeds = itertools.count(seed)
        # Read here: parsing source text in the ranks' threads at once is not safe in Python 3.11.
        self._signatures = {entry: signature(version, entry.value) for entry in Entry}
        self._defaults = {entry: _defaults(self._signatures[entry]) for entry in Entry}

    def unavailable(self, device: torch.device) -> str:
        """It runs wherever torch computes."""
        return "" if device.type in ("cpu", "cuda") else f"the emulator computes on cpu or cuda, not on {device.type}"

    def installation(self) -> Installation:
        """Itself: the recorded signatures, to which every call binds or raises."""
        return Installation("emulator", str(self.version))

    def quantize(self, hidden_states: Tensor, global_scale: float) -> tuple[Tensor, Tensor]:
        """The recipe of moe_contract.quant."""
        scale = torch.full((), global_scale, device=hidden_states.device)
        codes, scales = nvfp4_linear(hidden_states.float(), scale)
        return codes, scales.view(torch.float8_e4m3fn)

    def on_demand(self, weights: ExpertWeights, weight_format: Prepares) -> Mapping[str, object] | None:
        """Large layers are prepared expert by expert."""
        return OnDemandWeights(weights, weight_format).keywords() if is_large(weights) else None

    @torch.no_grad()
    def call(self, entry: Entry, arguments: Mapping[str, object]) -> object:
        """Runs an entry point; TypeError where the arguments do not bind, RuntimeError where the launcher refuses."""
        given = self._defaults[entry] | self._signatures[entry].bind(**arguments).arguments
        _require_launchable(entry, given)
        routed, call = self._route(entry, given)
        return self._run(call, given, routed)

    def _route(self, entry: Entry, given: Mapping[str, Any]) -> tuple[RoutedTokens, EntryCall]:
        tokens, top_k = given["hidden_states"].shape[0], given["top_k"]
        if not entry.routed:
            logits = given["routing_logits"]
            call = EntryCall(self.version, entry, RoutingInput.LOGITS, tokens, top_k, logits.dtype)
            return self._by_logits(given, logits), call
        given_ids = given["topk_ids"]
        if not isinstance(given_ids, tuple):
            precomputed = unpack(given_ids)
            call = EntryCall(self.version, entry, RoutingInput.PACKED, tokens, top_k)
            return RoutedTokens(precomputed.ids.long(), precomputed.weights), call
        if self.version < SEPARATE_SINCE[entry]:
            raise TypeError(f"{entry.value}: topk_ids must be a tensor in {self.version}, got a tuple")
        ids, weights = given_ids
        call = EntryCall(self.version, entry, RoutingInput.SEPARATE, tokens, top_k, given_weights_dtype=weights.dtype)
        return RoutedTokens(ids.long(), weights), call

    def _by_logits(self, given: Mapping[str, Any], logits: Tensor) -> RoutedTokens:
        number = given["routing_method_type"]
        method = next(m for m, known in METHODS.items() if known.number == number and self.version >= known.since)
        bias = given["routing_bias"]
        if method.takes_bias and bias is None:
            raise RuntimeError(f"routing method {number} needs a routing_bias")
        routing = Routing(
            method=method,
            top_k=given["top_k"],
            num_groups=given["n_group"] or 1,
            topk_groups=given["topk_group"] or 1,
            norm_topk_prob=given.get("norm_topk_prob", True),
            routed_scaling_factor=1.0 if given["routed_scaling_factor"] is None else given["routed_scaling_factor"],
            bias=bias,
        )
        return route(routing, logits, fold_scale=method in folding_methods(self.version), weights_dtype=torch.bfloat16)

    def _run(self, call: EntryCall, given: Mapping[str, Any], routed: RoutedTokens) -> object:
        replay = given.get("routing_replay_out")
        if replay is not None:
            replay[: call.num_tokens] = routed.ids.to(torch.int16)
        local, experts = routed.ids - given["local_expert_offset"], given["local_num_experts"]
        local = local.masked_fill((local < 0) | (local >= experts), -1)
        tile = default_tile(call.num_tokens, call.top_k, experts, fp4=call.entry.fp4)
        generator = torch.Generator().manual_seed(next(self._seeds))
        index = place(local, experts, tile, generator)
        width = _hidden_size(call.entry, given)
        rows = padded_rows(call.num_tokens, call.top_k, given["num_experts"], tile)
        rows = allocated_rows(rows, width, call.entry, self.version)
        # Rows that no route names are never written by the kernels: here they are NaN, so that reading one shows.
        out = torch.full((rows, width), math.nan, dtype=torch.bfloat16, device=local.device)
        run(Nvfp4Experts(given) if call.entry.fp4 else Bf16Experts(given), local, index, out)
        if not given["do_finalize"]:
            return [out, _labelled(routed.weights, call), index]
        pending = UnfinalizedMoEOutput(out, routed.weights, index.view(local.shape))
        return [finalize(pending)] if call.entry.fp4 else finalize(pending)


def _labelled(weights: Tensor, call: EntryCall) -> Tensor:
    """The weights' buffer as it comes back: in some versions bfloat16 bytes at the front of a float32 tensor."""
    if not mislabelled(call):
        return weights
    buffer = torch.full(weights.shape, math.nan, dtype=torch.float32, device=weights.device)
    buffer.view(torch.bfloat16).view(-1)[: weights.numel()] = weights.flatten()
    return buffer


def _hidden_size(entry: Entry, given: Mapping[str, Any]) -> int:
    width: int = given["hidden_states"].shape[1]
    return width * 2 if entry.fp4 else width


def _defaults(known: inspect.Signature) -> dict[str, Any]:
    """The defaults that are plain values; names of enumerations are left to ``given.get``."""
    found = {}
    for name, parameter in known.parameters.items():
        if parameter.default is not parameter.empty:
            try:
                found[name] = ast.literal_eval(parameter.default)
            except ValueError:
                continue
    return found


def _require_launchable(entry: Entry, given: Mapping[str, Any]) -> None:
    """What the launcher checks and the adapters could get wrong; RuntimeError as its own errors are."""
    hidden, width = given["hidden_states"], _hidden_size(entry, given)
    if hidden.shape[0] == 0:
        raise RuntimeError(
            f"{entry.value}: no tokens; the launcher divides by their number and ends the process (OUT-2)"
        )
    inner, experts = given["intermediate_size"], given["local_num_experts"]
    wide = given["gemm1_weights"].shape[1 if entry.fp4 else 2]
    if inner % 128:
        raise RuntimeError(f"{entry.value}: intermediate_size must be a multiple of 128, got {inner}")
    expected: dict[str, tuple[int, ...]]
    if entry.fp4:
        expected = {"gemm1_weights": (experts, wide, width // 2), "gemm2_weights": (experts, width, inner // 2)}
        expected |= {"hidden_states_scale": (hidden.shape[0], width // 16)}
    else:
        if given.get("weight_layout") != BLOCK_MAJOR_K:
            raise RuntimeError(f"{entry.value}: weight_layout must be BlockMajorK")
        expected = {
            "gemm1_weights": (experts, width // 64, wide, 64),
            "gemm2_weights": (experts, inner // 64, width, 64),
        }
    if wide not in (inner, 2 * inner):
        raise RuntimeError(f"{entry.value}: gemm1_weights have {wide} rows, expected {inner} or {2 * inner}")
    for name, shape in expected.items():
        if tuple(given[name].shape) != shape or not given[name].is_contiguous():
            raise RuntimeError(
                f"{entry.value}: {name} must be {list(shape)} and contiguous, got {list(given[name].shape)}"
            )
