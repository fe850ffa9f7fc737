"""vLLM's plugin entry: `vllm.general_plugins` calls `register()` in every process of an engine, before models are built.

Inert unless the environment variable SCOPED_PATCH_VLLM_QAT asks for the target patches ("nvfp4"); they then stay on for the
life of the process.
"""

from __future__ import annotations

import logging
import os

logger = logging.getLogger("scoped_patch")

VARIABLE = "SCOPED_PATCH_VLLM_QAT"
_session: object = None


def register() -> None:
    """Apply the QAT target patches in this process, if asked to; calling it again does nothing.

    Raises:
        BadOptionError, UnsupportedError: what was asked for is unknown, or this vLLM does not have it.
    """
    global _session
    wanted = os.environ.get(VARIABLE, "")
    if not wanted or _session is not None:
        return
    from ..engine import Scope
    from .targets import qat_targets

    _session = Scope(None, qat_targets(wanted)).apply()
    logger.info("%s=%s: %r", VARIABLE, wanted, _session)
