"""What stands in an empty slot."""

from pentatron.nn.spec import IdentityOp

__all__ = ["IdentityOp"]
