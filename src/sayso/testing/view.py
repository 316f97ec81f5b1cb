"""What a page shows of a session: a client that does as docs/stream.md says, and notices what a server may not do.

It takes frames as they come and pages of the history, and raises `AssertionError` where a row is repeated or
missing, where one position names two rows, or where something comes after a farewell.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterable, AsyncIterator, Mapping
from typing import Any

from sayso.core.session import Position
from sayso.journal.frames import Frame

Json = dict[str, Any]

#: how the reason of a repair begins, where its row takes the place of a reply's unfinished text
_ENDS_TEXT = ("model_", "turn_end")


async def frames(chunks: AsyncIterable[bytes]) -> AsyncIterator[Frame]:
    """Yield the events of a stream's body as it comes; comments are none."""
    rest = b""
    async for chunk in chunks:
        *blocks, rest = (rest + chunk).split(b"\n\n")
        for block in blocks:
            fields = dict(line.split(": ", 1) for line in block.decode().split("\n") if not line.startswith(":"))
            if "event" in fields:
                yield Frame(fields["event"], fields["data"], fields.get("id"))


class View:
    """One page. Give several the same `named`, and they notice if one position names two rows among them."""

    def __init__(self, *, named: dict[str, Json] | None = None) -> None:
        #: where to go on from: the `Last-Event-ID` of the next connection; None: from the start
        self.cursor: str | None = None
        #: the reply that is being written, as far as it is shown; None where there is none
        self.text: str | None = None
        #: what was said last of a store that does not follow; None while it does
        self.status: Json | None = None
        #: why the last connection ended; empty while it has not said so
        self.farewell = ""
        #: whether the missing rows have all come
        self.caught_up = False
        #: what was shown live and is no row, in order
        self.shown: list[tuple[str, Json]] = []
        self._named = named if named is not None else {}
        self._rows: dict[int, Json] = {}
        #: rows that are there and were not sent: the history has them
        self._holes: set[int] = set()
        self._last = 0
        self._place: tuple[str, int] | None = None
        self._session: str | None = None

    @property
    def rows(self) -> list[Json]:
        """The rows that are shown, in order."""
        return [self._rows[seq] for seq in sorted(self._rows)]

    @property
    def needs_history(self) -> bool:
        """Whether rows are missing that only the history has."""
        return bool(self._holes)

    @property
    def holes(self) -> list[int]:
        """The numbers of those rows."""
        return sorted(self._holes)

    # the history

    def load(self, page: Mapping[str, Any]) -> None:
        """Paint anew from the newest page of the history, as its JSON; the next connection goes on from its token."""
        assert page["token"] is not None, "the newest page has a token"
        self._rows, self._holes, self.text, self._place = {}, set(), None, None
        self.fill(page)
        self.cursor = page["token"]
        self._last = Position.parse(page["token"]).seq
        assert max(self._rows, default=0) >= self._last, "the token's row is on the newest page"

    def fill(self, page: Mapping[str, Any]) -> None:
        """Put the rows of a page where they belong: older ones, or those that a stream said it did not send."""
        numbers = [Position.parse(row["position"]).seq for row in page["rows"]]
        assert numbers == list(range(numbers[0], numbers[0] + len(numbers))) if numbers else True, numbers
        for seq, row in zip(numbers, page["rows"], strict=True):
            self._name(row)
            self._rows[seq] = row
            self._holes.discard(seq)

    # the stream

    def cut(self) -> None:
        """The connection is gone, without a word."""
        self.farewell, self.caught_up = "cut", False

    def apply(self, frame: Frame) -> None:
        """Take the next frame of a connection."""
        data: Json = json.loads(frame.data)
        assert not self.farewell or frame.event in ("resume", "resync"), f"{frame.event} after a farewell"
        match frame.event:
            case "resume" | "caught_up" | "truncated" | "delta" | "status" | "farewell":
                assert frame.id is None, f"{frame.event} is no row"
                getattr(self, f"_on_{frame.event}")(data)
            case "resync":
                self._on_resync(frame, data)
            case _ if frame.id is None:
                self.shown.append((frame.event, data))
            case _:
                self._on_row(frame.id, data)

    def _on_resume(self, data: Json) -> None:
        """What was never stored goes away; the text so far comes again after `caught_up`."""
        keep = data["keep"]
        assert keep <= self._last, f"it is to keep {keep}, and has {self._last}"
        self._rows = {seq: row for seq, row in self._rows.items() if seq <= keep}
        self._holes = {seq for seq in self._holes if seq <= keep}
        self._last = keep
        self.farewell, self.caught_up, self.status = "", False, None
        self.text = self._place = None

    def _on_truncated(self, data: Json) -> None:
        assert data["after"] == self._last, f"{data} is not after {self._last}"
        self._holes.update(range(data["after"] + 1, data["next"]))
        self._last = data["next"] - 1

    def _on_caught_up(self, data: Json) -> None:
        assert data["seq"] == self._last, f"{data} is not {self._last}"
        self.caught_up = True

    def _on_delta(self, data: Json) -> None:
        place = (data["turn"], data["reply"])
        so_far = self.text if self.text is not None and self._place == place else ""
        assert data["offset"] <= len(so_far), "a piece never leaves a gap before it"
        self.text, self._place = so_far[: data["offset"]] + data["text"] or None, place

    def _on_status(self, data: Json) -> None:
        self.status = None if data["state"] == "healthy" else data

    def _on_farewell(self, data: Json) -> None:
        self.farewell, self.caught_up = data["reason"], False

    def _on_resync(self, frame: Frame, data: Json) -> None:
        """A row that is not told here, or (without an id) a token that is stale: the history is read again."""
        if frame.id is not None:
            self._advance(frame.id)
            self._holes.add(self._last)
            if data["reason"].startswith(_ENDS_TEXT):
                self.text = self._place = None
        else:
            self.farewell = ""  # it is the first word of a connection that another farewell ends
            self._holes.add(self._last + 1)

    def _on_row(self, position: str, row: Json) -> None:
        assert row["position"] == position, f"{row['position']} came as {position}"
        self._advance(position)
        self._name(row)
        self._rows[self._last] = row
        if row["kind"] == "turn.end" or "reply" in row["body"]:
            self.text = self._place = None

    def _advance(self, position: str) -> None:
        seq = Position.parse(position).seq
        assert seq == self._last + 1, f"row {seq} after row {self._last}"
        self._last, self.cursor = seq, position

    def _name(self, row: Json) -> None:
        known = self._named.setdefault(row["position"], row)
        assert known == row, f"{row['position']} names two rows: {known} and {row}"
        session = row.get("session", self._session)
        assert self._session in (None, session), f"a row of {session} among those of {self._session}"
        self._session = session
