-- What lies beside turns: who runs them, how old they are, their events, the keys that stand for them, what was erased.

-- While a turn runs, the process that runs it; a turn of a dead process has failed.
ALTER TABLE turns ADD COLUMN worker TEXT;

ALTER TABLE turns ADD COLUMN saved_at INTEGER NOT NULL DEFAULT 0;

-- Turns from before this column age from today.
UPDATE turns SET saved_at = CAST(strftime('%s', 'now') AS INTEGER);

CREATE INDEX turns_by_worker ON turns (worker) WHERE worker IS NOT NULL;

-- With `worker` in it, because reading that in a row means reading past the row's history.
CREATE INDEX turns_by_age ON turns (saved_at, worker) WHERE worker IS NULL;

-- Old turns go from the tips of their chains, so children are looked for.
CREATE INDEX turns_by_parent ON turns (owner, parent_id) WHERE parent_id IS NOT NULL;

-- Events in batches, compressed; from the first number to the last.
CREATE TABLE events (
    id INTEGER PRIMARY KEY,
    owner TEXT NOT NULL,
    turn_id TEXT NOT NULL,
    first INTEGER NOT NULL,
    last INTEGER NOT NULL,
    body BLOB NOT NULL,
    logged_at INTEGER NOT NULL,
    UNIQUE (owner, turn_id, first)
);

CREATE INDEX events_by_age ON events (logged_at);

-- An idempotency key, as its digest, and the turn that it stands for.
CREATE TABLE claims (
    owner TEXT NOT NULL,
    key BLOB NOT NULL,
    turn_id TEXT NOT NULL,
    digest BLOB NOT NULL,
    worker TEXT NOT NULL,
    claimed_at INTEGER NOT NULL,
    PRIMARY KEY (owner, key)
) WITHOUT ROWID;

CREATE INDEX claims_by_turn ON claims (owner, turn_id);

CREATE INDEX claims_by_worker ON claims (worker);

CREATE INDEX claims_by_age ON claims (claimed_at);

-- What was deleted stays deleted: a save that comes late finds its turn here, other processes look here for what their
-- caches must let go of. Names only.
CREATE TABLE erased (
    owner TEXT NOT NULL,
    turn_id TEXT NOT NULL,
    erased_at INTEGER NOT NULL,
    PRIMARY KEY (owner, turn_id)
) WITHOUT ROWID;

CREATE INDEX erased_by_age ON erased (erased_at);

CREATE TRIGGER beside_after_delete AFTER DELETE ON turns BEGIN
    DELETE FROM events WHERE owner = old.owner AND turn_id = old.id;
    DELETE FROM claims WHERE owner = old.owner AND turn_id = old.id;
    INSERT INTO erased (owner, turn_id, erased_at)
    VALUES (old.owner, old.id, CAST(strftime('%s', 'now') AS INTEGER))
    ON CONFLICT DO NOTHING;
END;

CREATE INDEX usage_by_end ON usage (ended_at);

PRAGMA user_version = 2;
