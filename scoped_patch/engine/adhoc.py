"""One-line patches: `replace_attribute`, `replace_item`, `wrap_call`."""

from __future__ import annotations

import inspect
import sys
import types
import weakref
from collections.abc import Callable, Hashable, Iterable, MutableMapping
from typing import Any, Literal

import wrapt

from .attributes import attribute_slot, item_slot
from .edits import Counter, Edit, EditPatch
from .errors import BadOptionError, BadTargetError, TargetError
from .plan import PendingEdit
from .report import describe_value
from .resolve import aliases_of, home_of, missing_symbol, slot_from_path, split_path, version_of
from .slots import MISSING, ClassSlot, Slot

Wrapper = Callable[..., Any]
Aliases = Literal["patch", "error", "ignore"]
When = Literal["now", "imported"]

#: Is the code being traced by a compiler right now? The torch rooms put `torch.compiler.is_dynamo_compiling` here:
#: counting calls inside a traced graph would make a guard of the count.
tracing: Callable[[], bool] = bool


def set_tracing(check: Callable[[], bool]) -> None:
    global tracing
    tracing = check


def replace_attribute(
    target: Any, name: Any = MISSING, value: Any = MISSING, *, reason: str = "", aliases: Aliases = "patch", when: When = "now"
) -> EditPatch:
    """A patch that replaces one attribute.

    Two forms: `replace_attribute(owner, "name", value)` and `replace_attribute("package.module:attr.path", value)`.

    Args:
        target: an instance, a class, a module, or a path string.
        name: the attribute (omitted for a path string, where `value` comes second).
        value: the new raw value; for a class include the descriptor (`staticmethod(f)`). `MISSING` deletes it.
        reason: shown by `explain()`.
        aliases: what to do about other modules that hold the same object by `from m import f`: patch them too, refuse,
            or leave them. Only module globals are looked for. Named at its home, an object is followed everywhere;
            named in a module that borrows it, only within that module's own package.
        when: `"imported"` waits for the module of a path string to be imported while the scope is live, instead of
            importing it.

    Raises (when planned):
        TargetError: no such module or attribute; an attribute that does not exist cannot be replaced silently.
    """
    if isinstance(target, str):
        if value is not MISSING:
            raise BadTargetError('the path form is replace_attribute("package.module:attr", value); got three arguments')
        name, value = None, name
    _check_choice("aliases", aliases, ("patch", "error", "ignore"))
    return _attribute_patch("replace", target, name, lambda prior: value, None, describe_value(value), reason, aliases, when)


def wrap_call(
    target: Any,
    name: Any = MISSING,
    wrapper: Any = MISSING,
    *,
    reason: str = "",
    rank: int | None = None,
    aliases: Aliases = "patch",
    when: When = "now",
) -> EditPatch:
    """A patch that wraps one callable: calls become `wrapper(original, *args, **kwargs)`.

    Two forms: `wrap_call(owner, "name", wrapper)` and `wrap_call("package.module:attr.path", wrapper)`. `original` is
    bound as the caller would have found it (to the instance, to the class of a class method, to nothing for a static
    method), so pass the arguments on as they came. The signature, name and docs stay as they were.

    Args:
        rank: who wraps whom on one place; lower is further in (the shipped patches use 10 to 40, 50 is the default).
        target, name, reason, aliases, when: as for `replace_attribute`.
    """
    if isinstance(target, str):
        if wrapper is not MISSING:
            raise BadTargetError('the path form is wrap_call("package.module:attr", wrapper); got three arguments')
        name, wrapper = None, name
    if not callable(wrapper):
        raise BadTargetError(f"wrap_call needs a callable wrapper, got {type(wrapper).__name__}")
    _check_choice("aliases", aliases, ("patch", "error", "ignore"))
    counter = Counter()
    label = getattr(wrapper, "__qualname__", repr(wrapper))

    def edits_for(slot: Slot) -> Callable[[Any], Any]:
        return lambda prior: wrapped_callable(slot, prior, wrapper, counter)

    return _attribute_patch("wrap", target, name, edits_for, counter, f"wrapped by {label}", reason, aliases, when, rank)


