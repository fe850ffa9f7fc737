"""A worker extension that can be told to fail, and brings the CPU kernels into its worker process."""

from __future__ import annotations

from typing import Any

from scoped_patch.vllm import WorkerExtension

from .kernels import cpu_kernels

_kernels = cpu_kernels()
_kernels.__enter__()


class FailingExtension(WorkerExtension):
    def scoped_patch_test_fail(self, where: str, rank: int) -> None:
        """From now on, `where` ("load", "prepare", "commit" or "") fails on `rank`, or it is told to "tamper"."""
        self.__dict__["_scoped_patch_test"] = where if self.rank == rank else ""  # type: ignore[attr-defined]

    def scoped_patch_load(self, weights: Any) -> str:
        """Told to "tamper", this rank gets other global scales than the rest, as with a quantiser that sees its shard only."""
        if self.__dict__.get("_scoped_patch_test") != "tamper":
            return super().scoped_patch_load(weights)
        from safetensors.torch import load_file

        return super().scoped_patch_load(
            [(n, t * 2 if n.endswith("weight_global_scale") else t) for n, t in load_file(weights).items()]
        )

    def scoped_patch_test_addresses(self) -> str:
        from .addresses import addresses

        return repr(sorted(addresses(self.model_runner.get_model()).items()))  # type: ignore[attr-defined]

    def _scoped_patch_test_check(self, where: str) -> None:
        if self.__dict__.get("_scoped_patch_test") == where:
            raise RuntimeError(f"told to fail in {where}")

    def _scoped_patch_need(self) -> Any:
        update = super()._scoped_patch_need()
        for name in ("load", "prepare", "commit"):
            original = getattr(type(update), name)

            def step(*args: Any, name: str = name, original: Any = original) -> Any:
                self._scoped_patch_test_check(name)
                return original(update, *args)

            update.__dict__[name] = step
        return update
