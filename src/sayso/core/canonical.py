"""One JSON text for one value, so that equal arguments have equal digests.

In the manner of RFC 8785: sorted keys, no white space, UTF-8. It differs where Python does: integers keep all
their digits (an amount above 2**53 must not be approved as its neighbour), 1.0 is not 1, and keys sort by code
point. Only we compute these digests and only we compare them.
"""

from __future__ import annotations

import hashlib
import json

from sayso.core.text import scrub_json


def canonical(value: object) -> str:
    """Return the one JSON text of `value`.

    Raises:
        ValueError: it holds NaN or an infinity, which JSON cannot say.
        TypeError: it holds something that is no JSON value.
    """
    return json.dumps(scrub_json(value), sort_keys=True, ensure_ascii=False, allow_nan=False, separators=(",", ":"))


def digest(value: object) -> str:
    """Return `sha256:` and the hex digest of the canonical text of `value`."""
    return "sha256:" + hashlib.sha256(canonical(value).encode()).hexdigest()
