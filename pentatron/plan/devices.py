"""Figures of devices that estimates are made with: what their makers print, without sparsity."""

from dataclasses import dataclass, replace

from pentatron.errors import UserError
from pentatron.monitor.peaks import Peak, peak_of

GIB = 2**30
_TERA, _GIGA = 1e12, 1e9


@dataclass(frozen=True)
class Device:
    """`half` and `single` are operations a second in bf16 and fp32; `link` bytes a second one way to a neighbour in the same
    machine, `network` to one in another. `has_bf16`: it multiplies matrices in bf16, not only in fp16; `has_fp8`: also in fp8."""

    name: str
    memory: int
    half: float
    single: float
    link: float
    network: float
    has_bf16: bool = True
    is_gpu: bool = True
    has_fp8: bool = True

    def peak(self, bytes_of_a_number: int) -> float:
        return self.half if bytes_of_a_number == 2 else self.single


def _gpu(name: str, gigabytes: float, link: float, network: float = 50) -> Device:
    peak = peak_of(name)
    assert peak is not None, f"{name} must be in the table of peaks"
    return _device(name, gigabytes, peak, link, network)


def _device(name: str, gigabytes: float, peak: Peak, link: float, network: float) -> Device:
    rates = peak.half * _TERA, peak.full * _TERA
    return Device(name, int(gigabytes * GIB), *rates, link * _GIGA, network * _GIGA)


def _before_fp8(device: Device) -> Device:
    return replace(device, has_fp8=False)


# Memory as the driver reports it; links and networks in gigabytes a second.
DEVICES = {
    "b200": _gpu("B200", 178, 900),
    "h200": _gpu("H200", 139.8, 450),
    "h100": _gpu("H100", 79.1, 450),
    "h800": _gpu("H800", 79.1, 200),
    "h20": _gpu("H20", 95.5, 450),
    "a100": _before_fp8(_gpu("A100 80 GB", 79.1, 300, 25)),
    "a100-40": _before_fp8(_gpu("A100 40 GB", 39.4, 300, 25)),
    "a800": _before_fp8(_gpu("A800", 79.1, 200, 25)),
    "l40s": _gpu("L40S", 44.4, 32, 12.5),
    "v100": replace(_before_fp8(_gpu("V100 32 GB", 31.7, 150, 12.5)), has_bf16=False),
    "rtx4090": _gpu("RTX 4090", 23.6, 32, 12.5),
    "rtx3090": _before_fp8(_gpu("RTX 3090", 23.6, 32, 12.5)),
    "cpu": replace(_before_fp8(_device("CPU process", 8, Peak(0.05, 0.1), 5, 1)), is_gpu=False),
}


def device_named(name: str) -> Device:
    found = DEVICES.get(name.lower().replace(" ", "").replace("_", "-"))
    if found is None:
        number = f" (a number of GPUs is --gpus {name})" if name.isdecimal() else ""
        raise UserError(
            f"--gpu {name} is not known here{number}; use one of {', '.join(DEVICES)}, or another with --gpu-memory GB"
        )
    return found
