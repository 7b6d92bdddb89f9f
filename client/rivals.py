"""Which objects of this process hold a rank at the daemon: a second one is refused at once, and not by a wait for its own process."""

from __future__ import annotations

import gc
from weakref import WeakValueDictionary

from dataserve.protocol.errors import UserError
from dataserve.protocol.messages import Open

from .transport import Link

_Place = tuple[str, str, str, str, int]
_holders: WeakValueDictionary[tuple[_Place, bytes], Link] = WeakValueDictionary()


def refuse(address: str, opened: Open) -> None:
    """Raises `rank_taken` where another living object of this process is registered in that place."""
    if _rival(address, opened) is None:
        return
    gc.collect()  # it may be garbage in a cycle: with its link it leaves the daemon too
    if _rival(address, opened) is not None:
        raise UserError(
            "rank_taken",
            f"Another ServedDataset of this process holds rank {opened.rank} of the job {opened.job!r} on "
            f"{opened.dataset!r}.",
            "Give this one another job=, or use the first again, or delete it.",
        )


def note(address: str, opened: Open, link: Link) -> None:
    """That link is registered there, for as long as it is held."""
    _holders[_place(address, opened), opened.instance] = link


def _rival(address: str, opened: Open) -> Link | None:
    place = _place(address, opened)
    for (other, instance), link in list(_holders.items()):
        if other == place and instance != opened.instance and link.usable:  # a copy is of the same instance
            return link
    return None


def _place(address: str, opened: Open) -> _Place:
    return address, opened.job, opened.dataset, opened.digest, opened.rank
