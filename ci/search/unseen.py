"""Bugs planted by someone who has not seen how programs are drawn and checked.

A bug is a name that says what is wrong, and a context manager that makes ``fsdp_core`` wrong while it is
open. It is opened anew around each run, before any model is built. Most replace one function:

    @contextmanager
    def forget_the_last_parameter() -> Iterator[None]:
        def wrong(copy_in):
            @wraps(copy_in)
            def copies_less(group):
                group.members[-1].full.grad = None
                copy_in(group)
            return copies_less
        with replaced(ParameterGroup, "copy_in", wrong):
            yield

    BUGS = {"the last parameter's gradient is forgotten": forget_the_last_parameter}

``python -m ci.search.planted --only forgotten`` tells whether generated programs find it. It must not make
Python fail: a ``TypeError`` of the bug's own says nothing about what is found.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager

BUGS: dict[str, Callable[[], AbstractContextManager[None]]] = {}
