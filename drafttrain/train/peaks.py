"""Peak throughput of devices: dense bfloat16 products in FLOP/s, from the makers' data sheets (without sparsity)."""

from __future__ import annotations

import torch

# The first name that occurs in the device's name counts. A longer name comes before its prefix.
PEAKS = (
    ("GB200", 2500e12),  # NVIDIA GB200 NVL72 data sheet, 2024
    ("B200", 2250e12),  # NVIDIA DGX B200 data sheet, 2024: 72 PFLOP/s in FP8 sparse for 8, a quarter of it dense in BF16
    ("H200", 989.4e12),  # NVIDIA H200 data sheet, 2023
    ("GH200", 989.4e12),  # NVIDIA GH200 data sheet, 2023
    ("H100 PCIe", 756e12),  # NVIDIA H100 data sheet, 2022
    ("H100 NVL", 835e12),  # NVIDIA H100 NVL data sheet, 2023
    ("H100", 989.4e12),  # SXM5; NVIDIA H100 white paper, 2022, table 2
    ("H800", 989.4e12),  # as the H100: its links differ
    ("A100", 312e12),  # NVIDIA A100 white paper, 2020, table 1
    ("A800", 312e12),
    ("A10G", 70e12),  # AWS G5 instances
    ("A10", 125e12),  # NVIDIA A10 data sheet, 2021
    ("L40S", 362e12),  # NVIDIA L40S data sheet, 2023
    ("L4", 121e12),  # NVIDIA L4 data sheet, 2023
    ("RTX 4090", 165.2e12),  # NVIDIA Ada white paper, 2022, appendix A, accumulated in FP32
    ("RTX 3090", 71e12),  # NVIDIA Ampere GA102 white paper, 2020, appendix A, accumulated in FP32
    ("MI300X", 1307.4e12),  # AMD Instinct MI300X data sheet, 2023
)


def peak_of(device: torch.device) -> float | None:
    """The device's peak in FLOP/s; None for a CPU and for a device that is not in the table."""
    return named_peak(torch.cuda.get_device_name(device)) if device.type == "cuda" else None


def named_peak(name: str) -> float | None:
    """The peak in FLOP/s of the device with this name; None if it is not in the table."""
    return next((peak for known, peak in PEAKS if known in name), None)
