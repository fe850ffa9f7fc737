"""Stage one model's new weights: load them into its shadow, process each layer once it is whole, prove what came out."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch

from .checks import check_use, check_values
from .coverage import Box, box_of_view, overlap
from .errors import RejectedWeight
from .familiar import Familiar
from .graph import address, raw_bytes, reach, storage_key
from .kinds import is_attention, is_kv_cache_method, is_method
from .manifest import missing_by_layer
from .pages import advise
from .plans import Books, Plans, Watch, key_of, run
from .process import Processed, processed_state
from .recorder import Recorder
from .shadow import Shadow, ShadowLayer, Staged, containers, tied_group
from .source import Source
from .target import Site


class StagedModel:
    """The staged update of one model.

    Args:
        site: the model and what is known of the engine around it.
        source: the update's stream.
        carry: take the unwritten part of a parameter from the live one where that keeps the checkpoint's format.
        on_complete: called with the layers that have just been processed (layers that share a parameter come together);
            says whether it has committed them.
    """

    def __init__(self, site: Site, source: Source, *, carry: bool, on_complete: Callable[[list[Processed]], bool]) -> None:
        self.site = site
        self.source = source
        self.carry = carry
        self.on_complete = on_complete
        self._placeholders: dict[int, Staged] = {}
        self._reals: dict[int, Staged] = {}
        self._live: dict[int, str] = {}
        self._hold: list[torch.Tensor] = []  # a freed tensor's identity may be used again, so none is freed meanwhile
        self._addresses: dict[ShadowLayer, dict[str, int]] = {}
        self._released: list[ShadowLayer] = []
        self._call: list[tuple[Staged, Box, bool]] | None = None
        with torch._C.DisableTorchFunctionSubclass():  # vLLM's parameter classes answer every question in Python
            self.shadow = Shadow(site.model)
            for layer in self.shadow.layers:
                found = reach(layer.live, self.shadow.tree, numbers=False).tensors
                self._addresses[layer] = {path: address(tensor) for path, tensor in found.items()}
                for path, tensor in found.items():
                    self._live.setdefault(storage_key(tensor), f"{layer.name}.{path}")
                    self._hold.append(tensor)
        self._plans = Plans()
        self._familiar = Familiar(self._plans)
        self._recorder = Recorder(self._live, self._wrote, self._redirect)
        for staged in self.staged():
            self._install_loaders(staged)

    def staged(self) -> Iterator[Staged]:
        seen: set[int] = set()
        for layer in self.shadow.layers:
            for staged in layer.params.values():
                if id(staged) not in seen:
                    seen.add(id(staged))
                    yield staged

    # ------------------------------------------------------------------------------------------------- loading
    def load(self, weights: Iterator[tuple[str, torch.Tensor]]) -> None:
        """Run the model's own `load_weights` on the shadow."""
        with torch.no_grad(), self.site.context(on_device=False), self._recorder:
            self.shadow.root.load_weights(weights)  # type: ignore[operator]
        self._process_complete(None)

    def _install_loaders(self, staged: Staged) -> None:
        from vllm.model_executor.model_loader.weight_utils import default_weight_loader

        for at, face in enumerate(staged.faces):
            self._placeholders[storage_key(face)] = staged
            original = getattr(face, "weight_loader", default_weight_loader)

            def staged_loader(*args: Any, at: int = at, original: Callable[..., Any] = original, **kwargs: Any) -> Any:
                return self._run_loader(staged, at, original, args, kwargs)

            face.weight_loader = staged_loader  # type: ignore[attr-defined]

    def _run_loader(
        self, staged: Staged, at: int, loader: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        layer, attribute = staged.owners[at]
        face, own = staged.faces[at], layer.shadow._parameters.get(attribute)
        weight, mine = None, bool(args) and (args[0] is face or args[0] is own)
        for given in (*args, *kwargs.values()):
            if isinstance(given, torch.Tensor) and given is not face and given is not own:
                weight = given
                break
        name = self.source.name_of(weight)
        self.source.used.add(name)
        if staged.processed:
            if staged.lenient:
                return True
            name = name if self.source.current else staged.label
            raise RejectedWeight(name, "loader", f"{name}: arrived after {staged.owners[0][0].name} was complete without it")
        if weight is not None and weight.is_floating_point() != staged.is_floating_point:
            raise RejectedWeight(name, "dtype", f"{name}: is {weight.dtype}, but {staged.label} holds {staged.dtype}")
        outer = self._call, self._recorder.trace
        if outer[1] is not None:
            outer[1].append((loader, args, kwargs))  # a loader that calls another does more than its own copies
        key = None if kwargs or weight is None or not mine else key_of(staged, loader, args)
        plan = None if key is None else self._plans.get(layer, key)
        # A plan of one copy that covers everything leaves nothing of what was there before.
        real = self._materialise(staged, blank=plan is not None and len(plan) == 1 and plan[0][0] is None)
        if plan is not None:
            run(plan, real, args[1])
            self._credit(staged, name, [box for _, _, box in plan])
            if outer[0] is not None:
                outer[0].extend((staged, box, False) for _, _, box in plan)
            self._process_complete(staged)
            return None
        view = layer.shadow._parameters[attribute]
        before = real.clone() if staged.tied and staged.sources and name not in staged.sources else None
        writes: list[tuple[Staged, Box, bool]] = []
        trace: list[tuple[Any, Any, Any]] = []
        self._call, self._recorder.trace = writes, trace
        books, watch = Books(view, layer.shadow), Watch()
        try:
            with contextlib.nullcontext() if key is None else watch:
                out = loader(
                    *(view if a is face else a for a in args), **{k: view if v is face else v for k, v in kwargs.items()}
                )
        finally:
            self._call, self._recorder.trace = outer
            if outer[0] is not None:
                outer[0].extend(writes)
        self._note(staged, name, writes)
        check_use(staged, name, weight, [b for target, b, fill in writes if target is staged and not fill], self.site.tp_size)
        if before is not None and not torch.equal(raw_bytes(before), raw_bytes(real)):
            first = next(iter(staged.sources))
            raise RejectedWeight(name, "tied", f"{name}: is tied to {first} in the live model, but arrived with other values")
        if not books.same():
            self._plans.distrust(layer)
        elif key is not None and out is None and not watch.hidden:
            self._plans.learn(layer, key, trace, (real, args[1]), [box for target, box, fill in writes if target is staged])
        self._process_complete(staged)
        return out

    def _note(self, staged: Staged, name: str, writes: list[tuple[Staged, Box, bool]]) -> None:
        copies = [box for target, box, fill in writes if target is staged and not fill]
        # A fill before a copy is preparation; one beside it (vocabulary padding) is content.
        own = [(box, fill) for target, box, fill in writes if target is staged]
        self._credit(staged, name, [box for box, fill in own if not (fill and any(overlap(box, c) for c in copies))])

    def _credit(self, staged: Staged, name: str, boxes: list[Box]) -> None:
        staged.sources.setdefault(name, []).extend(boxes)
        for box in boxes:
            staged.coverage.add(box)

    def _wrote(self, key: int, view: torch.Tensor, fill: bool) -> None:
        staged = self._reals.get(key)
        if staged is None:
            return
        box = box_of_view(staged.shape, staged.stride, tuple(view.shape), view.stride(), view.storage_offset())  # type: ignore[arg-type]
        if box is None:
            return  # stays missing, so that the update is refused rather than trusted
        if self._call is not None:
            self._call.append((staged, box, fill))
        else:
            name = self.source.current or "?"
            self.source.used.add(name)
            self._note(staged, name, [(staged, box, fill)])

    def _redirect(self, key: int, view: torch.Tensor) -> torch.Tensor | None:
        """Loaders that write to a parameter directly meet its placeholder; their write is led to the real tensor."""
        staged = self._placeholders.get(key)
        if staged is None:
            return None
        if staged.processed and not staged.lenient:
            name = self.source.current or staged.label
            raise RejectedWeight(name, "loader", f"{name}: arrived after {staged.owners[0][0].name} was complete without it")
        return self._materialise(staged)

    def _materialise(self, staged: Staged, blank: bool = False) -> torch.Tensor:
        """The real tensor of a parameter. `blank`: if it is new, what is in it does not matter."""
        if staged.real is None:
            staged.real = self._allocate(staged, blank)
            self._reals[storage_key(staged.real)] = staged
            with torch._C._DisableTorchDispatch(), torch._C.DisableTorchFunctionSubclass():
                for (owner, attribute), face in zip(staged.owners, staged.faces, strict=True):
                    view = staged.real.data
                    if face.stride() != staged.stride:
                        view = view.as_strided(face.shape, face.stride()).data
                    view.__class__, view.__dict__ = face.__class__, dict(face.__dict__)
                    owner.shadow._parameters[attribute] = view  # type: ignore[assignment]
        return staged.real

    def _allocate(self, staged: Staged, blank: bool) -> torch.Tensor:
        layer, name = staged.owners[0]
        with torch._C._DisableTorchDispatch():
            real = torch.empty_strided(staged.shape, staged.stride, dtype=staged.dtype, device=self.site.device_of(layer.live))
            advise(real)
            if blank:
                return real
            if len(staged.shape) < 3 and staged.numel <= 4096:
                # Some loaders compare a scale with what is there before they write it; created scales start from 1.
                real.fill_(1)
            if self.carry and staged.carried is not None:
                real.copy_(staged.carried.data)
            elif staged.optional and is_kv_cache_method(layer.method):
                self._default(layer, name, real)
        return real

    def _default(self, layer: ShadowLayer, name: str, real: torch.Tensor) -> None:
        """What the quantisation method itself starts this parameter from (KV-cache scales: a "not loaded" mark)."""
        scratch = torch.nn.Module()
        scratch.__class__ = type(layer.live)
        scratch.__dict__.update({k: v for k, v in layer.shadow.__dict__.items() if k != "_parameters"})
        scratch.__dict__["_parameters"] = {}
        layer.method.create_weights(scratch)
        real.data.copy_(scratch._parameters[name])  # type: ignore[arg-type]

    # ------------------------------------------------------------------------------------------------- processing
    def _process_complete(self, staged: Staged | None, final: bool = False) -> None:
        """Process the layers that `staged` made whole (None: look at all, for loaders that write directly)."""
        layers = self.shadow.layers if staged is None else [layer for layer, _ in staged.owners]
        for layer in layers:
            if not layer.processed and (staged is not None or layer.touched) and self._ready(layer):
                group = tied_group(layer) if any(p.tied for p in layer.params.values()) else [layer]
                if len(group) > 1 and not final:
                    continue  # another name may still write the same place, and must agree
                if all(map(self._ready, group)):
                    self._process(group)

    def _ready(self, layer: ShadowLayer) -> bool:
        if is_attention(layer.live):
            return False
        # An optional parameter that has begun to arrive is waited for.
        return all(p.coverage.complete() or (p.optional is not None and not p.sources) for p in layer.params.values())

    def _process(self, group: list[ShadowLayer]) -> None:
        with torch.no_grad():
            with torch._C._DisableTorchDispatch():
                for layer in group:
                    check_values(layer)
                    for name, staged in layer.params.items():
                        if staged.real is None and staged.optional is not None:
                            self._supply(layer, name, staged)
            for layer in group:
                layer.processed = True
                if is_method(layer.method) or is_attention(layer.live):
                    self._familiar.process(layer, self._recorder, functools.partial(self._run_processing, layer))
            with torch._C._DisableTorchDispatch():
                results = [processed_state(layer, self.shadow.tree) for layer in group]
                for layer in group:
                    for staged in layer.params.values():
                        self._forget(staged)
                if self.on_complete(results):
                    for layer in group:
                        self._release(layer)

    def _forget(self, staged: Staged) -> None:
        """What was made of a parameter is kept elsewhere, and may be laid out anew: do not hold both."""
        if staged.real is not None:
            self._reals.pop(storage_key(staged.real), None)
            staged.real = None

    def _run_processing(self, layer: ShadowLayer) -> None:
        shadow: Any = layer.shadow
        with self.site.processing():
            if is_method(layer.method):
                shadow.quant_method.process_weights_after_loading(shadow)
                if hasattr(shadow, "update_param_tp_status"):
                    shadow.update_param_tp_status()
            if is_attention(layer.live):
                shadow.process_weights_after_loading(self.site.dtype)

    def _release(self, layer: ShadowLayer) -> None:
        """Forget a committed layer's staging: only its placeholders stay, for loaders that ask for them."""
        placeholders = {name: staged.face(layer, name) for name, staged in layer.params.items()}
        layer.shadow.__dict__ = {**layer.live.__dict__, "_parameters": placeholders}
        self._released.append(layer)

    def _supply(self, layer: ShadowLayer, name: str, staged: Staged) -> None:
        """An optional parameter that did not come: any finite value does, since the scheme does not read it."""
        real = self._materialise(staged)
        if not is_kv_cache_method(layer.method):
            real.data.fill_(1)

    def finish_tied(self) -> None:
        """Process the tied layers: no other name can come any more."""
        self._process_complete(None, final=True)

    def finish_deferred(self) -> None:
        """Process the layers that read other layers' weights, once all of those are done."""
        for layer in self._released:  # what they read now is live
            layer.shadow.__dict__ = layer.live.__dict__
        above = {name for layer in self.shadow.layers if layer.processed for name in containers(layer.name)}
        for layer in self.shadow.layers:
            if layer.processed or not is_attention(layer.live):
                continue
            if layer.touched or layer.name in above:
                self._process([layer])

    # ------------------------------------------------------------------------------------------------- the end
    def missing(self, everything: bool) -> dict[str, list[str]]:
        """Per layer, what has not arrived; of untouched layers too, if `everything`."""
        return missing_by_layer(self.shadow.layers, everything, self.carry)

    def settle(self) -> None:
        """Process the touched layers whose rest is carried over from the live parameters (`expect="partial"` or names)."""
        for layer in self.shadow.layers:
            if layer.touched and not layer.processed and not is_attention(layer.live):
                group = tied_group(layer)
                for one in group:
                    for name, staged in one.params.items():
                        if staged.real is None and staged.carried is not None:
                            one.shadow._parameters[name] = staged.carried  # type: ignore[assignment]
                self._process(group)

    def moved(self) -> int:
        """How many tensors of the updated layers are no longer where they were when the update began."""
        count = 0
        with torch._C.DisableTorchFunctionSubclass():
            for layer, before in self._addresses.items():
                if layer.processed:
                    after = reach(layer.live, self.shadow.tree, numbers=False).tensors
                    count += sum(path not in after or address(after[path]) != at for path, at in before.items())
        return count

    def close(self) -> None:
        """Let go of everything staged now. The shadow's objects refer to each other: it would wait for a collector."""
        self._recorder.leave()
        for layer in self.shadow.layers:
            layer.shadow.__dict__ = layer.live.__dict__
            for staged in layer.params.values():
                staged.real = None
        self._reals.clear()
        self._live.clear()  # a recorder left behind in another thread refuses nothing any more
        self._addresses.clear()
        self._hold.clear()
