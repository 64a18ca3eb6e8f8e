"""Who looks at calls while they run: nobody, or the shadows that are open (_shadow.py)."""

from __future__ import annotations

from typing import Any

# Replaced as a whole, never changed in place: calls of other threads may be reading it.
watchers: tuple[Any, ...] = ()


def forward(q, k, v, call, variant, o, lse) -> None:
    """After a forward; variant and lse are None where there is none."""
    for watcher in watchers:
        if watcher.forwards.due():
            watcher.forward(q, k, v, call, variant, o, lse)


def backward(grad_o, grad_lse, q, k, v, o, o_low, lse, call, variant, grads) -> None:
    """After a backward."""
    for watcher in watchers:
        if watcher.backwards.due():
            saved = grad_o, grad_lse, o, o_low, lse
            watcher.backward(q, k, v, call, variant, saved, grads)


def skip(what: str) -> None:
    """A call that nobody can look at, by name."""
    for watcher in watchers:
        watcher.skip(what)
