-- How often a session was taken up since anything of it was stored, so that one which ends whoever owns it is noticed.
alter table session add column attempts integer not null default 0 check (attempts >= 0);

-- A turn ends only when each of its calls has its result.
create index call_open on call (session, turn) where state = 'open';

-- When an operation was first sent: the other side recognises a repeat by its key for so long.
alter table operation add column sent_at_ms bigint;

-- What an operation left in the world, as its newest answer says.
alter table operation add column effect text
    check (effect in ('committed', 'none', 'unknown', 'partial', 'rolled_back'));
