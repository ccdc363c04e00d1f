"""Overlap: whether two strided views of one storage share a byte."""

from collections.abc import Iterator

Strides = tuple[int, tuple[int, ...], tuple[int, ...]] | None

RUNS_MAX = 1 << 20
"""Contiguous runs of one view that are compared one by one; beyond, the views count as overlapping."""


def overlaps(lo: int, hi: int, strides: Strides, lo2: int, hi2: int, strides2: Strides) -> bool:
    """Whether two views share a byte.

    Args:
        lo: first byte of the first view.
        hi: end of its range.
        strides: ``(itemsize, sizes, strides)`` in elements, or None if every byte is touched.
        lo2: first byte of the second view.
        hi2: end of its range.
        strides2: as ``strides``.
    """
    if max(lo, lo2) >= min(hi, hi2):
        return False
    first, second = _Runs(lo, hi, strides), _Runs(lo2, hi2, strides2)
    if first.count > RUNS_MAX or second.count > RUNS_MAX:
        return True
    return _meet(first, second)


class _Runs:
    """A view as contiguous runs of bytes of one length, in rising order.

    Attributes:
        count: number of runs.
        length: bytes of each.
    """

    def __init__(self, lo: int, hi: int, strides: Strides) -> None:
        self._lo = lo
        self.length = hi - lo
        self._axes: list[tuple[int, int]] = []
        if strides is not None:
            self._fold(*strides)
        self.count = 1
        for size, _ in self._axes:
            self.count *= size

    def _fold(self, itemsize: int, sizes: tuple[int, ...], strides: tuple[int, ...]) -> None:
        """Merge what is contiguous, smallest stride first; an expanded dimension adds no bytes."""
        axes = sorted((stride * itemsize, size) for size, stride in zip(sizes, strides) if size > 1)
        self.length = itemsize
        for stride, size in axes:
            if stride <= self.length and not self._axes:
                self.length += stride * (size - 1)
            else:
                self._axes.insert(0, (size, stride))

    def __iter__(self) -> Iterator[int]:
        """Yield where each run starts, in rising order."""
        starts = [self._lo]
        for size, stride in self._axes:
            starts = [start + index * stride for start in starts for index in range(size)]
        return iter(sorted(starts))


def _meet(first: _Runs, second: _Runs) -> bool:
    """Whether two rising sequences of runs share a byte."""
    ones, others = iter(first), iter(second)
    one, other = next(ones, None), next(others, None)
    while one is not None and other is not None:
        if one + first.length <= other:
            one = next(ones, None)
        elif other + second.length <= one:
            other = next(others, None)
        else:
            return True
    return False
