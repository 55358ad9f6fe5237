"""The place where processes meet."""


def meeting_point(url: str) -> tuple[str, int] | None:
    """`tcp://host:1234` → (host, 1234), or None if it does not look so."""
    host, _, port = url.removeprefix("tcp://").rpartition(":")
    if not url.startswith("tcp://") or not host or not (port.isascii() and port.isdigit()):
        return None
    # The brackets around an IPv6 address belong to the URL, not to the address.
    return (host.strip("[]"), int(port)) if 1 <= int(port) <= 65535 else None
