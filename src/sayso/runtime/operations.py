"""Carry out one call under its contract, and say what came of it. No rows here: the driver writes those.

Whatever a tool with an effect does except return or raise `ToolFailed` leaves its operation unknown: a
timeout, a broken connection, a fault in its own code may all come after the effect (D5).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

from sayso.core.attachment import NO_BLOBS, Attachment, Blobs, digest_of, media_type_of, of_call
from sayso.core.contract import Contract
from sayso.core.errors import Invalid, ToolFailed
from sayso.core.operation import EffectState, Ref
from sayso.core.text import file_name, scrub
from sayso.runtime.limits import Limits
from sayso.runtime.ports import Absent, Call, File, ToolAnswer, Tools

log = logging.getLogger(__name__)


class Came(StrEnum):
    """What came of one attempt."""

    OK = "ok"
    #: it did not succeed; its effect says what it left
    FAILED = "failed"
    #: nobody knows
    UNKNOWN = "unknown"
    #: a lookup says that it never happened
    ABSENT = "absent"


@dataclass(frozen=True, slots=True)
class Attempt:
    """The end of one attempt at a call, or of one lookup."""

    call: str
    came: Came
    text: str
    made: tuple[Ref, ...] = ()
    #: whether it was a lookup
    looked_up: bool = False
    #: what it left in the world, as far as somebody said so
    effect: EffectState | None = None
    #: whether the text is in the tool's own words
    by_tool: bool = False
    #: whether what the tool said is kept back, and the text says so instead
    withheld: bool = False
    #: files as the tool gave them back; see `finished`
    files: tuple[File, ...] = ()
    #: what is kept of them
    attachments: tuple[Attachment, ...] = ()
    blobs: Blobs = field(default_factory=lambda: NO_BLOBS)

    @property
    def is_receipt(self) -> bool:
        """Whether the call is settled by this."""
        return self.came in (Came.OK, Came.FAILED)


async def attempt(tools: Tools, contract: Contract, call_ref: str, call: Call, arguments: Mapping[str, Any]) -> Attempt:
    """Call the tool once, within its contract's time. What it gave back is whole; `finished` makes it a result."""
    careful = contract.effect.consequential
    came = Came.UNKNOWN if careful else Came.FAILED
    try:
        async with asyncio.timeout(contract.timeout_ms / 1000):
            answer = await tools.call(contract.tool, call, arguments)
    except ToolFailed as failed:
        return _failed(call_ref, failed, call)
    except Invalid as invalid:  # found before the tool's own code ran, so this attempt did nothing
        if call.attempt > 1:  # but an earlier one may have
            return Attempt(call_ref, Came.UNKNOWN, invalid.detail)
        return Attempt(call_ref, Came.FAILED, invalid.detail, effect=EffectState.NONE)
    except TimeoutError:
        return Attempt(call_ref, came, f"no answer within {contract.timeout_ms} ms")
    except Exception as error:
        log.exception("tool failed", extra={"tool": contract.tool, "session": call.session, "turn": call.turn})
        return Attempt(call_ref, came, f"the tool broke off with {type(error).__name__}")
    return _answered(call_ref, answer, call, careful=careful)


async def look_up(tools: Tools, contract: Contract, call_ref: str, call: Call, arguments: Mapping[str, Any]) -> Attempt:
    """Ask the other side once what became of the operation."""
    try:
        async with asyncio.timeout(contract.timeout_ms / 1000):
            answer = await tools.look_up(contract.tool, call, arguments)
    except Absent:
        why = "the other side knows nothing of it"
        return Attempt(call_ref, Came.ABSENT, why, looked_up=True, effect=EffectState.NONE)
    except Exception as error:
        log.exception("lookup failed", extra={"tool": contract.tool, "session": call.session, "turn": call.turn})
        return Attempt(call_ref, Came.UNKNOWN, f"the lookup broke off with {type(error).__name__}", looked_up=True)
    return replace(_answered(call_ref, answer, call, careful=contract.effect.consequential), looked_up=True)


