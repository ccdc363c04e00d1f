"""Digest: what of a run must be the same in every process, as one number per rank and kind.

Two forms of every op go in.  The *order* form holds what a runtime decides: operations on streams and
events, host waits, collectives, allocations that a runtime labelled.  The *full* form holds that, and
the operators with their byte ranges, every allocation and every free.  Never in either: addresses,
times, values, source lines, threads.
"""

import sys
from array import array
from collections.abc import Iterable, Sequence
from hashlib import blake2b

from fsdp_sim.op import Call, Kind, Op

DIGEST_BYTES = 16
_FLUSH_WORDS = 4096
_STRIDED = -1  # in the place of a block's number, which is never negative
_NONE = -1

# Every op of a run passes here, and looking a member up on its enum costs 90 ns in Python 3.11.
_ATEN, _ALLOC, _FREE, _COLLECTIVE = Kind.ATEN, Kind.ALLOC, Kind.FREE, Kind.COLLECTIVE
_SYNCS = frozenset(
    {
        Kind.RECORD_EVENT,
        Kind.WAIT_EVENT,
        Kind.WAIT_STREAM,
        Kind.HOST_WAIT_STREAM,
        Kind.HOST_WAIT_EVENT,
    }
)


class _WordTable(dict[str | None, int]):
    """Text -> a number that stands for it, the same in every process."""

    def __missing__(self, text: str | None) -> int:
        word = _NONE
        if text is not None:
            word = int.from_bytes(blake2b(text.encode(), digest_size=7).digest(), "little")
        self[text] = word
        return word


_WORDS = _WordTable()
_CODES = {kind: _WORDS[kind.value] for kind in Kind}
_ATEN_CODE = _CODES[_ATEN]


def add_words(ops: Iterable[Op], full: list[int], order: list[int]) -> None:
    """Append the full form of ops of one rank, and the order form of those that have one."""
    for op in ops:
        kind = op.kind
        if kind is _ATEN:
            full += (_ATEN_CODE, _WORDS[op.name], op.stream, len(op.accesses))
        elif kind is _ALLOC or kind is _FREE:
            full += (_CODES[kind], op.stream, op.other, op.nbytes, _WORDS[op.annotation])
            if kind is _ALLOC and op.annotation is not None:
                order += (_CODES[kind], op.stream, op.nbytes, _WORDS[op.annotation])
        else:
            words = _order_words(op)
            order += words
            full += words
            if kind is _COLLECTIVE:
                full.append(len(op.accesses))
        for access in op.accesses:
            full += access[:4]
            strides = access[4]
            if strides is not None:
                full += (_STRIDED, strides[0], len(strides[1]), *strides[1], *strides[2])


def _order_words(op: Op) -> Sequence[int]:
    """Return the order form of what is neither an operator nor memory."""
    kind = op.kind
    if kind in _SYNCS:
        return (_CODES[kind], op.stream, op.other)
    if kind is _COLLECTIVE:
        call = () if op.call is None else _call_words(op.call)
        return (_CODES[kind], *call, _WORDS[op.annotation])
    if kind is Kind.RECORD_STREAM:
        return (_CODES[kind], op.stream)
    return ()


def _call_words(call: Call) -> Sequence[int]:
    return (
        len(call.group),
        *call.group,
        call.sequence,
        _WORDS[call.name],
        _WORDS[call.reduce_op],
        _WORDS[call.dtype],
        len(call.sizes),
        *call.sizes,
        _NONE if call.root is None else call.root,
        _NONE if call.peer is None else call.peer,
        call.tag,
    )


class RankDigest:
    """Digests of one rank's ops, taken in some at a time."""

    __slots__ = ("_full", "_full_hash", "_order", "_order_hash")

    def __init__(self) -> None:
        self._full: list[int] = []
        self._order: list[int] = []
        self._full_hash = blake2b(digest_size=DIGEST_BYTES)
        self._order_hash = blake2b(digest_size=DIGEST_BYTES)

    def extend(self, ops: Iterable[Op]) -> None:
        """Take ops in."""
        add_words(ops, self._full, self._order)
        if len(self._full) > _FLUSH_WORDS:
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
