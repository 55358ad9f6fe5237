"""How much memory the machine has for its processes, as far as the system tells."""

from pathlib import Path

_UNLIMITED = 2**60


def host_memory(root: Path = Path("/")) -> tuple[int, int] | None:
    """Bytes of memory and swap together, and those that are available; no more than the control group allows."""
    try:
        text = (root / "proc/meminfo").read_text(encoding="ascii")
    except OSError:
        return None
    lines = dict(line.split(":", 1) for line in text.splitlines() if ":" in line)
    found = {name: int(value.split()[0]) * 1024 for name, value in lines.items() if value.split()}
    total = found.get("MemTotal", 0) + found.get("SwapTotal", 0)
    free = found.get("MemAvailable", found.get("MemFree", 0)) + found.get("SwapFree", 0)
    limit, used = _control_group(root / "sys/fs/cgroup")
    return min(total, limit), max(0, min(free, limit - used))


def _given_back(used: Path) -> int:
    """What the kernel takes back as soon as somebody needs it: files that were read are counted as used for as long as nobody does."""
    try:
        lines = (used.parent / "memory.stat").read_text(encoding="ascii").splitlines()
    except OSError:
        return 0
    found = dict(line.split() for line in lines if len(line.split()) == 2)
    return int(found.get("total_inactive_file", found.get("inactive_file", "0")))


def _control_group(folder: Path) -> tuple[int, int]:
    """A container's limit and use, in either version of control groups."""
    for names in (
        ("memory.max", "memory.current"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
    ):
        try:
            limit, used = ((folder / name).read_text(encoding="ascii").strip() for name in names)
        except OSError:
            continue
        if limit.isdigit() and used.isdigit() and int(limit) < _UNLIMITED:
            return int(limit), max(0, int(used) - _given_back(folder / names[1]))
    return _UNLIMITED, 0
