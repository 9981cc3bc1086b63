-- Who may come in: keys by the digests of their secrets. A key is never changed but to take it back, and never deleted,
-- so that a store that has once had keys goes on asking for them.

CREATE TABLE keys (
    id TEXT PRIMARY KEY,
    digest TEXT NOT NULL UNIQUE,
    name TEXT NOT NULL,
    owner TEXT NOT NULL,
    scopes TEXT NOT NULL,
    limits TEXT NOT NULL,
    ring TEXT NOT NULL,
    created_at INTEGER NOT NULL,
    revoked_at INTEGER
) WITHOUT ROWID;

PRAGMA user_version = 4;
