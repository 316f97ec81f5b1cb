"""The transaction bodies of nodes: who lives, and what becomes of a session whose node does not, or forgot it.

A session is handed back by raising its epoch, so that nothing its last owner still sends to the store is taken.
What another transaction is at is passed over, and found by the next look. See `statements` for what a body is.
"""

from __future__ import annotations

from collections.abc import Set as AbstractSet

from sayso.storage.statements import NOW, Body, Sql


def beat(incarnation: str, address: str, lease_ms: int) -> Body[int | None]:
    """Begin or renew the lease, unless it has ended: the row decides between a beat and a sweep."""
    now: int = yield NOW
    renewed = yield Sql(
        """
        insert into node (node, registered_at_ms, address, lease_until_ms) values (?, ?, ?, ?)
        on conflict (node) do update set address = excluded.address, lease_until_ms = excluded.lease_until_ms
        where node.dead_at_ms is null and (node.lease_until_ms is null or node.lease_until_ms > ?)
        returning lease_until_ms
        """,
        (incarnation, now, address, now + lease_ms, now),
    )
    return int(renewed[0][0]) if renewed else None


def sweep(at_most: int, dead_kept_ms: int) -> Body[int]:
    """Mark the incarnations whose lease has ended, and hand back what marked ones own, also what a claim that was
    under way brought one of them since; forget those marked long ago. One at a time."""
    alone = yield Sql("select 1 /*postgres: where pg_try_advisory_xact_lock('node'::regclass::oid::bigint)*/")
    if not alone:
        return 0
    now: int = yield NOW
    ended = yield Sql(
        """
        select node from node where dead_at_ms is null and lease_until_ms <= ?
        /*postgres: for update skip locked*/
        """,
        (now,),
    )
    for (incarnation,) in ended:
        yield Sql("update node set dead_at_ms = ? where node = ?", (now, incarnation))
    left = yield Sql(
        """
        select s.id, s.epoch from session s join node n on n.node = s.node
        where s.state = 'owned' and n.dead_at_ms is not null limit ? /*postgres: for update of s skip locked*/
        """,
        (at_most,),
    )
    for session, epoch in left:
        yield _handed_back(session, epoch, now)
    long_gone = yield Sql(
        """
        select n.node from node n where n.dead_at_ms <= ?
            and not exists (select 1 from session s where s.state = 'owned' and s.node = n.node)
        /*postgres: for update of n skip locked*/
        """,
        (now - dead_kept_ms,),
    )
    for (incarnation,) in long_gone:
        yield Sql("delete from node where node = ?", (incarnation,))
    return len(left)


def reclaim(incarnation: str, running: AbstractSet[str]) -> Body[list[str]]:
    """Hand back what is this incarnation's and does not run there."""
    owned = yield Sql(
        "select id, epoch from session where state = 'owned' and node = ? order by id /*postgres: collate \"C\"*/",
        (incarnation,),
    )
    now: int = yield NOW
    handed_back = []
    for session, epoch in owned:
        if session not in running and (yield _handed_back(session, epoch, now)):
            handed_back.append(session)
    return handed_back


def _handed_back(session: str, epoch: int, now: int) -> Sql:
    """Return the statement that makes an owned session ready under the next epoch. Its attempts stay as they
    were: whoever takes it up next makes one more."""
    return Sql(
        """
        update session set state = 'ready', ready_at_ms = ?, node = null, epoch = epoch + 1, nonce = ''
        where id = ? and epoch = ? and state = 'owned'
        returning 1
        """,
        (now, session, epoch),
    )
