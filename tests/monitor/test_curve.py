import itertools
import xml.etree.ElementTree as ET

import pytest

from pentatron.monitor.curve import loss_curve

SVG = "{http://www.w3.org/2000/svg}"


def points(svg: str) -> list[list[tuple[float, float]]]:
    lines = ET.fromstring(svg).findall(f"{SVG}polyline")
    return [[tuple(map(float, p.split(","))) for p in line.attrib["points"].split()] for line in lines]  # type: ignore[misc]


def test_a_falling_loss_falls_on_the_page() -> None:
    svg = loss_curve("run <1>", [(s, 10.0 / s) for s in range(1, 101)], [(50, 0.4), (100, 0.3)])
    raw, smooth = points(svg)
    assert len(raw) == len(smooth) == 100
    assert all(b[0] > a[0] for a, b in itertools.pairwise(raw)), "steps go right"
    assert raw[-1][1] > raw[0][1], "a smaller loss is further down"
    assert all(0 <= x <= 760 and 0 <= y <= 420 for line in (raw, smooth) for x, y in line)
    root = ET.fromstring(svg)
    assert len(root.findall(f"{SVG}circle")) == 2 + 1, "two validations and one in the legend"
    assert root.find(f"{SVG}text").text == "run <1>"  # type: ignore[union-attr]


def test_a_long_run_makes_a_small_picture_of_the_same_shape() -> None:
    svg = loss_curve("long", [(s, 100 - s / 2000) for s in range(1, 100_001)], [])
    raw, _ = points(svg)
    assert len(raw) == 1000 and len(svg) < 60_000
    assert raw[-1][0] == 740, "the last step is still at the right edge"


@pytest.mark.parametrize("training", [[(1, 2.0)], [(1, 2.0), (2, 2.0)], [(5, 1e-4), (9, 3e4)]])
def test_odd_curves_are_drawn(training: list[tuple[float, float]]) -> None:
    for line in points(loss_curve("odd", training, [])):
        assert all(0 <= x <= 760 and 0 <= y <= 420 for x, y in line)
