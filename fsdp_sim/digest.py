"""Digest: what of a run must be the same in every process, as one number per rank and kind.

Two forms of every op go in.  The *order* form holds what a runtime decides: operations on streams and
events, host waits, collectives, allocations that a runtime labelled.  The *full* form holds that, and
the operators with their byte ranges, every allocation and every free.  Never in either: addresses,
times, values, source lines, threads.
"""

import sys
from array import array
from collections.abc import Iterable, Sequence
from functools import cache
from hashlib import blake2b

from fsdp_sim.op import Call, Kind, Op

DIGEST_BYTES = 16
_FLUSH_WORDS = 4096
_STRIDED = -1  # in the place of a block's number, which is never negative
_NONE = -1
_SYNCS = frozenset(
    {
        Kind.RECORD_EVENT,
        Kind.WAIT_EVENT,
        Kind.WAIT_STREAM,
        Kind.HOST_WAIT_STREAM,
        Kind.HOST_WAIT_EVENT,
    }
)

Words = Sequence[int]


@cache
def _word(text: str | None) -> int:
    """Return a number that stands for a text, the same in every process."""
    if text is None:
        return _NONE
    return int.from_bytes(blake2b(text.encode(), digest_size=7).digest(), "little")


_CODES = {kind: _word(kind.value) for kind in Kind}
_ATEN = _CODES[Kind.ATEN]


def full_words(op: Op) -> Words:
    """Return the full form of an op, empty when it has none."""
    kind = op.kind
    if kind is Kind.ATEN:
        return _accesses([_ATEN, _word(op.name), op.stream], op)
    if kind is Kind.ALLOC or kind is Kind.FREE:
        code = _CODES[kind]
        return (code, op.stream, op.other, op.nbytes, _word(op.annotation))
    if kind is Kind.COLLECTIVE:
        return _accesses(list(order_words(op)), op)
    return order_words(op)


def order_words(op: Op) -> Words:
    """Return the order form of an op, empty when it has none."""
    kind = op.kind
    if kind in _SYNCS:
        return (_CODES[kind], op.stream, op.other)
    if kind is Kind.RECORD_STREAM:
        return (_CODES[kind], op.stream)
    if kind is Kind.ALLOC and op.annotation is not None:
        return (_CODES[kind], op.stream, op.nbytes, _word(op.annotation))
    if kind is Kind.COLLECTIVE:
        call = () if op.call is None else _call_words(op.call)
        return (_CODES[kind], *call, _word(op.annotation))
    return ()


def _call_words(call: Call) -> Words:
    return (
        len(call.group),
        *call.group,
        call.sequence,
        _word(call.name),
        _word(call.reduce_op),
        _word(call.dtype),
        len(call.sizes),
        *call.sizes,
        _NONE if call.root is None else call.root,
        _NONE if call.peer is None else call.peer,
        call.tag,
    )


def _accesses(words: list[int], op: Op) -> list[int]:
    words.append(len(op.accesses))
    for access in op.accesses:
        words += access[:4]
        strides = access[4]
        if strides is not None:
            words += (_STRIDED, strides[0], len(strides[1]), *strides[1], *strides[2])
    return words


class RankDigest:
    """Digests of one rank's ops, taken in one by one."""

    __slots__ = ("_full", "_full_hash", "_order", "_order_hash")

    def __init__(self) -> None:
        self._full: list[int] = []
        self._order: list[int] = []
        self._full_hash = blake2b(digest_size=DIGEST_BYTES)
        self._order_hash = blake2b(digest_size=DIGEST_BYTES)

    def add(self, op: Op) -> None:
        """Take one op in."""
        full = self._full
        full += full_words(op)
        if op.kind is not Kind.ATEN:
            self._order += order_words(op)
        if len(full) > _FLUSH_WORDS:
            self._flush()

    def full(self) -> bytes:
        """Return the digest of all full forms."""
        self._flush()
        return self._full_hash.digest()

    def order(self) -> bytes:
        """Return the digest of all order forms."""
        self._flush()
        return self._order_hash.digest()

    def _flush(self) -> None:
        self._full_hash.update(_bytes(self._full))
        self._order_hash.update(_bytes(self._order))
        self._full.clear()
        self._order.clear()


def _bytes(words: list[int]) -> bytes:
    packed = array("q", words)
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


def combined(digests: Iterable[bytes]) -> str:
    """Return the digest of a run from those of its ranks, in order of rank."""
    return blake2b(b"".join(digests), digest_size=DIGEST_BYTES).hexdigest()