def replace_item(
    mapping: MutableMapping[Any, Any], key: Hashable, value: Any, *, reason: str = "", label: str = ""
) -> EditPatch:
    """A patch that sets one key of a mapping (`MISSING` deletes it); other keys are never touched."""
    slot = item_slot(mapping, key, label)
    edit = Edit(slot, lambda prior: value, action="replace", reason=reason, to=describe_value(value))
    return EditPatch(f"replace {slot.label}", lambda target: [edit])


def wrapped_callable(slot: Slot, prior: Any, wrapper: Wrapper, counter: Counter) -> Any:
    """The raw value that makes calls of `slot` go through `wrapper`, whatever kind of callable `prior` is."""
    if prior is MISSING:
        raise TargetError(f"{slot.label} does not exist, so there is no call to wrap")
    if not isinstance(slot, ClassSlot):
        if not callable(prior):
            raise BadTargetError(f"{slot.label} is {type(prior).__name__}, not a callable: nothing to wrap")
        return _like(_plain(prior, wrapper, counter), prior)
    if isinstance(prior, staticmethod):
        return staticmethod(_like(_plain(prior.__func__, wrapper, counter), prior.__func__))
    if isinstance(prior, classmethod):
        return classmethod(_like(_method(prior.__func__, wrapper, counter), prior.__func__))
    if isinstance(prior, types.FunctionType):
        return _like(_method(prior, wrapper, counter), prior)
    if isinstance(prior, property):
        if prior.fget is None:
            raise BadTargetError(f"{slot.label} is a property without a getter: nothing to wrap")
        getter = _like(_method(prior.fget, wrapper, counter), prior.fget)
        return property(getter, prior.fset, prior.fdel, prior.__doc__)
    if not callable(prior) and not hasattr(type(prior), "__get__"):
        raise BadTargetError(f"{slot.label} is {type(prior).__name__}, not a callable: nothing to wrap")

    def through(wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        counter.calls += 1
        return wrapper(wrapped, *args, **kwargs)

    # Builtins, partialmethods and other descriptors: wrapt knows how each binds, and no compiler traces them.
    return wrapt.FunctionWrapper(prior, through)


def _plain(original: Any, wrapper: Wrapper, counter: Counter) -> Any:
    def patched_call(*args: Any, **kwargs: Any) -> Any:
        if tracing():
            counter.traced = True
        else:
            counter.calls += 1
        return wrapper(original, *args, **kwargs)

    return _awaited(patched_call) if inspect.iscoroutinefunction(original) else patched_call


def _method(function: Any, wrapper: Wrapper, counter: Counter) -> Any:
    def patched_method(self: Any, *args: Any, **kwargs: Any) -> Any:
        if tracing():
            counter.traced = True
        else:
            counter.calls += 1
        return wrapper(types.MethodType(function, self), *args, **kwargs)

    return _awaited(patched_method) if inspect.iscoroutinefunction(function) else patched_method


def _awaited(call: Callable[..., Any]) -> Any:
    """A coroutine function stays one to those who ask: a server or a framework may call others in a thread.

    The wrapper runs when the call is awaited. It may itself be `async def`, return what the original gave, or a value.
    """

    async def patched_coroutine(*args: Any, **kwargs: Any) -> Any:
        result = call(*args, **kwargs)
        return await result if inspect.isawaitable(result) else result

    return patched_coroutine


def _like(function: Any, original: Any) -> Any:
    """Make `function` introspect as `original`, without `__wrapped__`: unwrapping tools would strip the patch."""
    for attribute in ("__doc__", "__module__"):
        value = getattr(original, attribute, None)
        if value is not None:
            setattr(function, attribute, value)
    name = getattr(original, "__name__", None)
    if name:
        # A name of its own: a pickle by name must not load silently unpatched.
        function.__name__ = f"patched_{name}"
        function.__qualname__ = f"patched_{getattr(original, '__qualname__', name)}"
    signature = signature_of(original)
    if signature is not None:
        function.__signature__ = signature
    return function


_signatures: weakref.WeakKeyDictionary[Any, dict[bool, inspect.Signature | None]] = weakref.WeakKeyDictionary()


def signature_of(original: Any) -> inspect.Signature | None:
    """`inspect.signature`, or None where there is none; remembered per function, since many layers share one."""
    function = getattr(original, "__func__", original)
    if not isinstance(function, types.FunctionType):
        return _signature(original)
    known = _signatures.setdefault(function, {})
    bound = isinstance(original, types.MethodType)
    if bound not in known:
        known[bound] = _signature(original)
    return known[bound]


def _signature(original: Any) -> inspect.Signature | None:
    try:
        return inspect.signature(original)
    except (TypeError, ValueError):
        return None


def _attribute_patch(
    action: Literal["wrap", "replace"],
    target: Any,
    name: Any,
    make: Callable[..., Any],
    counter: Counter | None,
    to: str,
    reason: str,
    aliases: Aliases,
    when: When,
    rank: int | None = None,
) -> EditPatch:
    _check_choice("when", when, ("now", "imported"))
    if when == "imported" and not isinstance(target, str):
        raise BadOptionError('when="imported" needs a "package.module:attr" string: an object is there already')
    options = {} if rank is None else {"rank": rank}

    def edit(slot: Slot, note: str = "") -> Edit:
        maker = make(slot) if action == "wrap" else make
        return Edit(slot, maker, action=action, reason=reason + note, counter=counter, to=to, **options)  # type: ignore[arg-type]

    def plan(slot: Slot) -> Iterable[Edit]:
        prior = slot.value_of(slot.read())
        if prior is MISSING:
            raise TargetError(_not_there(slot))
        yield edit(slot)
        if aliases == "ignore" or not isinstance(slot.owner, types.ModuleType) or not callable(prior):
            return
        others = aliases_of(slot, prior)
        home = home_of(prior)
        if home is not None and home is not slot.owner:
            # `from copy import deepcopy` in a module of yours: its name there is meant, not everybody's deepcopy
            here = slot.owner.__name__.partition(".")[0]
            others = [(module, name) for module, name in others if module.__name__.partition(".")[0] == here]
        if others and aliases == "error":
            names = ", ".join(f"{module.__name__}.{alias}" for module, alias in others)
            raise BadTargetError(f"{slot.label} was imported by value into {names}; aliases='patch' patches them too")
        for module, alias in others:
            yield edit(attribute_slot(module, alias), f"{' ' if reason else ''}(imported by value from {slot.label})")

    def edits(_: Any) -> Iterable[Any]:
        if not isinstance(target, str):
            yield from plan(attribute_slot(target, name))
            return
        module_name, _attributes = split_path(target)
        if when == "imported" and module_name not in sys.modules:
            yield PendingEdit(module_name, lambda module: plan(slot_from_path(target)), target)
        else:
            yield from plan(slot_from_path(target))

    if isinstance(target, str):
        home, _ = split_path(target)
        return EditPatch(f"{action} {target}", edits, lambda: _modules_now(sys.modules.get(home)))
    slot = attribute_slot(target, name)
    if isinstance(slot.owner, types.ModuleType):
        return EditPatch(f"{action} {slot.label}", edits, lambda: _modules_now(slot.owner))
    return EditPatch(f"{action} {slot.label}", edits)


def _modules_now(home: types.ModuleType | None) -> Hashable:
    """Changes when another module may have borrowed the name meanwhile, or its home was imported again."""
    return None if home is None else (id(home), len(sys.modules))


def _not_there(slot: Slot) -> str:
    if isinstance(slot.owner, types.ModuleType):
        return f"cannot patch {slot.label}: {missing_symbol(slot.owner, str(slot.key))}"
    module = getattr(slot.owner, "__module__", type(slot.owner).__module__)
    return f"cannot patch {slot.label}: there is no {slot.key!r} ({version_of(module)}); nothing would ever read it"


def _check_choice(option: str, value: Any, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise BadOptionError(f"{option} must be one of {', '.join(map(repr, choices))}, got {value!r}")
