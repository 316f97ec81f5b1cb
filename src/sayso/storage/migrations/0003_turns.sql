-- How often a session was taken up since anything of it was stored, so that one which ends whoever owns it is noticed.
alter table session add column attempts integer not null default 0 check (attempts >= 0);

-- What an operation left in the world, as its newest answer says.
alter table operation add column effect text
    check (effect in ('committed', 'none', 'unknown', 'partial', 'rolled_back'));
