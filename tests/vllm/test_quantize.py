"""NVFP4 state dicts: values against a float64 reference and a hand-written quantiser."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
import torch

from scoped_patch.compose import compiled_code_exists
from scoped_patch.engine.errors import BadOptionError
from scoped_patch.vllm import quantize_state_dict

from ..support.ranks import spawn
from .support import checkpoints

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("compressed_tensors") is None, reason="needs the compressed-tensors package"
)
NAME = "layers.0.mlp.down_proj"


def one(weight: torch.Tensor, **options: object) -> dict[str, torch.Tensor]:
    return {
        name.removeprefix(NAME + "."): tensor
        for name, tensor in quantize_state_dict({NAME + ".weight": weight}, **options)  # type: ignore[arg-type]
    }


def test_every_value_is_within_half_a_step_of_float64() -> None:
    weight = torch.randn(64, 96, dtype=torch.float64)
    out = one(weight.bfloat16())
    assert {k: (v.dtype, tuple(v.shape)) for k, v in out.items()} == {
        "weight_packed": (torch.uint8, (64, 48)),
        "weight_scale": (torch.float8_e4m3fn, (64, 6)),
        "weight_global_scale": (torch.float32, (1,)),
    }
    back = checkpoints.dequantize({f"x.{k}": v for k, v in out.items()})["x.weight"].double()
    exact = weight.bfloat16().double()
    blocks = exact.unflatten(1, (-1, 16)).abs()
    # The widest gap between codes is 2 (from 4 to 6), and the e4m3 scale is off by one part in 16 at most.
    bound = blocks.amax(-1, keepdim=True) / 6 * (1 + 1 / 16 * 6)
    assert ((back - exact).unflatten(1, (-1, 16)).abs() <= bound).all()
    assert (back - exact).norm() / exact.norm() < 0.12


def test_the_same_codes_as_the_hand_written_quantiser() -> None:
    state = checkpoints.weights(checkpoints.config("dense"), 3)
    ours = dict(quantize_state_dict(state, "w4a4", input_global_scales=448 * 6 / 8.0))
    theirs = checkpoints.quantize(state, "w4a4")
    assert set(ours) == set(theirs)
    for name, tensor in theirs.items():
        assert ours[name].dtype == tensor.dtype
        same = (ours[name].view(torch.uint8) == tensor.view(torch.uint8)).float().mean() if tensor.dim() else 1
        assert same > 0.99, name  # ties may round either way
    assert torch.equal(ours["model.norm.weight"], state["model.norm.weight"])


def test_quantising_compiles_nothing() -> None:
    """Compiled code would make later class patches of this process refuse, and needs a compiler that a host may lack."""
    out = one(torch.randn(32, 64))
    assert out["weight_packed"].any()
    assert not compiled_code_exists()


def test_fused_shards_share_their_global_scale() -> None:
    state = {
        f"layers.1.self_attn.{n}.weight": torch.randn(32, 32) * f for n, f in (("q_proj", 1), ("k_proj", 5), ("v_proj", 3))
    }
    state["layers.1.self_attn.o_proj.weight"] = torch.randn(32, 32)
    out = dict(quantize_state_dict(state))
    scales = {n.split(".")[3]: t.item() for n, t in out.items() if n.endswith("weight_global_scale")}
    assert (
        scales["q_proj"]
        == scales["k_proj"]
        == scales["v_proj"]
        == pytest.approx(2688 / state["layers.1.self_attn.k_proj.weight"].abs().max().item())
    )
    assert scales["o_proj"] != scales["q_proj"]


@pytest.mark.parametrize("block_only", [False, True])
def test_zero_weights_have_finite_scales_and_come_back_as_zeros(block_only: bool) -> None:
    weight = torch.randn(16, 64) if block_only else torch.zeros(16, 64)
    weight[:, 16:32] = 0
    out = one(weight)
    assert out["weight_global_scale"].isfinite().all()
    assert (out["weight_global_scale"] > 0).all()
    assert out["weight_scale"].float().isfinite().all()
    assert (out["weight_scale"].float() <= 448).all()
    back = checkpoints.dequantize({f"x.{k}": v for k, v in out.items()})["x.weight"]
    assert back[:, 16:32].abs().max() == 0
    assert back.isfinite().all()


def test_scales_never_leave_the_range_of_e4m3_before_the_cast() -> None:
    out = one(torch.randn(32, 64) * 1e-30)
    assert out["weight_scale"].float().isfinite().all()
    big = one(torch.randn(32, 64) * 1e30)
    assert big["weight_scale"].float().max() <= 448
    back = checkpoints.dequantize({f"x.{k}": v for k, v in big.items()})["x.weight"]
    assert back.isfinite().all()


def test_halves_with_a_shared_scale_have_the_codes_of_the_whole() -> None:
    """D24: the global scale comes from the whole weight, whatever the rank holds."""
    weight = torch.randn(32, 64)
    whole = one(weight)
    parts = spawn(2, _half, weight.tolist())
    for key in ("weight_packed", "weight_scale"):
        assert parts[0][key] + parts[1][key] == whole[key].view(torch.uint8).tolist()
    assert parts[0]["weight_global_scale"] == parts[1]["weight_global_scale"] == whole["weight_global_scale"].tolist()
    alone = one(weight[:16])["weight_global_scale"], one(weight[16:])["weight_global_scale"]
    assert alone[0] != alone[1]


def _half(rank: int, world: int, weight: list[list[float]]) -> dict[str, Any]:
    rows = len(weight) // world
    part = torch.tensor(weight)[rank * rows : (rank + 1) * rows]
    out = one(part, process_group=torch.distributed.group.WORLD)
    return {k: (v if k == "weight_global_scale" else v.view(torch.uint8)).tolist() for k, v in out.items()}


@pytest.mark.parametrize("transposed", [False, True])
def test_experts_in_one_parameter_come_out_one_by_one(transposed: bool) -> None:
    gate_up, down = torch.randn(3, 64, 48), torch.randn(3, 48, 32)
    state = {"l.mlp.experts.gate_up_proj": gate_up, "l.mlp.experts.down_proj": down, "l.mlp.gate.weight": torch.randn(3, 48)}
    if transposed:
        state |= {k: v.transpose(1, 2).contiguous() for k, v in state.items() if v.dim() == 3}
    out = dict(quantize_state_dict(state))
    split = {
        f"l.mlp.experts.{e}.{n}.weight": w
        for e in range(3)
        for n, w in (("gate_proj", gate_up[e, :32]), ("up_proj", gate_up[e, 32:]), ("down_proj", down[e]))
    }
    want = dict(quantize_state_dict(split))
    assert set(out) == {*want, "l.mlp.gate.weight"}
    assert all(torch.equal(out[n].view(torch.uint8), t.view(torch.uint8)) for n, t in want.items())


def test_refusals() -> None:
    with pytest.raises(BadOptionError, match="multiple of 16"):
        one(torch.randn(4, 24))
    with pytest.raises(BadOptionError, match="input_global_scale"):
        one(torch.randn(4, 32), scheme="w4a4")
    with pytest.raises(BadOptionError, match="positive"):
        one(torch.randn(4, 32), scheme="w4a4", input_global_scales=0.0)
    with pytest.raises(BadOptionError, match="different input_global_scales"):
        list(
            quantize_state_dict(
                {"a.q_proj.weight": torch.randn(4, 32), "a.k_proj.weight": torch.randn(4, 32)},
                "w4a4",
                input_global_scales={"a.q_proj": 1.0, "a.k_proj": 2.0},
            )
        )
    with pytest.raises(BadOptionError, match="scheme"):
        one(torch.randn(4, 32), scheme="int4")
