"""What decisions need to know of the device of a process."""

import torch

from pentatron.config.decided import DeviceFacts
from pentatron.config.run import RunConfig
from pentatron.devices import chip_of


def device_facts(config: RunConfig, device: torch.device) -> DeviceFacts:
    if device.type != "cuda":
        return DeviceFacts(device.type)
    name, is_nvidia = torch.cuda.get_device_name(device), not torch.version.hip
    chip = chip_of(name)
    return DeviceFacts(
        device.type,
        name,
        torch.cuda.get_device_capability(device) if is_nvidia else None,
        None if chip is None else chip.teraflops(config.precision.name != "fp32"),
        is_nvidia,
    )
