"""Which rectangle of a tensor of ours is which rectangle of a tensor of Megatron-LM's.

Saving, loading in any layout and both kinds of their files follow from the same list, as with Hugging Face's names (0027).
"""

import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

from pentatron.config.model import MoEConfig, TransformerConfig
from pentatron.config.moe_layers import moe_layers
from pentatron.errors import UserError
from pentatron.interchange.names import IN_LAYERS, OUTSIDE_LAYERS, Row
from pentatron.models.shapes import logical_shapes
from pentatron.parallel.pieces import Shape, overlap

_IN_LAYER = re.compile(r"layers\.(\d+)\.(.+)")
_STACKED = "decoder.layers."
VOCABULARY = ("embedding.word.weight", "head.weight")


@dataclass(frozen=True)
class Link:
    """`size` elements of ours from `at` on are those of theirs from `start` on.

    Theirs has the axis of layers in front, or not; where it is one expert, it lacks ours of experts.
    """

    ours: str
    at: Shape
    size: Shape
    theirs: str
    start: Shape
    # How many of their axes come before ours, and how many of ours they lack.
    before: int = 0
    dropped: int = 0

    @property
    def their_size(self) -> Shape:
        return (1,) * self.before + self.size[self.dropped :]

    def to_theirs(self, at: Shape, size: Shape) -> tuple[Shape, Shape]:
        """Where in theirs a smaller rectangle of ours is, one within this link: (start, size)."""
        moved = tuple(i - j for i, j in zip(at, self.at, strict=True))[self.dropped :]
        start = tuple(i + j for i, j in zip(self.start, (0,) * self.before + moved, strict=True))
        return start, (1,) * self.before + size[self.dropped :]

    def to_ours(self, start: Shape, size: Shape) -> tuple[Shape, Shape]:
        """Where in ours a smaller rectangle of theirs is, one within this link: (start, size)."""
        moved = tuple(i - j for i, j in zip(start, self.start, strict=True))[self.before :]
        kept = self.dropped
        at = (*self.at[:kept], *(i + j for i, j in zip(self.at[kept:], moved, strict=True)))
        return at, (*self.size[:kept], *size[self.before :])

    def common(self, start: Shape, size: Shape) -> tuple[Shape, Shape] | None:
        """What a rectangle of theirs shares with this link."""
        return overlap(start, size, self.start, self.their_size)


def tensors_of(model: TransformerConfig, moe: MoEConfig) -> dict[str, Shape]:
    """Every tensor of a model of ours; with the bias of routers that have one, which is no parameter."""
    shapes = dict(logical_shapes(model, moe))
    if moe.moe_router_enable_expert_bias and moe.num_experts:
        for name in [name for name in shapes if name.endswith(".mlp.router.weight")]:
            shapes[name.removesuffix("weight") + "bias"] = (moe.num_experts,)
    return shapes


def is_stacked(model: TransformerConfig, moe: MoEConfig) -> bool:
    """Whether Megatron-LM writes all layers in one tensor: it does where they are alike, and no pattern was given."""
    return not moe.num_experts or all(moe_layers(moe.moe_layer_freq, model.num_layers))


def written_links(model: TransformerConfig, moe: MoEConfig) -> dict[str, list[Link]]:
    """Of every tensor of ours, under each name that it is written as."""
    stacked = is_stacked(model, moe)
    found: dict[str, list[Link]] = {}
    has_experts = {
        name.split(".")[1] for name in tensors_of(model, moe) if name.endswith(".mlp.router.weight")
    }
    for ours, shape in tensors_of(model, moe).items():
        row, layer, kind = _row_of(ours)
        every = row.also and layer is not None and layer in has_experts
        names = row.theirs if every else row.theirs[:1]
        found[ours] = [_whole(ours, shape, name.format(kind=kind), layer, stacked) for name in names]
    return found


def read_links(
    model: TransformerConfig, moe: MoEConfig, names: Collection[str], prefix: str = ""
) -> dict[str, list[Link]]:
    """Of every tensor of ours, the links to what a file has of it; `prefix` comes before each of its names.

    A tensor of which it has nothing is linked to the usual name, which is then missing.
    """
    return {
        ours: list(_links_to(ours, shape, names, prefix)) for ours, shape in tensors_of(model, moe).items()
    }


def _links_to(ours: str, shape: Shape, names: Collection[str], prefix: str) -> Iterator[Link]:
    row, layer, kind = _row_of(ours)
    for base in row.theirs:
        for stacked in (True, False) if layer is not None else (False,):
            whole = _whole(ours, shape, base.format(kind=kind), layer, stacked, prefix)
            candidates: list[list[Link]] = [[whole]]
            if row.halves:
                candidates.append(_halves(whole))
            if row.experts:
                each = [_of_expert(whole, number) for number in range(shape[0])]
                candidates += [each, [half for one in each for half in _halves(one)]]
            for links in candidates:
                if links[0].theirs in names:
                    yield from links
                    return
    yield _whole(ours, shape, row.theirs[0].format(kind=kind), layer, True, prefix)


def _whole(ours: str, shape: Shape, base: str, layer: str | None, stacked: bool, prefix: str = "") -> Link:
    origin = (0,) * len(shape)
    if layer is None:
        return Link(ours, origin, shape, f"{prefix}{base}", origin)
    if stacked:
        return Link(ours, origin, shape, f"{prefix}{_STACKED}{base}", (int(layer), *origin), before=1)
    return Link(ours, origin, shape, f"{prefix}{_STACKED}{layer}.{base}", origin)


def _halves(link: Link) -> list[Link]:
    """Gate and up as tensors of their own."""
    along = len(link.size) - 2 if len(link.size) > 1 else 0
    half = link.size[along] // 2
    size = (*link.size[:along], half, *link.size[along + 1 :])
    first, second = ((*link.at[:along], link.at[along] + i, *link.at[along + 1 :]) for i in (0, half))
    return [
        Link(link.ours, at, size, f"{link.theirs}_{name}", link.start, link.before, link.dropped)
        for at, name in ((first, "w"), (second, "v"))
    ]


def _of_expert(link: Link, number: int) -> Link:
    name = link.theirs.replace(".experts.experts.", f".experts.experts.{number}.")
    start = link.start[: link.before] + link.start[link.before + 1 :]
    return Link(link.ours, (number, *link.at[1:]), (1, *link.size[1:]), name, start, link.before, dropped=1)


def _row_of(ours: str) -> tuple[Row, str | None, str]:
    """The row of a tensor of ours, its layer, and whether it is a weight or a bias."""
    within = _IN_LAYER.fullmatch(ours)
    layer, rest = (within[1], within[2]) if within else (None, ours)
    for row in IN_LAYERS if within else OUTSIDE_LAYERS:
        found = re.fullmatch(re.escape(row.ours).replace(r"\{kind\}", "(?P<kind>weight|bias)"), rest)
        if found:
            return row, layer, found.groupdict().get("kind", "")
    raise UserError(
        f"Megatron-LM has no tensor like {ours}, so this model cannot be exchanged with it; leave out --ckpt-format"
    )


def their_shapes(links: Mapping[str, list[Link]], layers: int, vocabulary: int) -> dict[str, Shape]:
    """How large every tensor is that is written: all layers, and the vocabulary with its padding."""
    shapes: dict[str, Shape] = {}
    for of_tensor in links.values():
        for link in of_tensor:
            rows = (vocabulary, *link.size[1:]) if link.ours in VOCABULARY else link.size
            shapes[link.theirs] = (layers, *rows) if link.before else rows
    return shapes
