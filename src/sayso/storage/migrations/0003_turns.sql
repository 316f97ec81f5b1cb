-- How often a session was taken up since anything of it was stored, so that one which ends whoever owns it is noticed.
alter table session add column attempts integer not null default 0 check (attempts >= 0);

-- A turn ends only when each of its calls has its result.
create index call_open on call (session, turn) where state = 'open';

-- An operation can be undone; it says what it left in the world, as its newest answer does; and it knows when it was
-- first sent, for the other side recognises a repeat by its key for so long.
create table operation_now (
    session text not null,
    operation text not null,
    call text not null,
    turn text,
    tool text not null,
    key text not null,
    digest text not null,
    state text not null
        check (state in ('intended', 'sent', 'answered', 'failed', 'unknown', 'gone', 'released', 'not_started')),
    attempts bigint not null check (attempts >= 0),
    effect text check (effect in ('committed', 'none', 'unknown', 'partial', 'rolled_back')),
    sent_at_ms bigint,
    primary key (session, operation)
) /*sqlite: without rowid*/;

insert into operation_now (session, operation, call, turn, tool, key, digest, state, attempts)
select session, operation, call, turn, tool, key, digest, state, attempts from operation;

drop table operation;

alter table operation_now rename to operation;

create index operation_in_state on operation (session, state);
