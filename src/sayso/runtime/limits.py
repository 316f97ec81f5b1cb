"""Every limit, by name. `settings.py` reads them from the environment; defaults are for one small machine."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds of what one process does. Times in milliseconds, sizes in bytes."""

    #: model calls of one turn and its continuations
    steps_per_turn: int = 20
    #: one model reply
    model_ms: int = 120_000
    #: attempts at one keyed operation before a person is told
    attempts_per_operation: int = 3
    #: text of one tool result; the rest is cut, with a count
    result_bytes: int = 256 * 1024
    #: text of one tool result that is shown before it is accepted; the rest is cut, with a count
    provisional_bytes: int = 64 * 1024
    #: a guard's look at one tool result; after that its text is withheld
    guard_ms: int = 10_000
    #: files of one tool result
    result_files: int = 16
    #: their bytes together; a file beyond that is not kept, and the result says so
    result_files_bytes: int = 20 * 1024 * 1024
    #: text of one user message
    message_bytes: int = 256 * 1024
    #: how long a question stays open (B9)
    consent_ms: int = 10 * 60_000
    #: how long a route waits for an answer to be settled before it says 202
    settle_wait_ms: int = 2_000
    #: how long a session without work stays loaded
    linger_ms: int = 60_000
    #: sessions loaded at once
    sessions: int = 1_000
    #: entries of an inbox read at once
    inbox_page: int = 100
    #: rows of the past that a loaded session's model sees at first
    context_rows: int = 2_000
    #: how long a person's repeat is recognised by its Idempotency-Key
    person_keep_ms: int = 2 * 24 * 3_600_000
    #: calls that the model may ask for in one turn; a reply with more than are left is not run, and ends the turn
    calls_per_turn: int = 200
    #: how long one turn may take, counted anew by whoever takes it over; it ends once nothing is half done
    turn_ms: int = 3_600_000
    #: how often a session is taken up without anything of it being stored, until what stands in its way is given up
    attempts_to_go_on: int = 5
    #: how long a classifier may take to say how an input fits the running turn; after that it is unsure
    classify_ms: int = 10_000
    #: how long a turn waits for its person to say whether what she said meanwhile belongs to it (K23)
    pause_ms: int = 120_000
    #: how long what is out may still answer once its turn was stopped (K24)
    stop_grace_ms: int = 5_000
    #: how long running steps are waited for at shutdown (K9)
    drain_ms: int = 10_000
    #: how often due timers are looked at when nothing hints at one
    timer_look_ms: int = 1_000
    #: how often dedupe entries whose time is over are dropped (A6)
    forget_every_ms: int = 3_600_000
    #: messages of one person that wait in a session for their turn
    waiting_messages: int = 10
    #: answers and requests of one person that wait in a session to be settled
    waiting_requests: int = 100
    #: people who take part in a session beside its owner
    participants: int = 50
    #: files of one message
    attachments: int = 16
    #: one file sent ahead of its message
    upload_bytes: int = 20 * 1024 * 1024
    #: how long it waits for that message
    upload_ms: int = 3_600_000
    #: files of one person that wait in one session
    uploads_staged: int = 32
    #: their bytes together
    uploads_staged_bytes: int = 100 * 1024 * 1024
    #: rows of one history page
    history_rows: int = 500
    #: events that one who follows may be behind before it is sent away, to come back by its cursor
    queue_events: int = 512
    #: the same in bytes
    queue_bytes: int = 8 * 1024 * 1024
    #: newest rows kept of a session that is owned and followed, for those who come back
    ring_rows: int = 1_000
    #: the same in bytes
    ring_bytes: int = 1024 * 1024
    #: rows that are sent to one who comes back; of more it is told which it has to read
    replay_rows: int = 2_000
