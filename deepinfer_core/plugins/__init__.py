"""Plugins: found from metadata, loaded under a guard, asked one by one, chosen by rule, frozen into tables.

Reading order: discovery, selection, loader, registry, probe, choice, plan, tables.
"""

from .choice import check_slot, check_user_keys, choose
from .claims import Kind, claimed, resolve
from .discovery import Candidate, Discovery, discover
from .explain import explain_plan, unproved
from .failure import Failure
from .loader import load_planned, load_plugins
from .making import blamed, guarded
from .plan import plan_from_json, plan_to_json, verify_plan
from .probe import DeviceChoice, choose_device
from .regions import ChosenRegions, choose_regions
from .registry import PROVIDER_HOOKS, LoadedPlugin, Registry
from .requests import request_from_data, request_to_data
from .tables import OpTable, WrapOp, freeze

__all__ = [
    "PROVIDER_HOOKS",
    "Candidate",
    "ChosenRegions",
    "DeviceChoice",
    "Discovery",
    "Failure",
    "Kind",
    "LoadedPlugin",
    "OpTable",
    "Registry",
    "WrapOp",
    "blamed",
    "check_slot",
    "check_user_keys",
    "choose",
    "choose_device",
    "choose_regions",
    "claimed",
    "discover",
    "explain_plan",
    "freeze",
    "guarded",
    "load_planned",
    "load_plugins",
    "plan_from_json",
    "plan_to_json",
    "request_from_data",
    "request_to_data",
    "resolve",
    "unproved",
    "verify_plan",
]
