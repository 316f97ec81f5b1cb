"""Carry out one call under its contract, and say what came of it. No rows here: the driver writes those.

Whatever a tool with an effect does except return or raise `ToolFailed` leaves its operation unknown: a
timeout, a broken connection, a fault in its own code may all come after the effect (D5).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from sayso.core.contract import Contract
from sayso.core.errors import Invalid, ToolFailed
from sayso.core.operation import Ref
from sayso.core.text import scrub
from sayso.runtime.ports import Absent, Call, Tools

log = logging.getLogger(__name__)


class Came(StrEnum):
    """What came of one attempt."""

    OK = "ok"
    #: it did not happen
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


async def attempt(
    tools: Tools, contract: Contract, call_ref: str, call: Call, arguments: Mapping[str, Any], *, bytes_max: int
) -> Attempt:
    """Call the tool once, within its contract's time."""
    careful = contract.effect.consequential
    try:
        async with asyncio.timeout(contract.timeout_ms / 1000):
            answer = await tools.call(contract.tool, call, arguments)
    except ToolFailed as failed:
        return Attempt(call_ref, Came.FAILED, _cut(str(failed) or "it did not happen", bytes_max))
    except Invalid as invalid:  # found before the tool's own code ran, so this attempt did nothing
        came = Came.FAILED if call.attempt == 1 else Came.UNKNOWN  # but an earlier one may have
        return Attempt(call_ref, came, _cut(invalid.detail, bytes_max))
    except TimeoutError:
        came = Came.UNKNOWN if careful else Came.FAILED
        return Attempt(call_ref, came, f"no answer within {contract.timeout_ms} ms")
    except Exception as error:
        log.exception("tool failed", extra={"tool": contract.tool, "session": call.session, "turn": call.turn})
        came = Came.UNKNOWN if careful else Came.FAILED
        return Attempt(call_ref, came, f"the tool broke off with {type(error).__name__}")
    return Attempt(call_ref, Came.OK, _cut(answer.text, bytes_max), tuple(call.refs))


async def look_up(
    tools: Tools, contract: Contract, call_ref: str, call: Call, arguments: Mapping[str, Any], *, bytes_max: int
) -> Attempt:
    """Ask the other side once what became of the operation."""
    try:
        async with asyncio.timeout(contract.timeout_ms / 1000):
            answer = await tools.look_up(contract.tool, call, arguments)
    except Absent:
        return Attempt(call_ref, Came.ABSENT, "the other side knows nothing of it", looked_up=True)
    except Exception as error:
        log.exception("lookup failed", extra={"tool": contract.tool, "session": call.session, "turn": call.turn})
        return Attempt(call_ref, Came.UNKNOWN, f"the lookup broke off with {type(error).__name__}", looked_up=True)
    return Attempt(call_ref, Came.OK, _cut(answer.text, bytes_max), tuple(call.refs), looked_up=True)


def _cut(text: str, bytes_max: int) -> str:
    """Return the text within the limit for results, with a count of what was cut."""
    encoded = scrub(text).encode()
    if len(encoded) <= bytes_max:
        return scrub(text)
    kept = encoded[:bytes_max].decode("utf-8", "ignore")
    return f"{kept}… (cut: {len(encoded) - bytes_max} more bytes)"