def _answered(call_ref: str, answer: ToolAnswer, call: Call, *, careful: bool) -> Attempt:
    """An answer is a success unless it says otherwise. One that left something undone is none (K15)."""
    unsaid = (EffectState.UNKNOWN if answer.is_error else EffectState.COMMITTED) if careful else None
    effect = call.said or unsaid
    succeeded = not answer.is_error and effect in (None, EffectState.COMMITTED, EffectState.NONE)
    came = Came.OK if succeeded else Came.FAILED
    made = () if effect is EffectState.ROLLED_BACK else tuple(call.refs)
    return Attempt(call_ref, came, answer.text, made, effect=effect, by_tool=True, files=answer.files)


def _failed(call_ref: str, failed: ToolFailed, call: Call) -> Attempt:
    """It did not happen, unless the tool says that it did something all the same. What it made then stands."""
    effect = failed.effect or call.said or EffectState.NONE
    made = () if effect in (EffectState.NONE, EffectState.ROLLED_BACK) else tuple(call.refs)
    text = str(failed) or "it did not happen"
    return Attempt(call_ref, Came.FAILED, text, made, effect=effect, by_tool=True)


# --- from what came to what is told -------------------------------------------


async def finished(ended: Attempt, tools: Tools, contract: Contract, limits: Limits) -> Attempt:
    """Return an attempt as it becomes a row: its text guarded and within its limit, its files kept or named.

    Where a guard fails, the text is withheld; what the call did stays what it was.
    """
    said = await _guarded(ended, tools, contract, limits) if ended.by_tool and contract.has_guard else ended
    attachments, blobs, left_out = await _kept(ended.call, ended.files, limits)
    lines = [cut(said.text, limits.result_bytes), *left_out]
    text = "\n".join(line for line in lines if line)
    return replace(said, text=text, files=(), attachments=attachments, blobs=blobs)


async def _guarded(ended: Attempt, tools: Tools, contract: Contract, limits: Limits) -> Attempt:
    try:
        async with asyncio.timeout(limits.guard_ms / 1000):
            return replace(ended, text=await tools.guard(contract.tool, ended.text))
    except Exception as error:
        log.exception("guard failed", extra={"tool": contract.tool})
        why = f"what {contract.tool} said is withheld, because its guard failed with {type(error).__name__}"
        return replace(ended, text=why, withheld=True)


def unguarded(ended: Attempt) -> Attempt:
    """Return an attempt that ended when there is no time left to make a result of it: what it did, and that what it
    said is not kept."""
    why = "what it said was not kept: the process ended before that could be told"
    return replace(ended, text=why, withheld=True, files=())


def provisional(ended: Attempt, limits: Limits) -> tuple[str, tuple[Attachment, ...]]:
    """Return what is shown of an attempt before it is accepted: its text within its own limit, and which files it
    brought, without their bytes."""
    named = tuple(_attachment(ended.call, place, file, "") for place, file in enumerate(ended.files, 1))
    return cut(ended.text, limits.provisional_bytes), named[: limits.result_files]


async def _kept(call: str, files: tuple[File, ...], limits: Limits) -> tuple[tuple[Attachment, ...], Blobs, list[str]]:
    """Return the files that are kept, their bytes by digest, and a line for what is not."""
    kept: list[Attachment] = []
    blobs: dict[str, bytes] = {}
    left_out: list[str] = []
    left = limits.result_files_bytes
    for place, file in enumerate(files[: limits.result_files], 1):
        size = len(file.data)
        if size > left:
            most = f"the files of a result may have {limits.result_files_bytes} bytes together"
            left_out.append(f"(file {file_name(file.name)} of {size} bytes was not kept: {most})")
            continue
        digest = await asyncio.to_thread(digest_of, file.data)
        kept.append(_attachment(call, place, file, digest))
        blobs[digest] = file.data
        left -= size
    more = len(files) - limits.result_files
    if more > 0:
        left_out.append(f"({more} more files were not kept: a result may bring {limits.result_files})")
    return tuple(kept), blobs, left_out


def _attachment(call: str, place: int, file: File, digest: str) -> Attachment:
    kind = media_type_of(file.media_type)
    return Attachment(of_call(call, place), file_name(file.name), kind, len(file.data), digest)


def cut(text: str, bytes_max: int) -> str:
    """Return the text within a limit, with a count of what was cut."""
    encoded = scrub(text).encode()
    if len(encoded) <= bytes_max:
        return scrub(text)
    kept = encoded[:bytes_max].decode("utf-8", "ignore")
    return f"{kept}… (cut: {len(encoded) - bytes_max} more bytes)"
