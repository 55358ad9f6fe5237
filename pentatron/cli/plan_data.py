"""What `pentatron plan` knows, as data for machines."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from pentatron.cli.plan_report import Report, parts_of, speed_of
from pentatron.cli.plan_words import command
from pentatron.devices import Device
from pentatron.plan.held import total_parameters
from pentatron.plan.search import Layout, usable


def as_data(report: Report) -> dict[str, Any]:
    parameters, active = total_parameters(report.shape)
    chosen = report.chosen
    return {
        "model": report.model,
        "parameters": parameters,
        "active_parameters": active,
        "flops_per_step": report.shown.estimate.flops,
        "gpus": report.search.world,
        "gpu": _device_data(report.search.device),
        "usable_bytes": int(usable(report.search.device)),
        "advice": dataclasses.asdict(report.advice),
        "given": None if report.given is None else _layout_data(report, report.given),
        "layouts": [_layout_data(report, layout) for layout in report.layouts],
        "varied": report.varied,
        "kept": report.search.kept,
        "command": None if chosen is None else command(report.search, chosen[0]),
        "command_of": None if chosen is None else chosen[1],
        "assumed": list(report.assumed),
        "notes": list(report.notices),
    }


def _device_data(device: Device) -> dict[str, Any]:
    return {
        "name": device.name,
        "memory": device.memory,
        "half": device.peak(2),
        "single": device.peak(4),
        "link": device.link,
        "network": device.network,
        "has_bf16": device.chip.bf16,
        "is_gpu": device.is_gpu,
        "has_fp8": device.chip.fp8,
    }


def _layout_data(report: Report, layout: Layout) -> Mapping[str, Any]:
    estimate = layout.estimate
    speed, utilisation = speed_of(layout)
    return {
        "sizes": dataclasses.asdict(layout.shape.grid),
        "settings": dict(layout.settings),
        "fits": layout.fits,
        "bytes": [
            {**parts_of(rank), "spared": rank.spared, "host": rank.held.in_host, "total": rank.total}
            for rank in layout.memory.ranks
        ],
        "largest_bytes": layout.largest.total,
        "largest_bytes_if_recorded": None if layout.if_recorded is None else layout.if_recorded.total,
        "bubble": estimate.bubble,
        "sent_bytes": dataclasses.asdict(estimate.traffic),
        "seconds": {
            "step": estimate.seconds,
            "computing": estimate.computing,
            "waiting": estimate.waiting,
            "sending": dataclasses.asdict(estimate.sending),
        },
        "tokens_per_second_per_gpu": speed,
        "mfu": utilisation,
    }
