"""One scale for a fused e4m3 weight whose parts have one each, for a kernel that takes no more than one.

Nothing calls this: no product of quant.device_choice is such a kernel. torch._scaled_mm with one scale for all (a GPU
where it takes none for each row) is given ones, and the parts' scales go to its float32 sums (quant.scaled_products).
It would be used by a product whose operator multiplies its own sums by one scale, as a step of quant.post_processing
before any other (behind e4m3fnuz the codes would be of another kind), chosen in quant.device_choice.

The rule: the joint scale is the largest of the parts' scales; parts with a smaller one are dequantized and quantized
again, since under another scale their codes would stand for other numbers; parts that have it already are not touched.
Activation scales of a checkpoint are limits, not part of stored numbers: the largest covers them all.
"""

from __future__ import annotations

import torch

STRIP_NBYTES = 16 << 20  # of float32 numbers held at a time


def joint_scale(scales: torch.Tensor) -> torch.Tensor:
    """The largest of the parts' scales [sections], as [1]; NaN where one is. For weights, and for static inputs."""
    return scales.amax(0, keepdim=True)


def requantize_to_joint(weight: torch.Tensor, scales: torch.Tensor, sections: tuple[int, ...]) -> torch.Tensor:
    """Bring weight float8_e4m3fn [O, I], in place, under the joint scale of its parts, which is returned: float32 [1].

    scales float32 [sections]. Reads the scales on the host, so a device is waited for.
    """
    joint = joint_scale(scales)
    smaller = (scales < joint).tolist()
    for part, scale, requantized in zip(weight.split(list(sections)), scales.split(1), smaller, strict=True):
        if requantized:
            _requantize(part, scale, joint)
    return joint


def _requantize(part: torch.Tensor, scale: torch.Tensor, joint: torch.Tensor) -> None:
    size = max(1, STRIP_NBYTES // (4 * max(1, part.shape[1])))
    for strip in part.split(size):
        strip.copy_(strip.float().mul_(scale).div_(joint))
