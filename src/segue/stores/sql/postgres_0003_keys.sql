-- Who may come in: keys by the digests of their secrets. A key is never changed but to take it back, and never deleted,
-- so that a store that has once had keys goes on asking for them.

CREATE TABLE keys (
    id text PRIMARY KEY,
    digest text NOT NULL UNIQUE,
    name text NOT NULL,
    owner text NOT NULL,
    scopes text NOT NULL,
    limits text NOT NULL,
    ring text NOT NULL,
    created_at bigint NOT NULL,
    revoked_at bigint
);
