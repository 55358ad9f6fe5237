"""The table of GPUs: found by driver names, and importable without torch."""

import subprocess
import sys

import pytest

from pentatron.devices import DEVICES, find_chip


@pytest.mark.parametrize(
    ("name", "half"),
    [
        ("NVIDIA H200", 989),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA H100 80GB HBM3", 989),
        ("NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA GeForce RTX 4090", 165.2),
        ("Tesla T4", 65),
        ("NVIDIA L40S", 362),
    ],
)
def test_dense_peaks_are_found_by_the_drivers_name(name: str, half: float) -> None:
    found = find_chip(name)
    assert found is not None and found.half == half


def test_an_unknown_device_has_no_peak() -> None:
    assert find_chip("Some CPU with H2000 in its name") is None


def test_a_planned_gpu_has_the_figures_of_its_chip() -> None:
    for device in DEVICES.values():
        if device.is_gpu:
            assert device.chip == find_chip(device.name)
    assert DEVICES["h100"].peak(2) == 989e12 and DEVICES["h100"].peak(4) == 67e12


def test_the_table_and_the_formats_need_no_torch() -> None:
    code = "import sys, pentatron.devices, pentatron.text; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
