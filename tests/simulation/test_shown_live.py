"""What is shown live and is no row: in order with the rows, without an id, to who listens now."""

from __future__ import annotations

import json

from sayso.journal.feed import SHOWN_BYTES_MAX, Feeds, Listener
from sayso.journal.frames import Frame


def frames(listener: Listener) -> list[Frame]:
    found = []
    while not listener.queue.empty():
        event = listener.queue.get_nowait()
        assert event is not None
        found.append(event.frame)
    return found


def test_what_is_shown_live_has_no_id_and_reaches_who_listens_now() -> None:
    feeds = Feeds()
    feed = feeds.own("ses_1")
    one, _ = feeds.listen("ses_1")
    feed.show("tool.provisional", {"call": "T1.1.1", "text": "done"})
    two, _ = feeds.listen("ses_1")
    feeds.show("ses_1", "queue", {})

    assert frames(one) == [
        Frame("tool.provisional", '{"call":"T1.1.1","text":"done"}'),
        Frame("queue", "{}"),
    ]
    assert frames(two) == [Frame("queue", "{}")]


def test_what_is_too_long_is_shown_to_nobody() -> None:
    feeds = Feeds()
    feed = feeds.own("ses_1")
    one, _ = feeds.listen("ses_1")
    feed.show("tool.provisional", {"text": "x" * SHOWN_BYTES_MAX})
    feed.show("tool.provisional", {"text": "short"})

    assert [json.loads(frame.data) for frame in frames(one)] == [{"text": "short"}]
