"""The fused CUDA consumer: finalize, shared output, all-reduce, residual, RMSNorm and quantisation in one kernel."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from moe_backends.tail_inputs import as_moe_output, refuse_bad_inputs
from moe_contract import (
    ConsumerDeclaration,
    MoEOutput,
    QuantFormat,
    QuantRecipe,
    RankGroup,
    RoundingProfile,
    TailCapacity,
    TailOutput,
    UnsupportedError,
)
from moe_contract.limits import require_capacity

from . import ops
from .build import WORLD_SIZES
from .configs import MAX_HIDDEN_SIZE, VECTOR, Form
from .eager import ALIGNMENT, Memory, launch_known
from .launcher import PDL, SOLO, Engine, Operands, launch, open_engine, prefill
from .quant import Quant, empty_quantised, quant_code

DECLARATION = ConsumerDeclaration(
    name="cuda",
    version="1",
    devices=frozenset({"cuda"}),
    profile=RoundingProfile.FP32,
    weights_dtypes=frozenset({"activation", "float32"}),
    world_sizes=frozenset(WORLD_SIZES),
    quant_formats=frozenset(QuantFormat),
    route_major=True,
    compilable=True,
    max_top_k=32,  # one lane of a warp a slot (kMaxTopK)
    max_hidden_size=MAX_HIDDEN_SIZE,
    hidden_size_multiple=VECTOR,
    requires="an NVIDIA GPU of compute capability 9.0 or 10.0, nvcc and apache-tvm-ffi",
)
"""Profile C: float32 throughout, one rounding to publish and one for the residual; the scale multiplies the sum."""


@dataclass(frozen=True)
class CudaConsumer:
    """The fused tail on an NVIDIA GPU.

    Attributes:
        declaration: what it says of itself.
        timeout_s: longest wait for a peer inside the kernel, in seconds; the group's own limit where that is shorter.
        forms: launch forms in place of the measured table (configs.toml).
        concurrent_tails: tails that run at the same time on one GPU, each on its own stream. Ranks that wait for each
            other must all be resident, so every tail gets its share of the GPU.
        pdl: launch with programmatic dependent launch. Every kernel between two calls that is itself launched so
            must wait for its predecessor.
        ranks_per_gpu: ranks that a GPU has to hold together; None finds out.
        test_hooks: the build with stalls, for tests.
    """

    declaration: ConsumerDeclaration = DECLARATION
    timeout_s: float = 10.0
    forms: tuple[Form, ...] | None = None
    concurrent_tails: int = 1
    pdl: bool = False
    ranks_per_gpu: int | None = None
    test_hooks: bool = False

    def open(self, group: RankGroup, capacity: TailCapacity) -> CudaTail:
        """Builds and loads the kernels if need be and allocates the workspace. Collective.

        Raises:
            UnsupportedError: outside the declared limits, or this machine cannot build or run the kernels.
        """
        engine = self._engine(group, capacity, self.ranks_per_gpu)
        return CudaTail(self.declaration, capacity, engine, self._flags)

    def open_solo(self, group: RankGroup, capacity: TailCapacity, published: list[Tensor]) -> CudaTail:
        """One rank with the GPU to itself and its receive slots filled (SoloConsumer).

        Raises:
            UnsupportedError: as ``open``; or calls longer than the slots, or a two-shot form: what those receive
                depends on the call, so it cannot lie there beforehand.
        """
        engine = self._engine(group, capacity, 1)
        if group.size == 1:
            return CudaTail(self.declaration, capacity, engine, self._flags)
        if capacity.max_tokens > engine.workspace.tokens or any(config.form.two_shot for config in engine.configs):
            engine.close()
            raise UnsupportedError("cuda: solo runs only one-shot forms, of no more tokens than there are slots")
        prefill(engine, published)
        return CudaTail(self.declaration, capacity, engine, self._flags | SOLO)

    @property
    def _flags(self) -> int:
        return PDL if self.pdl else 0

    def _engine(self, group: RankGroup, capacity: TailCapacity, ranks_per_gpu: int | None) -> Engine:
        require_capacity(self.declaration, group, capacity)
        return open_engine(
            group,
            capacity,
            timeout_s=min(self.timeout_s, group.timeout_s),
            forms=self.forms,
            concurrent_tails=self.concurrent_tails,
            ranks_per_gpu=ranks_per_gpu,
            test_hooks=self.test_hooks,
        )


class CudaTail:
    """One rank's end of the tail.

    A peer that does not arrive is reported by the next call, by ``check`` or by ``close``: a call only launches.
    """

    def __init__(self, declaration: ConsumerDeclaration, capacity: TailCapacity, engine: Engine, flags: int) -> None:
        """Use CudaConsumer.open."""
        self.declaration = declaration
        self.capacity = capacity
        self.engine: Engine | None = engine
        self._flags = flags
        self._number = ops.register(self)
        self._memory = Memory()

    def __call__(
        self,
        output: MoEOutput,
        residual: Tensor,
        norm_weight: Tensor,
        *,
        eps: float,
        weight_bias: float = 0.0,
        quant: QuantRecipe | None = None,
    ) -> TailOutput:
        """Launches the tail on the current stream. Collective; no synchronisation.

        Raises:
            ContractViolation: an argument breaks the contract.
            UnsupportedError: the arguments are legal, but past the capacity or not what was declared.
            PeerTimeoutError: a peer did not arrive during an earlier call (RED-6).
        """
        if torch.compiler.is_compiling():
            return self._traced(output, residual, norm_weight, eps, weight_bias, quant)
        known = self._memory.find(output, residual, norm_weight, quant)
        if known is not None:
            engine = self._opened()
            engine.workspace.raise_if_lost()
            results = launch_known(engine, known, output, residual, norm_weight, eps, weight_bias, self._flags)
            if results is not None:
                return TailOutput(*results)
        else:
            output = self._require(output, residual, norm_weight, weight_bias, quant)
            self._memory.keep(output, residual, norm_weight, quant)
        routed, weights, index = _parts(output)
        return TailOutput(*self.run(
            routed, weights, index, output.shared_output, residual, norm_weight,
            output.routed_scaling_factor, eps, weight_bias, *quant_code(quant),
        ))  # fmt: skip

    def _require(
        self, output: object, residual: Tensor, norm_weight: Tensor, weight_bias: float, quant: QuantRecipe | None
    ) -> MoEOutput:
        """The output as the contract's own object, once nothing is wrong with the call."""
        known = as_moe_output(output)
        refuse_bad_inputs(self.declaration, self.capacity, known, residual, norm_weight, weight_bias, quant)
        return known

    def _traced(
        self,
        output: MoEOutput,
        residual: Tensor,
        norm_weight: Tensor,
        eps: float,
        weight_bias: float,
        quant: QuantRecipe | None,
    ) -> TailOutput:
        """The same under torch.compile: one operator, which is not looked into."""
        output = self._require(output, residual, norm_weight, weight_bias, quant)
        routed, weights, index = _parts(output)
        code, argument = quant_code(quant)
        scale = float(output.routed_scaling_factor)
        found = torch.ops.moe_conformance_cuda.tail(
            self._number, routed, weights, index, output.shared_output, residual, norm_weight,
            scale, eps, weight_bias, code, argument,
        )  # fmt: skip
        return TailOutput(*found) if code else TailOutput(found[0], found[1])

    def run(
        self,
        routed: Tensor,
        weights: Tensor | None,
        index: Tensor | None,
        shared: Tensor | None,
        residual: Tensor,
        norm_weight: Tensor,
        scale: float,
        eps: float,
        weight_bias: float,
        quant: int,
        quant_arg: float,
    ) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
        """Allocates the outputs and launches; arguments as launcher has them. For __call__ and the operator."""
        engine = self._opened()
        engine.workspace.raise_if_lost()
        residual_out, norm_out = (torch.empty_like(residual, memory_format=torch.contiguous_format) for _ in range(2))
        codes, scales = empty_quantised(residual, quant) if quant else (None, None)
        if residual.shape[0] == 0:
            if quant == Quant.FP8_STATIC and scales is not None:
                scales.fill_(quant_arg)
            return residual_out, norm_out, codes, scales
        operands = Operands(
            _dense(routed), weights, index, None if shared is None else _dense(shared), _dense(residual),
            _dense(norm_weight), residual_out, norm_out, codes, scales,
        )  # fmt: skip
        launch(
            engine, operands, scale=scale, eps=eps, weight_bias=weight_bias, quant=quant, quant_arg=quant_arg,
            stream=torch._C._cuda_getCurrentRawStream(residual.get_device()), flags=self._flags,
        )  # fmt: skip
        return residual_out, norm_out, codes, scales

    def check(self) -> None:
        """Waits for the launched calls and raises PeerTimeoutError if one of them lost a peer. Synchronises."""
        engine = self._opened()
        torch.cuda.current_stream(engine.workspace.group.device).synchronize()
        engine.workspace.raise_if_lost()

    def close(self) -> None:
        """Releases the workspace; memory returns to the allocator in the order of the stream.

        Raises:
            PeerTimeoutError: a finished call lost a peer. The workspace is released all the same.
        """
        engine, self.engine = self.engine, None
        if engine is not None:
            engine.close()
            engine.workspace.raise_if_lost()

    def _opened(self) -> Engine:
        if self.engine is None:
            raise RuntimeError("cuda: this tail is closed; open a new one")
        return self.engine


def _parts(output: MoEOutput) -> tuple[Tensor, Tensor | None, Tensor | None]:
    if isinstance(output.routed, Tensor):
        return output.routed, None, None
    triple = output.routed
    return triple.gemm2_permuted, triple.expert_weights, triple.expanded_idx_to_permuted_idx


def _dense(tensor: Tensor) -> Tensor:
    """The tensor as the kernel reads it; a copy only of what the contract lets have strides or an odd base."""
    if tensor.is_contiguous() and tensor.data_ptr() % ALIGNMENT == 0:
        return tensor
    return tensor.clone(memory_format=torch.contiguous_format)
