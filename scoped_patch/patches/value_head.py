"""Value-head models: a `state_dict` with the names that `named_parameters()` has.

Trainer classes that hold a language model in `pretrained_model` and a value head in `v_head` answer `state_dict()` with
names of their own, which neither `load_state_dict()` nor a sharding library that goes by parameter names understands.
"""

from __future__ import annotations

import types
from collections.abc import Hashable, Iterable
from typing import Any

from torch import nn

from ..engine import Edit, Patch, Support, attribute_slot
from ..models.modules import module_paths
from ..models.unwrap import unwrap

RANK = 50


class ValueHead(Patch):
    """Added by `patched(...)` to every scope on a value-head model (known by its children `v_head` and `pretrained_model`).

    Inside the scope `state_dict()` is that of `nn.Module`: its keys are the names of the parameters and buffers, so that
    `load_state_dict(state_dict())` is a round trip. Outside it is the class's own again.
    """

    name = "value_head"

    def supports(self, target: Any) -> Support:
        if unwrap(target).value_head is None:
            return Support(False, "no value-head model: looked for the children `v_head` and `pretrained_model`")
        return Support(True)

    def fingerprint(self, target: Any) -> Hashable:
        return id(unwrap(target).value_head)

    def plan(self, target: Any) -> Iterable[Edit]:
        found = unwrap(target)
        wrapper = found.value_head
        if wrapper is None or type(wrapper).state_dict is nn.Module.state_dict:
            return
        path = module_paths(found.outer).get(id(wrapper)) or type(wrapper).__name__
        yield Edit(
            attribute_slot(wrapper, "state_dict", f"{path}.state_dict"),
            lambda prior: types.MethodType(plain_state_dict, wrapper),
            "replace",
            "names as named_parameters() has them",
            RANK,
            commutes=True,
            token=(self.name, id(wrapper)),
            to="nn.Module.state_dict",
        )


def plain_state_dict(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """`nn.Module.state_dict`, with its arguments and result."""
    return nn.Module.state_dict(self, *args, **kwargs)
