"""One MoE layer in canonical form: the weights and the routing that a producer is given."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum

import torch
from torch import Tensor


class RoutingMethod(StrEnum):
    """How router logits become experts and weights. Names and order follow FlashInfer's RoutingMethodType."""

    DEFAULT = "default"
    """softmax over all experts, then top-k; not renormalised."""
    RENORMALIZE = "renormalize"
    """top-k on logits, then softmax over the k."""
    DEEPSEEK_V3 = "deepseek-v3"
    """sigmoid; top-k on sigmoid + bias, within the best groups; weights renormalised."""
    LLAMA4 = "llama4"
    """top-1 on logits; the sigmoid weight multiplies the expert's input."""
    RENORMALIZE_NAIVE = "renormalize-naive"
    """softmax over all experts, top-k, then renormalised: equals RENORMALIZE in exact arithmetic."""
    TOPK = "topk"
    """top-k on logits; the raw logit is the weight."""
    SIGMOID_RENORM = "sigmoid-renorm"
    """sigmoid, top-k, renormalised when ``norm_topk_prob``."""
    MINIMAX2 = "minimax2"
    """as DEEPSEEK_V3 without groups."""
    SIGMOID = "sigmoid"
    """sigmoid, then top-k; not renormalised."""
    TOPK_SIGMOID = "topk-sigmoid"
    """top-k on logits, then the sigmoid of the survivors."""
    PRECOMPUTED = "precomputed"
    """The router runs outside the kernel, which is given ``PrecomputedRouting`` in place of logits."""

    @property
    def takes_bias(self) -> bool:
        """Whether ``Routing.bias`` steers the selection."""
        return self in (RoutingMethod.DEEPSEEK_V3, RoutingMethod.MINIMAX2)

    @property
    def weights_input(self) -> bool:
        """Whether the weight multiplies the expert's input, so that rows are never unweighted (ROWS-3)."""
        return self is RoutingMethod.LLAMA4


class Activation(StrEnum):
    """The function between the two GEMMs."""

    SILU = "silu"
    """gated: silu(gate) * up."""
    GELU_TANH = "gelu-tanh"
    """gated: gelu(gate, tanh approximation) * up."""
    SWIGLU_OAI = "swiglu-oai"
    """gated, gpt-oss: g = min(gate, 7), u = clamp(up, -7, 7); g * sigmoid(1.702 g) * (u + 1)."""
    RELU2 = "relu2"
    """not gated: relu(up) squared."""

    @property
    def gated(self) -> bool:
        """Whether the layer has a gate projection."""
        return self is not Activation.RELU2


@dataclass(frozen=True)
class PrecomputedRouting:
    """Routing done outside the kernel: ``ids [T, K]`` int32 global expert ids, ``weights [T, K]``.

    Weights are used verbatim; the routed scaling factor is never folded into them by the kernel.
    """

    ids: Tensor
    weights: Tensor


@dataclass(frozen=True)
class Routing:
    """The routing of one layer. ``bias`` is ``[E]`` float32 and only steers the selection."""

    method: RoutingMethod
    top_k: int
    num_groups: int = 1
    """DEEPSEEK_V3: expert groups; 1 means ungrouped."""
    topk_groups: int = 1
    """DEEPSEEK_V3: groups kept."""
    norm_topk_prob: bool = True
    """SIGMOID_RENORM: renormalise over the selected experts."""
    routed_scaling_factor: float = 1.0
    bias: Tensor | None = None


@dataclass(frozen=True)
class ExpertWeights:
    """Projections of E experts, or of this rank's part of them, in the activation dtype.

    ``gate`` and ``up`` are ``[E, I, H]``, ``down`` is ``[E, H, I]``; biases are ``[E, I]`` and ``[E, H]``.
    ``gate`` and ``gate_bias`` are None for activations that are not gated.
    """

    up: Tensor
    down: Tensor
    gate: Tensor | None = None
    up_bias: Tensor | None = None
    gate_bias: Tensor | None = None
    down_bias: Tensor | None = None

    def select(self, experts: slice | Tensor) -> ExpertWeights:
        """The part that holds these experts: a slice, or their indices as an int64 tensor."""
        optional = (self.gate, self.up_bias, self.gate_bias, self.down_bias)
        gate, up_bias, gate_bias, down_bias = (None if tensor is None else tensor[experts] for tensor in optional)
        return ExpertWeights(self.up[experts], self.down[experts], gate, up_bias, gate_bias, down_bias)

    def shard_intermediate(self, rank: int, size: int) -> ExpertWeights:
        """The part that holds this rank's columns of the intermediate size.

        The down bias stays on rank 0 alone, so that the reduction over ranks adds it once (ROWS-6).
        """
        intermediate = self.up.shape[1]
        if intermediate % size:
            raise ValueError(f"intermediate size {intermediate} is not divisible by {size} tensor-parallel ranks")
        width = intermediate // size
        part = slice(rank * width, (rank + 1) * width)
        return ExpertWeights(
            up=self.up[:, part].contiguous(),
            down=self.down[:, :, part].contiguous(),
            gate=None if self.gate is None else self.gate[:, part].contiguous(),
            up_bias=None if self.up_bias is None else self.up_bias[:, part].contiguous(),
            gate_bias=None if self.gate_bias is None else self.gate_bias[:, part].contiguous(),
            down_bias=self.down_bias if rank == 0 else None,
        )


@dataclass(frozen=True)
class MoELayer:
    """One layer, or the part of it that one rank holds.

    ``shared`` holds the shared expert as ``E = 1`` weights, or None. ``first_expert`` is the global id of this
    rank's first expert; the whole layer has ``first_expert = 0`` and all ``num_experts``.
    """

    hidden_size: int
    num_experts: int
    """Experts of the whole layer, on all ranks."""
    routing: Routing
    activation: Activation
    experts: ExpertWeights
    shared: ExpertWeights | None = None
    first_expert: int = 0

    @property
    def num_local_experts(self) -> int:
        """Experts held here."""
        return self.experts.up.shape[0]

    @property
    def dtype(self) -> torch.dtype:
        """The activation dtype."""
        return self.experts.up.dtype

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self.experts.up.device

    def shard(self, tp_rank: int, tp_size: int, ep_rank: int = 0, ep_size: int = 1) -> MoELayer:
        """This rank's part: experts split over ``ep_size``, the intermediate size over ``tp_size``.

        The tail reduces over all ``tp_size * ep_size`` ranks, numbered ``ep_rank * tp_size + tp_rank``; the shared
        expert's intermediate size is split over all of them.

        Raises:
            ValueError: a size is not divisible by its number of ranks, or a rank is out of range.
        """
        if not (0 <= tp_rank < tp_size and 0 <= ep_rank < ep_size):
            raise ValueError(f"rank tp {tp_rank} of {tp_size}, ep {ep_rank} of {ep_size} is out of range")
        if self.num_experts % ep_size:
            raise ValueError(f"{self.num_experts} experts are not divisible by {ep_size} expert-parallel ranks")
        if self.num_local_experts != self.num_experts:
            raise ValueError("only a whole layer can be sharded; this one already is a rank's part")
        count = self.num_experts // ep_size
        first = ep_rank * count
        experts = self.experts if ep_size == 1 else self.experts.select(slice(first, first + count))
        shared = self.shared
        if shared is not None:
            shared = shared.shard_intermediate(ep_rank * tp_size + tp_rank, tp_size * ep_size)
        return replace(self, experts=experts.shard_intermediate(tp_rank, tp_size), shared=shared, first_expert=first)
