"""What leaves a model whose sequence was spread over ranks: gathered, its loss made global, its gradients scaled."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ...models.sharding import SequenceShard
from ...models.spec import text_config
from ...ops.sequence_parallel import all_reduce_sum, join_gradients, scale_gradient


def gather_outputs(out: Any, shard: SequenceShard) -> None:
    """What a decoder returns, whole on every rank where the call wants it so; router logits always."""
    if shard.group is None:
        return
    last: Tensor = out.last_hidden_state
    if shard.gathers_outputs:
        whole = last if shard.wants_local_hidden else shard.gather(last, 1)
        states = getattr(out, "hidden_states", None)
        if states:
            done = {id(last): whole} if whole is not last else {}
            if len(states) > 1 and states[0].shape[1] == shard.length != shard.size:
                done[id(states[0])] = states[0]  # embeddings of a decoder that is cut at its layers
            apart = [x for x in states if id(x) not in done]
            gathered = iter(shard.gather(torch.stack(apart), 2)) if apart else iter(())
            out.hidden_states = tuple(done[id(x)] if id(x) in done else next(gathered) for x in states)
        out.last_hidden_state = whole
    routers = getattr(out, "router_logits", None)
    if routers:
        out.router_logits = _gather_router_logits(routers, last.shape[0], shard)
    if shard.gathers_outputs:
        _join(out)


def _join(out: Any) -> None:
    """Give what was gathered one way back, so that the backward's collectives have the same order on every rank."""
    names = ("last_hidden_state", "hidden_states", "router_logits")
    found = {id(x): x for name in names if (value := getattr(out, name, None)) is not None for x in _listed(value)}
    joined = dict(zip(found, join_gradients(list(found.values())), strict=True))
    for name in names:
        value = getattr(out, name, None)
        if value is not None:
            new = tuple(joined[id(x)] for x in _listed(value))
            setattr(out, name, new[0] if isinstance(value, Tensor) else new)


def _listed(value: Tensor | tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return (value,) if isinstance(value, Tensor) else value


def _gather_router_logits(routers: tuple[Tensor, ...], batch: int, shard: SequenceShard) -> tuple[Tensor, ...]:
    """All layers in one collective. In a cut layout every rank has the same auxiliary loss of them, so that each takes
    the gradient of its own tokens only."""
    shaped = [x.reshape(batch, shard.size, -1) for x in routers]
    how = "sum" if shard.gathers_outputs else "slice"
    whole = shard.gather(torch.cat(shaped, -1), 1, backward=how)
    parts = torch.split(whole, [x.shape[-1] for x in shaped], -1)
    return tuple(part if x.ndim == 3 else part.flatten(0, 1) for part, x in zip(parts, routers, strict=True))


def finish(out: Any, shard: SequenceShard, kwargs: dict[str, Any], grad_reduction: str) -> Any:
    """The global loss value of a cut layout, and the gradient's scale, on everything that leaves the model."""
    mean = grad_reduction == "mean"
    factor = (1.0 if mean else 1.0 / shard.ranks) if shard.gathers_outputs else (float(shard.ranks) if mean else 1.0)
    if not shard.gathers_outputs and shard.group is not None and kwargs.get("labels") is not None:
        _globalise_loss(out, shard)
    if factor == 1:
        return out

    def scaled(x: Tensor) -> Tensor:
        x = scale_gradient(x, factor)
        # FSDP2 warns of outputs that are views, since what is done to one in place drops its backward hook. Logits and
        # hidden states are too big for that.
        return x.clone() if x.ndim <= 2 else x

    return _map_floats(out, scaled)


def _globalise_loss(out: Any, shard: SequenceShard) -> None:
    """Every rank reports the whole loss; its gradient stays that of this rank's share."""
    loss = getattr(out, "loss", None)
    if not isinstance(loss, Tensor):
        return
    share = loss.detach()
    aux = getattr(out, "aux_loss", None)
    weight = router_weight(shard.model)
    if isinstance(aux, Tensor) and weight is not None:
        common = weight * aux.detach().to(share.device)  # of the whole sequence already, on every rank
        total = all_reduce_sum(share - common, shard.group) + common  # type: ignore[arg-type]
    else:
        total = all_reduce_sum(share, shard.group)  # type: ignore[arg-type]
    out.loss = loss + (total - share)


def router_weight(model: nn.Module) -> float | None:
    """What a model multiplies its auxiliary loss with: text models keep it, multimodal ones have it in their text config."""
    for holder in (model, text_config(model)):
        weight = getattr(holder, "router_aux_loss_coef", None)
        if weight is not None:
            return float(weight)
    return None


def _map_floats(out: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Apply to every floating tensor with a gradient in an output (a dataclass, a mapping, a tuple), in place where named."""
    if isinstance(out, Tensor):
        return change(out) if out.is_floating_point() and out.requires_grad else out
    if isinstance(out, (tuple, list)):
        return type(out)(_map_floats(x, change) for x in out)
    if hasattr(out, "__dataclass_fields__"):
        for name in out.__dataclass_fields__:
            value = getattr(out, name)
            if isinstance(value, (Tensor, tuple, list)):
                setattr(out, name, _map_floats(value, change))
        return out
    return out
