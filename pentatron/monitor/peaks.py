"""What GPUs can compute at best: the denominator of a utilisation, and what plans are made with."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Peak:
    """Dense TFLOP/s of one device. Makers print twice as much for sparse matrices, which nothing here has."""

    half: float
    full: float

    def of(self, half_precision: bool) -> float:
        return self.half if half_precision else self.full


# In the order they are looked for: a longer name before the shorter one it contains.
_PEAKS = {
    "GB200": Peak(2500, 80),
    "B200": Peak(2250, 75),
    "GH200": Peak(989, 67),
    "H200": Peak(989, 67),
    "H100 PCIe": Peak(756, 51),
    "H100 NVL": Peak(835, 60),
    "H100": Peak(989, 67),
    "H800": Peak(989, 67),
    "H20": Peak(148, 44),
    "A100": Peak(312, 19.5),
    "A800": Peak(312, 19.5),
    "A10G": Peak(70, 35),
    "A10": Peak(125, 31.2),
    "L40S": Peak(362, 91.6),
    "L40": Peak(181, 90.5),
    "L4": Peak(121, 30.3),
    "V100": Peak(125, 15.7),
    "T4": Peak(65, 8.1),
    "RTX 4090": Peak(165.2, 82.6),
    "RTX 3090": Peak(71, 35.6),
}


def peak_of(device_name: str) -> Peak | None:
    """The peak of a device by the name its driver gives it; None for one that is not in the table, or a CPU."""
    words = f" {device_name.replace('-', ' ')} "
    return next((peak for name, peak in _PEAKS.items() if f" {name} " in words), None)
