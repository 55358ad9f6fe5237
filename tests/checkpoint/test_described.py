"""Tests the model settings that a checkpoint describes."""

from pathlib import Path

import pytest

from pentatron.checkpoint.find import saved_architecture, saved_settings
from pentatron.checkpoint.format import Manifest, TensorRecord
from pentatron.checkpoint.store import Checkpoint
from pentatron.errors import UserError
from pentatron.settings.model import MoEConfig


def test_a_setting_that_is_not_known_makes_another_model() -> None:
    def found(**config: dict[str, object]) -> Checkpoint:
        tensors = {f"weights/{i}": TensorRecord("float32", (9, 9), ()) for i in range(3)}
        return Checkpoint(Path("step"), Manifest(0, {}, tensors, {}, config))

    sizes = {"ffn_hidden_size": 4, "num_attention_heads": 1, "kv_channels": 4, "num_query_groups": 1, "hidden_size": 4,
             "max_position_embeddings": 8, "vocab_size": 9, "padded_vocab_size": 16, "num_layers": 3}  # fmt: skip
    older = found(model={**sizes, "window_size": [7, 0]}, data={"of_another_version": 1})
    model, moe = saved_architecture(older)
    assert (model.num_layers, model.window_size, moe) == (3, (7, 0), MoEConfig())
    for newer in (found(model={"sinks": True}), found(model={}, moe={"sinks": True})):
        for read in (saved_settings, saved_architecture):
            with pytest.raises(UserError, match=r"does not know \(sinks\); use the version that saved it"):
                read(newer)
    for missing in ("vocab_size", "kv_channels"):
        with pytest.raises(UserError, match=f"lacks {missing}, without which"):
            saved_architecture(found(model={**sizes, missing: None}))
    with pytest.raises(UserError, match="it has no settings"):
        saved_architecture(found())
