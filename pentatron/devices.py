"""Tables of GPU specifications from data sheets, for utilisation figures and for planning."""

from dataclasses import dataclass

from pentatron.errors import UserError

GIB = 2**30
# The dimensions of fp8 matrix products must be multiples of this.
FP8_MULTIPLE = 16
_TERA, _GIGA = 1e12, 1e9


@dataclass(frozen=True)
class Chip:
    """Dense TFLOP/s of a GPU in half precision (`half`) and fp32 (`full`), and supported matrix dtypes.

    Data sheets print twice the dense rate for sparse matrices.
    """

    half: float
    full: float
    bf16: bool = True
    fp8: bool = False

    def teraflops(self, half_precision: bool) -> float:
        return self.half if half_precision else self.full


# Matched in this order: a name that contains another name must come first.
_CHIPS = {
    "GB200": Chip(2500, 80, fp8=True),
    "B200": Chip(2250, 75, fp8=True),
    "GH200": Chip(989, 67, fp8=True),
    "H200": Chip(989, 67, fp8=True),
    "H100 PCIe": Chip(756, 51, fp8=True),
    "H100 NVL": Chip(835, 60, fp8=True),
    "H100": Chip(989, 67, fp8=True),
    "H800": Chip(989, 67, fp8=True),
    "H20": Chip(148, 44, fp8=True),
    "A100": Chip(312, 19.5),
    "A800": Chip(312, 19.5),
    "A10G": Chip(70, 35),
    "A10": Chip(125, 31.2),
    "L40S": Chip(362, 91.6, fp8=True),
    "L40": Chip(181, 90.5, fp8=True),
    "L4": Chip(121, 30.3, fp8=True),
    "V100": Chip(125, 15.7, bf16=False),
    "T4": Chip(65, 8.1, bf16=False),
    "RTX 4090": Chip(165.2, 82.6, fp8=True),
    "RTX 3090": Chip(71, 35.6),
}


def find_chip(device_name: str) -> Chip | None:
    """Returns the chip for a device name reported by the driver; None for a CPU or an unknown GPU."""
    words = f" {device_name.replace('-', ' ')} "
    return next((chip for name, chip in _CHIPS.items() if f" {name} " in words), None)


@dataclass(frozen=True)
class Device:
    """A device that layouts are planned for.

    `link` and `network`: bytes per second in one direction to another GPU of the same node, and of another
    node.
    """

    name: str
    chip: Chip
    memory: int
    link: float
    network: float
    is_gpu: bool = True

    def peak(self, bytes_of_a_number: int) -> float:
        """Peak FLOP/s for elements of this size."""
        return self.chip.teraflops(bytes_of_a_number == 2) * _TERA


def _device(name: str, gigabytes: float, link: float, network: float = 50, cpu: Chip | None = None) -> Device:
    chip = cpu or find_chip(name)
    assert chip is not None, f"{name} must be in the table of chips"
    return Device(name, chip, int(gigabytes * GIB), link * _GIGA, network * _GIGA, is_gpu=cpu is None)


# Memory in GiB as the driver reports it; links and networks in GB/s.
DEVICES = {
    "b200": _device("B200", 178, 900),
    "h200": _device("H200", 139.8, 450),
    "h100": _device("H100", 79.1, 450),
    "h800": _device("H800", 79.1, 200),
    "h20": _device("H20", 95.5, 450),
    "a100": _device("A100 80 GB", 79.1, 300, 25),
    "a100-40": _device("A100 40 GB", 39.4, 300, 25),
    "a800": _device("A800", 79.1, 200, 25),
    "l40s": _device("L40S", 44.4, 32, 12.5),
    "v100": _device("V100 32 GB", 31.7, 150, 12.5),
    "rtx4090": _device("RTX 4090", 23.6, 32, 12.5),
    "rtx3090": _device("RTX 3090", 23.6, 32, 12.5),
    "cpu": _device("CPU process", 8, 5, 1, cpu=Chip(0.05, 0.1)),
}


def find_device(name: str) -> Device:
    """Returns the device of this name in the table; UserError if it is unknown."""
    if (device := DEVICES.get(name.lower().replace(" ", "").replace("_", "-"))) is None:
        number = f" (a number of GPUs is --gpus {name})" if name.isdecimal() else ""
        raise UserError(
            f"--gpu {name} is unknown{number}; use one of {', '.join(DEVICES)}, or another with --gpu-memory GB"
        )
    return device
