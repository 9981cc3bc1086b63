-- What is left of each key's minute, by the clock of this machine; and which process holds how many of its places.

CREATE TABLE meters (
    key_id TEXT PRIMARY KEY,
    requests REAL NOT NULL,
    tokens REAL NOT NULL,
    filled_at REAL NOT NULL
) WITHOUT ROWID;

CREATE TABLE places (
    key_id TEXT NOT NULL,
    worker TEXT NOT NULL,
    connections INTEGER NOT NULL,
    lanes INTEGER NOT NULL,
    PRIMARY KEY (key_id, worker)
) WITHOUT ROWID;

CREATE INDEX places_by_worker ON places (worker);

PRAGMA user_version = 7;
