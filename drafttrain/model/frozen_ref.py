"""A reference from one module to another that is not its child."""

from __future__ import annotations

from typing import Generic, TypeVar

T = TypeVar("T")


class FrozenRef(Generic[T]):
    """Holds a module that another module uses without owning it.

    torch registers a module that is assigned to an attribute of another one: it would be trained, moved, sharded and saved
    with the holder. It does not find a module inside this object.
    """

    __slots__ = ("module",)

    def __init__(self, module: T) -> None:
        self.module = module
