-- Which nodes live: one lease for each incarnation, whatever it owns, by the database's clock alone.

-- where other nodes reach it
alter table node add column address text;
-- it lives until then; none where it never beat, which nobody sweeps
alter table node add column lease_until_ms bigint;
-- when it was found that its lease had ended; for good
alter table node add column dead_at_ms bigint
    check (dead_at_ms is null or (lease_until_ms is not null and lease_until_ms <= dead_at_ms));

create index node_lease on node (lease_until_ms) where dead_at_ms is null and lease_until_ms is not null;
create index node_dead on node (dead_at_ms, node) where dead_at_ms is not null;

-- what one node owns; a write of rows changes neither column, and so leaves the index alone
create index session_of_node on session (node) where state = 'owned';
