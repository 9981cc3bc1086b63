-- Every statement that the SQLite store runs, by name. All lookups are by owner and id together.

-- name: find
-- The turn and its ancestors of the same owner, in any order. UNION rather than UNION ALL, so that a
-- circle in a damaged file ends.
WITH RECURSIVE chain (seq, parent_id) AS (
    SELECT seq, parent_id FROM turns WHERE owner = :owner AND id = :id
    UNION
    SELECT turns.seq, turns.parent_id
    FROM chain CROSS JOIN turns ON turns.owner = :owner AND turns.id = chain.parent_id
)
SELECT turns.id, turns.parent_id, history, response, instructions, tools
FROM chain CROSS JOIN turns ON turns.seq = chain.seq;

-- name: read
SELECT id, parent_id, history, response, instructions, tools
FROM turns WHERE owner = :owner AND id = :id;

-- name: part
SELECT digest, body FROM parts WHERE id = :id AND owner = :owner;

-- name: save_part
INSERT INTO parts (owner, digest, body) VALUES (:owner, :digest, :body)
ON CONFLICT (owner, digest) DO NOTHING;

-- name: save
INSERT INTO turns (owner, id, parent_id, history, response, instructions, tools)
VALUES (
    :owner, :id, :parent_id, :history, :response,
    (SELECT id FROM parts WHERE owner = :owner AND digest = :instructions),
    (SELECT id FROM parts WHERE owner = :owner AND digest = :tools)
)
ON CONFLICT (owner, id) DO UPDATE SET
    parent_id = excluded.parent_id,
    history = excluded.history,
    response = excluded.response,
    instructions = excluded.instructions,
    tools = excluded.tools;

-- name: delete
DELETE FROM turns WHERE owner = :owner AND id = :id;

-- name: settle
INSERT INTO usage
    (turn_id, owner, model, status, input_tokens, cached_tokens, output_tokens, ended_at)
VALUES
    (:turn_id, :owner, :model, :status, :input_tokens, :cached_tokens, :output_tokens, :ended_at)
ON CONFLICT (turn_id) DO NOTHING;

-- name: version
PRAGMA user_version;

-- name: durability_full
PRAGMA synchronous = FULL;

-- name: durability_relaxed
PRAGMA synchronous = NORMAL;

-- name: read_only
PRAGMA query_only = ON;

-- name: wait_little
-- While it waits for readers a checkpoint holds up writes.
PRAGMA busy_timeout = 100;

-- name: wait_long
-- How long another process may hold the file before we call it unavailable.
PRAGMA busy_timeout = 5000;

-- name: empty_log
PRAGMA wal_checkpoint(TRUNCATE);
