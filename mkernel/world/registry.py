"""The worlds of this process: found by their names, and which of them is the default."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator

from mkernel.backends.runtime._calls import CallPath
from mkernel.errors import AlreadyInitialized, NotInitialized
from mkernel.world import order
from mkernel.world.world import World


class Registry:
    """Live worlds by name, in the order in which they were made. Any thread.

    Attributes:
        default: the world of ops that name none: the first that ``init`` made, or the first after
            that one has ended.
        paths: of the worlds' calls, by the worlds' names, and by None that of the default one; native
            code looks here.
    """

    def __init__(self) -> None:
        self.default: World | None = None
        self._worlds: dict[str, World] = {}
        self.paths: dict[str | None, CallPath] = {}
        self._joining: set[str] = set()
        self._lock = threading.Lock()
        self._parents: list[World] = []

    @contextlib.contextmanager
    def joining(self, name: str) -> Iterator[None]:
        """Keep other threads from making a world of that name while entered. AlreadyInitialized."""
        with self._lock:
            if name in self._worlds or name in self._joining:
                raise AlreadyInitialized(
                    f"this process is already in a world of group {name!r}; end that one first, by "
                    f"mkernel.finalize(group={name!r})"
                )
            self._joining.add(name)
        try:
            with order.making(name):
                yield
        finally:
            with self._lock:
                self._joining.discard(name)

    def add(self, world: World, *, default: bool) -> None:
        """Keep a world until it ends. ``default``: it may become the default one."""
        world.on_end = self._remove
        with self._lock:
            self._worlds[world.name] = world
            self.paths[world.name] = world.path
            if default and self.default is None:
                self.default = world
                self.paths[None] = world.path

    def _remove(self, world: World) -> None:
        """Forget a world; harmless where it is not kept."""
        with self._lock:
            if self._worlds.get(world.name) is world:
                del self._worlds[world.name]
                self.paths.pop(world.name, None)
            if self.default is world:
                self.default = None
                self.paths.pop(None, None)

    def named(self, name: str) -> World:
        """Return the world of that name. NotInitialized: there is none."""
        found = self._worlds.get(name)
        if found is None:
            raise NotInitialized(
                f"no world of group {name!r}; call mkernel.init(group=...) on every rank of it first"
                + self._those_there_are()
            )
        return found

    def the_default(self) -> World:
        """Return the default world. NotInitialized: there is none."""
        if self.default is None:
            raise NotInitialized(
                "no default world; call mkernel.init() first, run inside mkernel.launch(...), or pass "
                "group=" + self._those_there_are()
            )
        return self.default

    def all(self) -> list[World]:
        """Return the worlds, the newest first: ranks that share several make them in one
        order, and so end them in one."""
        with self._lock:
            return list(reversed(self._worlds.values()))

    def forked(self) -> None:
        """Begin anew in a child process. The worlds are its parent's, whose ranks would take what the
        child does for the parent's. They are kept, since what ends them would reach the parent's
        memory and threads."""
        self._lock = threading.Lock()  # a thread that is not here may have held it
        self._parents += self._worlds.values()
        for world in self._worlds.values():
            world.ended = True
        self._worlds, self.default = {}, None
        self.paths.clear()
        self._joining.clear()

    def _those_there_are(self) -> str:
        if self._parents and not self._worlds:
            return (
                " (this process was forked from one that is in a world, which only that one may call; "
                "start processes before mkernel.init, or by spawn)"
            )
        names = ", ".join(map(repr, self._worlds))
        return f" (this process is in worlds {names})" if names else ""


worlds = Registry()
"""The worlds of this process."""
os.register_at_fork(after_in_child=worlds.forked)
