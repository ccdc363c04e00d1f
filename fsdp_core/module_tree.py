"""ModuleTree: the units of a context in their module trees - roots, names, and the order of both directions."""

import weakref
from collections.abc import Container, Iterable, Sequence
from weakref import WeakKeyDictionary

from torch import nn

from fsdp_core.unit_protocol import Unit


class ModuleTree:
    """What the trees of modules say about units. It holds no module, and no unit.

    Attributes:
        roots: modules with no unit above them.
        names: path of each unit's module relative to its root; a root's is empty.
        units: all units, weakly, in the order of their registration.
    """

    def __init__(self) -> None:
        self.roots: WeakKeyDictionary[nn.Module, None] = WeakKeyDictionary()
        self.names: WeakKeyDictionary[nn.Module, str] = WeakKeyDictionary()
        self.units: list[weakref.ref[Unit]] = []

    def derive(self, registered: dict[nn.Module, Unit]) -> tuple[list[nn.Module], list[nn.Module]]:
        """Find roots, name modules and units.

        Args:
            registered: each module of a unit, in the order of registration.

        Returns:
            The modules in the order in which forward, and in which backward, enters them.
        """
        children: dict[nn.Module, None] = {}
        for module in registered:
            _collect_fsdp_children(module, registered, children)
        roots = [module for module in registered if module not in children]
        self.roots.update(dict.fromkeys(roots))
        numbers: dict[nn.Module, int] = {}
        for number, root in enumerate(roots):
            self._name_modules(root, registered, number, numbers)
        backward: dict[nn.Module, None] = {}
        for root in reversed(roots):
            _collect_backward_order(root, registered, backward)
        self._name_units(registered.values(), numbers)
        return list(numbers), list(backward)

    def _name_modules(
        self,
        root: nn.Module,
        registered: Container[nn.Module],
        number: int,
        numbers: dict[nn.Module, int],
    ) -> None:
        for name, module in root.named_modules():
            if module in registered and module not in numbers:
                numbers[module] = number
                self.names[module] = name

    def _name_units(self, units: Iterable[Unit], numbers: dict[nn.Module, int]) -> None:
        """Tell each unit the names of its modules, given the number of each module's root."""
        for unit in dict.fromkeys(units):
            modules = [module for ref in unit.modules if (module := ref()) is not None]
            identity = unit.identity
            identity.fqn = "+".join(self.names[module] for module in modules)
            identity.name = identity.fqn or "<root>"
            if len(self.roots) > 1:
                identity.name += f" (root {numbers[modules[0]]})"
            self.units.append(unit.ref)

    def root_index(self, module: nn.Module) -> int:
        """Return the number of the first root that a module lies below."""
        roots: Sequence[nn.Module] = list(self.roots)
        return next(index for index, root in enumerate(roots) if module in root.modules())


def unit_of(module: nn.Module) -> Unit:
    """Return the unit that a sharded module is part of."""
    unit: Unit = module.__dict__["fsdp_unit"]
    return unit


def living(refs: Iterable["weakref.ref[Unit]"]) -> list[Unit]:
    """Return the units behind weak references, in order, that still live."""
    return [unit for ref in tuple(refs) if (unit := ref()) is not None]


def _collect_fsdp_children(
    module: nn.Module, registered_modules: Container[nn.Module], children: dict[nn.Module, None]
) -> None:
    """Collect the nearest registered descendants of a module, not looking inside them."""
    for child in module.children():
        if child in registered_modules:
            children[child] = None
        else:
            _collect_fsdp_children(child, registered_modules, children)


def _collect_backward_order(
    module: nn.Module, registered_modules: Container[nn.Module], order: dict[nn.Module, None]
) -> None:
    """Collect the order in which backward enters units: outer before inner, last before first.

    Why not the forward order reversed: the outputs of an outer unit get their gradients before
    those of the units inside it.
    """
    if module in registered_modules:
        order.setdefault(module, None)
    for child in reversed(tuple(module.children())):
        _collect_backward_order(child, registered_modules, order)
