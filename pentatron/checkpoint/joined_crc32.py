"""The CRC-32 of two runs of bytes, one after the other, from that of each; zlib has it, Python's module does not show it.

A CRC-32 is the remainder of a polynomial over two elements, its highest power in the lowest bit. Bytes that follow multiply what came before by
x to the power of their bits; the sums of both are then added.
"""

import functools

_ONE = 1 << 31
_DIVISOR = 0xEDB88320


def joined_crc32(first: int, second: int, second_bytes: int) -> int:
    return _product(_shift(second_bytes), first) ^ second


@functools.cache
def _shift(count: int) -> int:
    """x to the power of the bits of so many bytes."""
    power, square = _ONE, _ONE >> 8
    while count:
        if count & 1:
            power = _product(square, power)
        square = _product(square, square)
        count >>= 1
    return power


def _product(a: int, b: int) -> int:
    """Of two remainders: for every power in `a`, from the lowest on, `b` times that power is added."""
    found, bit = 0, _ONE
    while a:
        if a & bit:
            found ^= b
            a ^= bit
        bit >>= 1
        b = (b >> 1) ^ _DIVISOR if b & 1 else b >> 1
    return found
