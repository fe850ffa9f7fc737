"""pytest plugin: the fixture `patched_scope`, and a sweep for patches that tests leave behind.

`patched_scope(model, fused="torch")` enters a scope for the rest of the test. The sweep is opt-in, by `--patch-leaks` or by
`patch_leaks = true` in the configuration. It fails a test that leaves one of this library's scopes live, or that leaves
changed, whoever changed it: a `forward` of an instance or of a class, an entry of transformers' attention or mask
registry, a function or class in a module's globals, or a child module. Everything found is named and put back, so that
the next test starts clean.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Generator, Iterator
from typing import TYPE_CHECKING, Any

import pytest

from .engine import active
from .engine.session import Session

if TYPE_CHECKING:
    from .leaks import Snapshot

FLAG = "--patch-leaks"
INI = "patch_leaks"
PACKAGES = "patch_leak_packages"
IGNORE = "patch_leak_ignore"


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("scoped_patch", "patches that tests leave behind")
    group.addoption(
        FLAG,
        action="store_true",
        default=None,
        help="fail tests that leave a patch behind: live scopes, changed forwards, registry entries, globals, child modules",
    )
    parser.addini(INI, f"the same as {FLAG}", type="bool", default=False)
    parser.addini(PACKAGES, "more packages whose functions and classes are watched", type="args", default=[])
    parser.addini(IGNORE, "globals (package.module.name, * allowed) that may change", type="args", default=[])


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption(FLAG.lstrip("-").replace("-", "_")) or config.getini(INI):
        config.pluginmanager.register(
            LeakSweep(tuple(config.getini(PACKAGES)), tuple(config.getini(IGNORE))), "scoped_patch_leaks"
        )


@pytest.fixture
def patched_scope() -> Iterator[Callable[..., Any]]:
    """Enter scopes that end with the test: `scope = patched_scope(model, fused="torch")`.

    Takes what `patched` takes, and returns the live session. Scopes end in the reverse order of entering.
    """
    from .compose import patched

    sessions: list[Session] = []

    def enter(*args: Any, **kwargs: Any) -> Session:
        sessions.append(patched(*args, **kwargs).apply())
        return sessions[-1]

    yield enter
    errors: list[Exception] = []
    for session in reversed(sessions):
        try:
            session.leave(None)
        except Exception as error:
            errors.append(error)
    if errors:
        raise errors[0] if len(errors) == 1 else ExceptionGroup("leaving the scopes of this test", errors)


class LeakSweep:
    """The plugin that is registered when the sweep is on.

    A fixture, so that it looks before the test's own fixtures are made and after they are gone, but inside those of its
    module and session: what a module's fixture patches for all its tests is no leak of one of them.

    All of memory is searched for models at the first test of a module and after each fixture of more than one test, which
    may have made some; between the other tests of a module the snapshot is only brought up to date.
    """

    def __init__(self, packages: tuple[str, ...], ignore: tuple[str, ...]) -> None:
        self.packages, self.ignore = packages, ignore
        self.latest: Snapshot | None = None
        self.path: object = None

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef: pytest.FixtureDef[Any]) -> Generator[None, object, object]:
        try:
            return (yield)
        finally:
            self._is_out_of_date_after(fixturedef)

    @pytest.hookimpl(trylast=True)
    def pytest_fixture_post_finalizer(self, fixturedef: pytest.FixtureDef[Any]) -> None:
        self._is_out_of_date_after(fixturedef)

    def _is_out_of_date_after(self, fixturedef: pytest.FixtureDef[Any]) -> None:
        if fixturedef.scope != "function":
            self.latest = None  # let go of as well: it holds the children of models

    @pytest.fixture(autouse=True)
    def _scoped_patch_leak_sweep(self, request: pytest.FixtureRequest) -> Iterator[None]:
        sessions = active()
        before = self._snapshot(request.node.path)
        yield
        found = leave_live_scopes(sessions)
        # Looked up now: a test may be the one that imports torch.
        if before is not None:
            found += before.restore_changes()
        if found:
            lines = "\n".join(f"  - {one}" for one in found)
            pytest.fail(f"this test left patches behind; they have been put back:\n{lines}", pytrace=False)

    def _snapshot(self, path: object) -> Snapshot | None:
        if "torch" not in sys.modules:
            return None
        from .leaks import Snapshot

        self.latest = Snapshot(self.packages, self.ignore, earlier=self.latest if path == self.path else None)
        self.path = path
        return self.latest


def leave_live_scopes(known: list[Session]) -> list[str]:
    """Leave every scope that is live and not known, newest first; what they were."""
    found = []
    for session in reversed(active()):
        if session in known:
            continue
        line = f"a live scope: {session!r}"
        try:
            session.restore()
        except Exception as error:
            line += f" (leaving it failed: {error})"
        found.append(line)
    return found
