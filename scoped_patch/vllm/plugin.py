"""vLLM's plugin entry: `vllm.general_plugins` calls `register()` in every process of an engine, before models are built.

Inert unless the environment variable SCOPED_PATCH_VLLM_QAT asks for the target patches ("nvfp4"), or SCOPED_PATCH_SPEC holds
the spec of a scope with `qat=` (see `scoped_patch.spec`); they then stay on for the life of the process.
"""

from __future__ import annotations

import json
import logging
import os
from typing import Any

logger = logging.getLogger("scoped_patch")

VARIABLE = "SCOPED_PATCH_VLLM_QAT"
# As in `scoped_patch.spec`, which knows this package and so cannot be asked from here.
SPEC_VARIABLE = "SCOPED_PATCH_SPEC"
SPEC_VERSION = 1
_session: object = None


def register() -> None:
    """Apply the QAT target patches in this process, if asked to; calling it again does nothing.

    Raises:
        BadOptionError, UnsupportedError: what was asked for is unknown, or this vLLM does not have it.
    """
    global _session
    wanted = os.environ.get(VARIABLE, "") or _in_spec()
    if not wanted or _session is not None:
        return
    from ..engine import Scope
    from .targets import qat_targets, targets_by_name

    targets = qat_targets(wanted) if isinstance(wanted, str) else targets_by_name(wanted)
    _session = Scope(None, targets).apply()
    logger.info("%s: %r", wanted, _session)


def _in_spec() -> Any:
    """What the spec in the environment says of `qat`, if there is one; what else it says is for the trainer's processes."""
    spec = os.environ.get(SPEC_VARIABLE, "")
    if not spec:
        return ""
    from ..engine.errors import BadOptionError

    try:
        read = json.loads(spec)
        version, wanted = read.get("scoped_patch"), read.get("qat", "")
    except (ValueError, AttributeError, RecursionError):
        raise BadOptionError(f"{SPEC_VARIABLE} holds no spec (a JSON object): {spec[:80]!r}") from None
    if type(version) is not int or version != SPEC_VERSION:
        raise BadOptionError(
            f"{SPEC_VARIABLE} holds a spec of version {version!r}, and this scoped_patch reads version {SPEC_VERSION}"
        )
    return wanted
