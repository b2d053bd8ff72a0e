"""What the kernel asks of sizes, from its launcher and its address arithmetic (FlashInfer 0.6.18.post1); no device."""

from __future__ import annotations

from dataclasses import dataclass

from moe_contract import TailCapacity, UnsupportedError

VECTOR = 8
"""Elements of 16 bits in the 16 bytes that a thread handles; the header refuses any other hidden size."""
WARP = 32
NORM_MULTIPLE = VECTOR * WARP
"""Hidden sizes for which no warp of a token has idle lanes (see WHOLE_WARPS in consumer.py)."""
MAX_CLUSTER = 8
"""Blocks that their launcher puts on one token at most; also the largest cluster that every GPU with clusters runs."""
MAX_THREADS = 1024
COMM_LIMIT = ((1 << 31) - 1) // 2
"""Most bytes of one generation of slots, N * T * H * itemsize. FlashInfer admits 2 GiB - 2 MiB, but the kernel finds
the generation that it clears at ``2 * bytes`` in 32 bits, so that more than this would make it write before its
buffer."""
ROW_LIMIT = (1 << 31) - 1
"""Most elements of ``gemm2_permuted``: rows are addressed in 32 bits (MAP-6)."""
REGISTERS = {2: 40, 4: 48, 8: 72, 16: 158}
"""Registers of a thread by ranks, the larger of both dtypes, as nvcc 13.0 compiles 0.6.18.post1 for sm_90a. Used only
where the kernel cannot be asked; test_flashinfer_build compares them with a compilation."""
GPCS = 8
"""Groups of SMs that a cluster cannot reach across; no GPU with clusters has more."""
SM_BLOCKS, SM_REGISTERS = 32, 65536
"""What one SM holds at most (compute capability 9.0 and 10.0)."""


@dataclass(frozen=True)
class Shape:
    """How their launcher divides a token."""

    cluster: int
    """Blocks of a token."""
    threads: int
    """Of a block."""

    def clusters(self, tokens: int, sms: int) -> int:
        """Clusters of a launch: a block a SM at most, whatever the number of tokens."""
        return min(sms // self.cluster, tokens)


def shape_of(hidden_size: int, max_cluster: int = MAX_CLUSTER) -> Shape:
    """The launch shape for a hidden size, which is a multiple of VECTOR.

    Raises:
        UnsupportedError: CAP-1, the blocks would be larger than a GPU runs.
    """
    warps = -(-hidden_size // (VECTOR * WARP))
    cluster = min(MAX_CLUSTER, max_cluster)
    while warps % cluster:
        cluster //= 2
    shape = Shape(cluster, warps // cluster * WARP)
    if shape.threads > MAX_THREADS:
        raise UnsupportedError(
            f"CAP-1: a hidden size of {hidden_size} is {warps} warps, which this kernel would run as {cluster} blocks "
            f"of {shape.threads} threads; a block has at most {MAX_THREADS}",
            clause="CAP-1",
        )
    return shape


def comm_bytes(capacity: TailCapacity, ranks: int) -> int:
    """Bytes of one generation of slots: a Python integer, so it cannot overflow."""
    return ranks * capacity.max_tokens * capacity.hidden_size * capacity.dtype.itemsize


def require_sizes(capacity: TailCapacity, ranks: int) -> None:
    """Returns if every call within the capacity can be made on some GPU.

    Raises:
        UnsupportedError: CAP-1, with the numbers.
    """
    if (size := comm_bytes(capacity, ranks)) > COMM_LIMIT:
        per_token = size // capacity.max_tokens
        raise UnsupportedError(
            f"CAP-1: {ranks} ranks x {capacity.max_tokens} tokens need slots of {size} bytes, and this kernel's "
            f"32-bit offsets reach {COMM_LIMIT}; at this hidden size that is {COMM_LIMIT // per_token} tokens",
            clause="CAP-1",
        )
    shape_of(capacity.hidden_size)


def require_resident(resident: int, sharing: int, shape: Shape, clusters: int) -> None:
    """Refuses ranks that share a GPU without all being resident: one could wait for what another has no room to send.

    Args:
        resident: clusters of this shape that the GPU holds.
        sharing: ranks on it.
        shape: of the launch.
        clusters: that each rank launches.

    Raises:
        UnsupportedError: CAP-2, with the numbers.
    """
    if resident < 1:
        raise UnsupportedError(
            f"CAP-2: this GPU has no room for a cluster of {shape.cluster} blocks of {shape.threads} threads",
            clause="CAP-2",
        )
    if sharing > 1 and sharing * clusters > resident:
        raise UnsupportedError(
            f"CAP-2: {sharing} ranks on one GPU wait for each other with {clusters} clusters of {shape.cluster} "
            f"blocks each, but only {resident} clusters are resident together; use fewer virtual ranks or at most "
            f"{resident // sharing} tokens",
            clause="CAP-2",
        )


def estimated_resident(shape: Shape, ranks: int, *, sms: int, threads: int) -> int:
    """Clusters that a GPU holds at least, where the kernel cannot be asked.

    Args:
        shape: of the launch.
        ranks: decides the kernel's registers.
        sms: of the GPU.
        threads: that one of them holds.
    """
    per_block = -(-REGISTERS[ranks] // VECTOR) * VECTOR * shape.threads  # registers are given out by the eight
    blocks = min(SM_REGISTERS // per_block, threads // shape.threads, SM_BLOCKS)
    # A group of SMs may have up to cluster - 1 blocks' worth of room left over.
    return max(0, sms * blocks - GPCS * (shape.cluster - 1)) // shape.cluster
