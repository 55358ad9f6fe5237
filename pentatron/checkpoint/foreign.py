"""What a folder holds that is no checkpoint of ours, told by the names of its files alone: nothing is opened."""

from pathlib import Path

from pentatron.text import counted

_PICKLED = ("*.bin", "*.pt", "*.pth", "*.ckpt")


def foreign_kind(path: Path) -> str | None:
    """A sentence about a folder of another program, with what can be done with it; None: nothing that is known."""
    if not path.is_dir():
        return None
    steps = sorted(p.name for p in path.glob("iter_*") if p.is_dir())
    inside = path / steps[-1] if steps else path
    said = f" ({counted(len(steps), 'step')}, up to {steps[-1]})" if steps else ""
    if (inside / ".metadata").exists() or next(inside.glob("*.distcp"), None) is not None:
        return f"a checkpoint of torch.distributed, as Megatron-LM's torch_dist format has it{said}; its metadata is pickle"
    if next(inside.glob("mp_rank_*"), None) is not None:
        return f"a checkpoint of Megatron-LM in its legacy format, a pickled file for each rank{said}"
    if next(inside.glob("global_step*"), None) is not None or (path / "zero_to_fp32.py").exists():
        return "a checkpoint of DeepSpeed, in pickled files"
    if (path / "config.json").is_file():
        weights = sorted(p.name for p in path.glob("*.safetensors"))
        pickled = sorted(p.name for pattern in _PICKLED for p in path.glob(pattern))
        held = (
            counted(len(weights), "safetensors file")
            if weights
            else f"{pickled[0]} alone, which is pickle"
            if pickled
            else "no weights"
        )
        return f"a Hugging Face folder with {held}; load it with --load, or import it with: pentatron import {path} OUT"
    if next((p for pattern in _PICKLED for p in path.glob(pattern)), None) is not None:
        return "a folder with pickled files, which are not read here: reading them may run code"
    return None
