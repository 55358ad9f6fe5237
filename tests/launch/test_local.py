import socket

import pytest

from pentatron.config.errors import UserError
from pentatron.launch.local import refuse_used_port


def test_a_port_in_use_is_refused_and_a_free_one_is_not() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(UserError, match=f"port {port} cannot be used"):
            refuse_used_port(port)
    refuse_used_port(port)
