"""Layers of the user's own: `--spec MODULE FUNCTION`."""

import inspect

import torch

from pentatron.config.core import CoreTransformerConfig
from pentatron.errors import UserError
from pentatron.nn.spec import (
    ModuleSpec,
    TransformerBlockSubmodules,
    build_module,
    import_named,
    importing_from_here,
)
from pentatron.parallel.pieces import held_parameters


def user_spec(config: CoreTransformerConfig) -> ModuleSpec | TransformerBlockSubmodules | None:
    """What the user's function returns: it gets the configuration if it takes an argument. None without --spec."""
    if not config.spec:
        return None
    module, name = config.spec
    what = f"--spec {module} {name}"
    found = import_named(module, name, what)
    if callable(found):
        takes_config = bool(inspect.signature(found).parameters)
        with importing_from_here():
            found = found(config) if takes_config else found()
    if not isinstance(found, ModuleSpec | TransformerBlockSubmodules):
        raise UserError(
            f"{what} gives a {type(found).__name__}; it must give a ModuleSpec of a layer, or "
            "TransformerBlockSubmodules with one for each"
        )
    return found


def check_layers(config: CoreTransformerConfig, block: TransformerBlockSubmodules) -> None:
    """Builds each kind of layer once, without memory: what is wrong with a spec is found before anything starts."""
    tried: list[ModuleSpec] = []
    for number, spec in enumerate(block.layer_specs, 1):
        if any(spec is other for other in tried):
            continue
        tried.append(spec)
        with torch.device("meta"):
            layer = build_module(spec, config=config, layer_number=number)
        try:
            held_parameters(layer)
        except TypeError as error:
            raise UserError(
                f"layer {number} of --spec {' '.join(config.spec)}: {error}; derive it from DeclaringModule and make "
                "its parameters with declare()"
            ) from None
