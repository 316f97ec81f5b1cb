-- The first schema. One text for every database: a comment that names a database holds text for that one alone.
-- Session keys begin with the session, the door's with the source. Instants are milliseconds since 1970 UTC.
-- A table whose rows are long has a rowid on SQLite: clustered by its key, an insert would cost twice as much.

-- session: changed by rows (their projections) and by ownership

create table session (
    id text /*postgres: collate "C"*/ primary key,
    owner text not null,
    title text not null,
    created_at_ms bigint not null,
    state text not null check (state in ('idle', 'ready', 'owned')),
    ready_at_ms bigint,
    node text,
    epoch bigint not null check (epoch >= 0),
    nonce text not null,
    head bigint not null check (head >= 0),
    inbox_tail bigint not null check (inbox_tail >= 0),
    turn text,
    turn_seq bigint,
    turn_principal text,
    turns bigint not null,
    consents bigint not null,
    at_ms bigint not null,
    check ((state = 'owned') = (node is not null)),
    check ((state = 'ready') = (ready_at_ms is not null)),
    check ((turn is null) = (turn_seq is null))
) /*sqlite: without rowid*/;

create index session_ready on session (ready_at_ms, id) where state = 'ready';
create index session_of_owner on session (owner, id);

-- A commit key ends in `.<seq>`, so one key in a session is one row: the check and the primary key
-- together are what an index on (session, commit_key) would hold, without keeping one.
create table journal (
    session text not null,
    seq bigint not null check (seq > 0),
    epoch bigint not null,
    turn text,
    kind text not null,
    commit_key text not null check (commit_key like '%.' || seq),
    at_ms bigint not null,
    version bigint not null,
    body text not null,
    primary key (session, seq)
);

create table call (
    session text not null,
    call text not null,
    turn text,
    tool text not null,
    arguments text not null,
    state text not null check (state in ('open', 'settled')),
    seq bigint not null,
    outcome text,
    result_seq bigint,
    primary key (session, call),
    check ((state = 'settled') = (result_seq is not null))
);

create table operation (
    session text not null,
    operation text not null,
    call text not null,
    turn text,
    tool text not null,
    key text not null,
    digest text not null,
    state text not null
        check (state in ('intended', 'sent', 'answered', 'failed', 'unknown', 'gone', 'not_started')),
    attempts bigint not null check (attempts >= 0),
    primary key (session, operation)
) /*sqlite: without rowid*/;

create index operation_in_state on operation (session, state);

create table consent (
    session text not null,
    consent text not null,
    turn text,
    state text not null check (state in ('open', 'approved', 'used', 'declined', 'expired', 'withdrawn')),
    seq bigint not null,
    epoch bigint not null,
    digest text not null,
    expires_at_ms bigint not null,
    body text not null,
    answered_by text,
    answered_at_ms bigint,
    reason text,
    ticks text,
    due_seq bigint,
    used_by text,
    primary key (session, consent),
    check ((state = 'used') = (used_by is not null))
);

create index consent_in_state on consent (session, state);
create index consent_due on consent (session) where due_seq is not null;

create table ref (
    session text not null,
    source text not null,
    kind text not null,
    value text not null,
    operation text,
    call text not null,
    state text not null check (state in ('live', 'gone')),
    reported_by text,
    seq bigint not null,
    primary key (session, source, kind, value)
) /*sqlite: without rowid*/;

create index ref_to_session on ref (source, kind, value);

create table timer (
    session text not null,
    timer text not null,
    purpose text not null,
    next_at_ms bigint,
    primary key (session, timer)
) /*sqlite: without rowid*/;

create index timer_due on timer (next_at_ms) where next_at_ms is not null;

-- door: any node

create table inbox (
    session text not null,
    n bigint not null check (n > 0),
    lane text not null check (lane in ('normal', 'control')),
    state text not null check (state in ('queued', 'taken')),
    source text not null,
    event_id text not null,
    received_at_ms bigint not null,
    at_seq bigint not null,
    body text not null,
    taken_seq bigint,
    raw /*sqlite: blob*//*postgres: bytea*/,
    content_type text,
    key text,
    signed_at_ms bigint,
    primary key (session, n),
    check ((state = 'taken') = (taken_seq is not null))
);

create index inbox_queued on inbox (session, n, lane) where state = 'queued';

create table unclaimed (
    n /*sqlite: integer primary key*//*postgres: bigint generated always as identity primary key*/,
    source text not null,
    event_id text not null,
    received_at_ms bigint not null,
    body text not null,
    raw /*sqlite: blob*//*postgres: bytea*/,
    content_type text,
    key text,
    signed_at_ms bigint
);

create table seen (
    source text not null,
    event_id text not null,
    digest text not null,
    id_signed smallint not null check (id_signed in (0, 1)),
    session text,
    n bigint,
    received_at_ms bigint not null,
    until_ms bigint not null,
    primary key (source, event_id)
);

-- content is looked for only where nothing vouches for the id
create index seen_content on seen (source, digest) where id_signed = 0;
create index seen_until on seen (until_ms);

create table door (
    n /*sqlite: integer primary key*//*postgres: bigint generated always as identity primary key*/,
    at_ms bigint not null,
    at_seq bigint,
    kind text not null,
    source text not null,
    text text not null,
    event_id text not null,
    session text,
    digest text not null
);

create table binding (
    source text primary key,
    session text not null
) /*sqlite: without rowid*/;

create table token (
    id text /*postgres: collate "C"*/ primary key,
    secret_hash text not null,
    principal text not null,
    label text not null,
    created_at_ms bigint not null,
    expires_at_ms bigint,
    revoked_at_ms bigint
) /*sqlite: without rowid*/;

-- engine: who is there

create table node (
    node text primary key,
    registered_at_ms bigint not null
) /*sqlite: without rowid*/;

create table probe (
    id bigint primary key check (id = 1),
    at_ms bigint not null
);
