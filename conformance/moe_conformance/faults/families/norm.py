"""NORM: the divisor, eps, gamma, and what the mean square is taken of."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from moe_conformance.faults import plain_tail
from moe_conformance.faults.model import Fault
from moe_conformance.faults.plain_tail import PlainTail

FAULTS: list[Fault] = []
consumer_fault = partial(plain_tail.consumer_fault, into=FAULTS)


@consumer_fault("NORM-1", smallest="T=1")
class NormOverPaddedWidth(PlainTail):
    """The mean square is taken over a width padded to a multiple of 384."""

    def mean_square(self, x: Tensor) -> Tensor:
        """Divided by more."""
        return x.float().square().sum(-1, keepdim=True) / (-(-x.shape[1] // 384) * 384 + 384)


@consumer_fault("NORM-1", bugs=("aiter#2329",), smallest="H=2880")
class NormOverWholeTiles(PlainTail):
    """The mean square leaves out the columns after the last whole tile of 1024, where H has one."""

    def mean_square(self, x: Tensor) -> Tensor:
        """Of whole tiles."""
        whole = x.shape[1] // 1024 * 1024 or x.shape[1]
        return x[:, :whole].float().square().mean(-1, keepdim=True)


@consumer_fault("NORM-1", smallest="a mean square near eps")
class EpsOutsideTheRoot(PlainTail):
    """eps is added to the root, not to the mean square."""

    def norm(self, x: Tensor, gain: Tensor, eps: float) -> Tensor:
        """Root plus eps."""
        return (x.float() / (self.mean_square(x).sqrt() + eps) * gain).to(x.dtype)


@consumer_fault("NORM-1", smallest="a mean square near eps")
class EpsLeftOut(PlainTail):
    """eps is not added."""

    def norm(self, x: Tensor, gain: Tensor, eps: float) -> Tensor:
        """With a floor that only keeps it finite."""
        return super().norm(x, gain, 1e-30)


@consumer_fault("NORM-1", smallest="gamma that is not all ones")
class GammaIgnored(PlainTail):
    """gamma is taken to be 1."""

    def gain(self, norm_weight: Tensor, weight_bias: float) -> Tensor:
        """Ones."""
        return torch.ones_like(norm_weight, dtype=torch.float32) + weight_bias


@consumer_fault("NORM-1", smallest="float32 gamma with more than 8 bits")
class GammaRounded(PlainTail):
    """A float32 gamma is rounded to the activation dtype."""

    def gain(self, norm_weight: Tensor, weight_bias: float) -> Tensor:
        """Rounded."""
        return norm_weight.to(self.capacity.dtype).float() + weight_bias


@consumer_fault("NORM-1", smallest="gamma that is not all ones")
class LastGammaForItsNeighbour(PlainTail):
    """The last column is multiplied by the gamma before it."""

    def gain(self, norm_weight: Tensor, weight_bias: float) -> Tensor:
        """Shifted at the end."""
        gain = super().gain(norm_weight, weight_bias)
        gain[-1] = gain[-2]
        return gain


@consumer_fault("NORM-1", smallest="a mean that is not 0")
class MeanSubtracted(PlainTail):
    """The row's mean is subtracted, as LayerNorm does."""

    def norm(self, x: Tensor, gain: Tensor, eps: float) -> Tensor:
        """Centred."""
        centred = x.float() - x.float().mean(-1, keepdim=True)
        root = torch.rsqrt(centred.square().mean(-1, keepdim=True) + eps)
        return (centred * root * gain).to(x.dtype)


class _KeepsTheUnrounded(PlainTail):
    """Has the residual from before its rounding."""

    def add_residual(self, total: Tensor, residual: Tensor) -> Tensor:
        """Kept."""
        self.kept["unrounded"] = total + residual.float()
        return super().add_residual(total, residual)


@consumer_fault("NORM-1", smallest="a residual that rounds")
class NormOfTheUnroundedResidual(_KeepsTheUnrounded):
    """The norm is that of the residual before it is stored."""

    def norm(self, x: Tensor, gain: Tensor, eps: float) -> Tensor:
        """Of the float32 value."""
        return super().norm(self.kept["unrounded"], gain, eps).to(x.dtype)


@consumer_fault("NORM-1", smallest="a mean square with more than 8 bits")
class MeanSquareRounded(PlainTail):
    """The mean square is rounded to 16 bits."""

    def mean_square(self, x: Tensor) -> Tensor:
        """In the activation dtype."""
        return super().mean_square(x).to(x.dtype).float()


@consumer_fault("NORM-2", smallest="T=1")
class WeightBiasIgnored(PlainTail):
    """The 1 of the (1 + gamma) form is not added."""

    def gain(self, norm_weight: Tensor, weight_bias: float) -> Tensor:
        """gamma alone."""
        return norm_weight.float()


@consumer_fault("NORM-2", smallest="a gamma whose 1 + gamma has more than 8 bits")
class WeightBiasAddedIn16Bits(PlainTail):
    """1 + gamma is rounded to the activation dtype before it multiplies."""

    def gain(self, norm_weight: Tensor, weight_bias: float) -> Tensor:
        """Rounded where there is a bias."""
        gain = super().gain(norm_weight, weight_bias)
        return gain.to(self.capacity.dtype).float() if weight_bias else gain


@consumer_fault("NORM-2", smallest="T=1")
class WeightBiasAddedToTheProduct(PlainTail):
    """The bias is added to the normed row, not to gamma."""

    def normed(self, x: Tensor, norm_weight: Tensor, weight_bias: float, eps: float) -> Tensor:
        """x * gamma + 1."""
        return (self.norm(x, norm_weight.float(), eps).float() + weight_bias).to(x.dtype)
