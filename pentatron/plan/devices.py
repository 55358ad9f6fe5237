"""Figures of devices that estimates are made with: what their makers print, without sparsity."""

from dataclasses import dataclass

from pentatron.config.errors import UserError

GIB = 2**30
_TERA, _GIGA = 1e12, 1e9


@dataclass(frozen=True)
class Device:
    """`half` and `single` are operations a second in bf16 and fp32; `link` bytes a second one way to a neighbour in the same
    machine, `network` to one in another."""

    name: str
    memory: int
    half: float
    single: float
    link: float
    network: float

    def peak(self, bytes_of_a_number: int) -> float:
        return self.half if bytes_of_a_number == 2 else self.single


def _device(
    name: str, gigabytes: float, half: float, single: float, link: float, network: float = 50
) -> Device:
    return Device(name, int(gigabytes * GIB), half * _TERA, single * _TERA, link * _GIGA, network * _GIGA)


# Memory as the driver reports it; links and networks in gigabytes a second.
DEVICES = {
    "b200": _device("B200", 178, 2250, 75, 900),
    "h200": _device("H200", 139.8, 989, 67, 450),
    "h100": _device("H100", 79.1, 989, 67, 450),
    "h800": _device("H800", 79.1, 989, 67, 200),
    "h20": _device("H20", 95.5, 148, 44, 450),
    "a100": _device("A100 80 GB", 79.1, 312, 19.5, 300, 25),
    "a100-40": _device("A100 40 GB", 39.4, 312, 19.5, 300, 25),
    "a800": _device("A800", 79.1, 312, 19.5, 200, 25),
    "l40s": _device("L40S", 44.4, 362, 91.6, 32, 12.5),
    "v100": _device("V100 32 GB", 31.7, 125, 15.7, 150, 12.5),
    "rtx4090": _device("RTX 4090", 23.6, 165, 82.6, 32, 12.5),
    "rtx3090": _device("RTX 3090", 23.6, 71, 35.6, 32, 12.5),
    "cpu": _device("CPU process", 8, 0.05, 0.1, 5, 1),
}


def device_named(name: str) -> Device:
    found = DEVICES.get(name.lower().replace(" ", "").replace("_", "-"))
    if found is None:
        raise UserError(
            f"--gpu {name} is not known here; use one of {', '.join(DEVICES)}, or another with --gpu-memory GB"
        )
    return found


def in_words(count: float) -> str:
    """Bytes with three digits or so: `71.3 GiB`."""
    for unit, size in (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if count >= size:
            return f"{count / size:.3g} {unit}" if count / size < 1000 else f"{count / size:.0f} {unit}"
    return f"{count:.0f} B"
