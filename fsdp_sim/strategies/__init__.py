"""Hypothesis strategies for distributed training programs; one subject a file.

arguments.py   what arguments must hold; the draws that all are made of
tree.py        module_trees, layers
mesh.py        meshes
placement.py   placements
policy.py      policies, precisions, contexts, optimizers
owner.py       owner_maps
order.py       execution_orders
schedule.py    schedules
step.py        steps
program.py     programs
fault.py       fault_plans
invalid.py     invalid_programs
"""

from fsdp_sim.strategies.fault import FAULT_ACTIONS, FaultPlan, fault_plans
from fsdp_sim.strategies.invalid import INVALID_KINDS, InvalidProgram, invalid_programs
from fsdp_sim.strategies.mesh import meshes
from fsdp_sim.strategies.order import Orders, execution_orders
from fsdp_sim.strategies.owner import OWNER_KINDS, OwnerMap, owner_maps
from fsdp_sim.strategies.placement import placements
from fsdp_sim.strategies.policy import contexts, optimizers, policies, precisions
from fsdp_sim.strategies.program import programs
from fsdp_sim.strategies.schedule import schedules
from fsdp_sim.strategies.step import steps
from fsdp_sim.strategies.tree import layers, module_trees

__all__ = [
    "FAULT_ACTIONS",
    "INVALID_KINDS",
    "OWNER_KINDS",
    "FaultPlan",
    "InvalidProgram",
    "Orders",
    "OwnerMap",
    "contexts",
    "execution_orders",
    "fault_plans",
    "invalid_programs",
    "layers",
    "meshes",
    "module_trees",
    "optimizers",
    "owner_maps",
    "placements",
    "policies",
    "precisions",
    "programs",
    "schedules",
    "steps",
]
