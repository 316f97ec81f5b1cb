-- Several people in one session, what they attach, and letting a session go.

-- what becomes of another person's message while a turn runs, or while messages of others wait
alter table session add column others text not null default 'queue' check (others in ('queue', 'refuse'));
-- its journal was ended by a row; nothing more comes in
alter table session add column closed_at_ms bigint;

create table participant (
    session text not null,
    principal text not null,
    role text not null check (role in ('member', 'viewer')),
    seq bigint not null,
    primary key (session, principal)
) /*sqlite: without rowid*/;

create index participant_in_sessions on participant (principal, session);

-- Bytes, once for each content. `refs` counts the uploads and attachments that name them; at none nobody can
-- read them, and they are swept away. They stand apart and in pieces, so that a count can change without
-- writing them again, and a file of any size comes and goes in short transactions.
create table blob (
    digest text primary key,
    size_bytes bigint not null check (size_bytes >= 0),
    refs bigint not null check (refs >= 0)
) /*sqlite: without rowid*/;

create index blob_of_nobody on blob (digest) where refs = 0;

create table piece (
    digest text not null,
    place bigint not null check (place >= 0),
    bytes /*sqlite: blob*//*postgres: bytea*/ not null,
    primary key (digest, place)
);

-- Sent ahead of the message that will name it; known to its uploader alone (K29).
create table upload (
    upload text /*postgres: collate "C"*/ primary key,
    session text not null,
    uploader text not null,
    filename text not null,
    media_type text not null,
    digest text not null,
    size_bytes bigint not null,
    until_ms bigint not null
);

create index upload_until on upload (until_ms);
create index upload_of_session on upload (session, uploader);

-- What an input (`n`) or a result (`seq`) brought with it.
create table attachment (
    session text not null,
    attachment text not null,
    n bigint,
    seq bigint,
    filename text not null,
    media_type text not null,
    digest text not null,
    size_bytes bigint not null,
    uploader text not null,
    primary key (session, attachment),
    check (n is not null or seq is not null)
);

create index attachment_of_input on attachment (session, n) where n is not null;

-- Whose an input is while it waits: a person's, or nobody's. How much of one person's waits is counted by index.
alter table inbox add column owner text;
update inbox set owner = replace(source, '@' || session, '') where source like 'user:%@%' or source like 'operator:%@%';
drop index inbox_queued;
create index inbox_queued on inbox (session, n, lane, owner) where state = 'queued';

-- a session that is deleted lets go of the sources that were bound to it
create index binding_to_session on binding (session);

-- an operator's choices: few, and looked for by every reader that comes back
create index journal_choice on journal (session, seq) where kind = 'conflict.settled';
