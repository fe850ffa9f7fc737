"""What is taken apart, and what is not: blocks that look like two projections and an activation and are more."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from scoped_patch import UnsupportedError, patched
from scoped_patch.models.roles import find_roles
from scoped_patch.patches import tiled_mlp as patch_module
from tests.support.models import token_ids
from tests.support.scores import assert_gradients, take_gradients
from tests.tiny_models import build


class Swiglu(nn.Module):
    def __init__(self, **children: nn.Module) -> None:
        super().__init__()
        self.w1, self.w2, self.w3 = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)
        for name, child in children.items():
            setattr(self, name, child)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class Scaled(Swiglu):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * 1.001


class Clamped(Swiglu):
    def forward(self, x: Tensor) -> Tensor:
        return self.w2(F.silu(self.w1(x)).clamp(max=1.0) * self.w3(x))


class WithResidual(Swiglu):
    def forward(self, x: Tensor) -> Tensor:
        return x + super().forward(x)


class WithTensor(Swiglu):
    """One now, and who knows what later."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        if kind == "parameter":
            self.scale = nn.Parameter(torch.ones(()))
        elif kind == "buffer":
            self.register_buffer("scale", torch.ones(()))
        else:
            self.scale = torch.ones(())

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.scale


class UpFirst(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.both, self.down = nn.Linear(8, 24), nn.Linear(12, 8)

    def forward(self, x: Tensor) -> Tensor:
        up, gate = self.both(x).chunk(2, -1)
        return self.down(F.silu(gate) * up)


class GateFirst(UpFirst):
    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.both(x).chunk(2, -1)
        return self.down(F.gelu(gate, approximate="tanh") * up)


class Dropping(Swiglu):
    def forward(self, x: Tensor) -> Tensor:
        return self.drop(super().forward(x))


class DroppingItself(Swiglu):
    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(super().forward(x), 0.5, self.training)


def test_roles_are_told_apart_even_where_all_shapes_agree() -> None:
    roles = find_roles(Swiglu())
    assert roles is not None
    assert (roles.gate, roles.up, roles.down) == ("w1", "w3", "w2")
    assert roles.activation(torch.tensor(2.0)) == F.silu(torch.tensor(2.0))
    roles = find_roles(GateFirst())
    assert roles is not None
    assert (roles.gate, roles.up, roles.down) == (None, "both", "down")


@pytest.mark.parametrize(
    "block",
    [
        Scaled(),
        Clamped(),
        WithResidual(),
        WithTensor("parameter"),
        WithTensor("buffer"),
        WithTensor("attribute"),
        UpFirst(),
        DroppingItself(),
        Swiglu(extra=nn.Sequential(nn.Linear(8, 8))),
        nn.Linear(8, 8),
    ],
    ids=lambda block: type(block).__name__,
)
def test_what_is_more_than_that_is_not_taken_apart(block: nn.Module) -> None:
    assert find_roles(block) is None


def test_a_dropout_layer_is_part_of_the_description() -> None:
    roles = find_roles(Dropping(drop=nn.Dropout(0.5)))
    assert roles is not None
    assert roles.dropouts == ("drop",)


def test_an_activation_whose_memory_is_elsewhere_is_not_read() -> None:
    """As the first FSDP leaves a block outside its forward: parameters are attributes, and views of freed memory."""
    model = build("apertus")[0]
    block = model.model.layers[0].mlp
    for module in (block.act_fn, block.up_proj, block.down_proj):
        for name, parameter in list(module._parameters.items()):
            if parameter is None:
                continue
            del module._parameters[name]
            tensor = parameter.detach().clone()
            module.__dict__[name] = tensor
            tensor.untyped_storage().resize_(0)
    roles = find_roles(block)
    assert roles is not None
    assert roles.activation is block.act_fn


IDS = token_ids(2, 11)


def step(model: nn.Module) -> dict[str, Tensor]:
    model(input_ids=IDS, labels=IDS, use_cache=False).loss.backward()
    return take_gradients(model)


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "glm4v", "apertus"])
def test_known_blocks_never_take_the_general_way(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = build(family, initializer_range=0.3)[0]
    monkeypatch.setattr(patch_module, "tiled_call", None)
    right = step(model)
    children: list[nn.Module] = []
    with patched(model, tiled_mlp=4):
        decoder = getattr(model.model, "language_model", model.model)
        handle = decoder.layers[0].mlp.down_proj.register_forward_hook(lambda module, *_: children.append(module))
        with pytest.raises(TypeError, match="NoneType"):
            step(model)  # somebody looks inside: then the block runs its own forward
        handle.remove()
        model.zero_grad()
        assert_gradients(step(model), right, 1e-5)


def test_a_hook_inside_the_block_sees_every_tile(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build("llama", initializer_range=0.3)[0]
    right = step(model)
    seen: list[int] = []
    model.model.layers[0].mlp.up_proj.register_forward_hook(lambda module, args, out: seen.append(out.shape[-2]))
    with patched(model, tiled_mlp=4):
        model(input_ids=IDS, labels=IDS, use_cache=False).loss.backward()
    assert seen[-8:] == [6, 6, 6, 4] * 2
    assert_gradients(take_gradients(model), right, 1e-5)


class FSDPModule:
    """Stands for torch's mark of a sharded unit."""


class ShardedLinear(FSDPModule, nn.Linear):
    pass


def test_a_sharded_unit_inside_the_block_is_refused_by_name() -> None:
    model = build("llama")[0]
    message = r"model.layers.1.mlp of LlamaForCausalLM .* has a part \(ShardedLinear\) that is an FSDP unit of its own"
    with patched(model, tiled_mlp=4):
        model.model.layers[1].mlp.up_proj.__class__ = ShardedLinear
        model.model.layers[1].mlp.up_proj.register_forward_pre_hook(lambda module, args: None)
        with pytest.raises(UnsupportedError, match=message):
            step(model)
    with pytest.raises(UnsupportedError, match=message):
        patched(model, tiled_mlp=4).plan()


def test_dropout_layers_are_heeded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Active, they go the general way; in eval mode the block is one operation."""
    from transformers import PhiConfig, PhiForCausalLM

    torch.manual_seed(0)
    config = PhiConfig(vocab_size=128, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4)
    model = PhiForCausalLM(config)
    for layer in model.model.layers:
        layer.mlp = DroppingPhi(layer.mlp)
    ways: list[str] = []
    for name in ("tiled_mlp", "tiled_call"):
        original = getattr(patch_module, name)
        monkeypatch.setattr(patch_module, name, lambda *a, o=original, n=name, **k: (ways.append(n), o(*a, **k))[1])
    for training, way in ((True, "tiled_call"), (False, "tiled_mlp")):
        model.train(training)
        ways.clear()
        with patched(model, tiled_mlp=1):
            torch.manual_seed(1)
            found = step(model)
        assert ways == [way, way]
        torch.manual_seed(1)
        assert_gradients(found, step(model), 1e-5)


class DroppingPhi(nn.Module):
    def __init__(self, mlp: Any) -> None:
        super().__init__()
        self.fc1, self.fc2, self.act, self.drop = mlp.fc1, mlp.fc2, mlp.activation_fn, nn.Dropout(0.5)

    def forward(self, hidden_states: Tensor) -> Tensor:
        return self.drop(self.fc2(self.act(self.fc1(hidden_states))))
