"""ContextStats: what a context has done, in numbers."""

from dataclasses import dataclass


@dataclass
class ContextStats:
    """What a context has done since its construction.

    Attributes:
        steps: completions of a backward pass.
        gathers: all-gathers issued; a unit of several dtypes counts several.
        reductions: gradients reduced, one for each dtype of a unit and backward; what ends a window
            of microbatches is not counted.
        prefetches: units gathered early.
        used_prefetches: of these, how many were then used.
        unused_prefetches: of these, how many were resharded without a use.
        on_demand_gathers: units gathered when they were needed.
        full_nbytes: bytes of full weights now.
        peak_full_nbytes: the highest value of `full_nbytes`.
    """

    steps: int = 0
    gathers: int = 0
    reductions: int = 0
    prefetches: int = 0
    used_prefetches: int = 0
    unused_prefetches: int = 0
    on_demand_gathers: int = 0
    full_nbytes: int = 0
    peak_full_nbytes: int = 0
