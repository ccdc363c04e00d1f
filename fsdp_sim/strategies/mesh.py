"""meshes: shapes of device meshes."""

import math
from itertools import product

from hypothesis import strategies as st

from fsdp_sim.program.check import RANKS_MAX
from fsdp_sim.strategies.arguments import check_bounds, check_range

_AXES_MAX = 3


def meshes(
    *,
    ranks_min: int = 1,
    ranks_max: int = 4,
    axes_min: int = 1,
    axes_max: int = 2,
    exact: bool = True,
) -> st.SearchStrategy[tuple[int, ...]]:
    """Draw the shape of a mesh, outermost axis first; shrinks to fewer axes, then to fewer ranks.

    Args:
        ranks_min: fewest ranks.
        ranks_max: most ranks.
        axes_min: fewest axes.
        axes_max: most axes.
        exact: only powers of two, so that averages over ranks are exact.

    Example:
        >>> meshes(ranks_min=4, ranks_max=4)  # (4,), (1, 4), (2, 2) or (4, 1)

    Raises:
        ConfigError: a number is out of range, or no mesh fits.
    """
    check_range("ranks_min", ranks_min, 1, RANKS_MAX)
    check_range("ranks_max", ranks_max, 1, RANKS_MAX)
    check_bounds("ranks of a mesh", ranks_min, ranks_max)
    check_range("axes_min", axes_min, 1, _AXES_MAX)
    check_range("axes_max", axes_max, 1, _AXES_MAX)
    check_bounds("axes of a mesh", axes_min, axes_max)
    sizes = [n for n in range(1, ranks_max + 1) if not exact or n & (n - 1) == 0]
    shapes = [
        shape
        for axes in range(axes_min, axes_max + 1)
        for shape in product(sizes, repeat=axes)
        if ranks_min <= math.prod(shape) <= ranks_max
    ]
    check_bounds("meshes that fit (exact asks for powers of two)", 1, len(shapes))
    # One rank finds little, and meshes of two axes are many: the odds are set by repetition.
    plain = [shape for shape in shapes if len(shape) == 1 and math.prod(shape) > 1]
    crossed = [shape for shape in shapes if min(shape) > 1 and len(shape) > 1]
    return st.sampled_from(shapes + 3 * plain + 3 * crossed)
