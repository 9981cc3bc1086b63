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

-- name: turn_bytes
-- $1 owner, $2 id, $3 whether with its ancestors. Of a blob only the length is read.
WITH RECURSIVE chain (seq, parent_id) AS (
    SELECT seq, parent_id FROM turns WHERE owner = $1 AND id = $2
    UNION
    SELECT turns.seq, turns.parent_id
    FROM chain CROSS JOIN turns ON turns.owner = $1 AND turns.id = chain.parent_id
    WHERE $3 = 1
), found AS MATERIALIZED (
    SELECT length(history) + length(response) AS bytes, instructions, tools
    FROM chain CROSS JOIN turns ON turns.seq = chain.seq
)
SELECT coalesce((SELECT sum(bytes) FROM found), 0) + coalesce((
    SELECT sum(length(body)) FROM parts
    WHERE id IN (SELECT instructions FROM found UNION SELECT tools FROM found)
), 0);

-- name: part
SELECT digest, body FROM parts WHERE id = :id AND owner = :owner;

-- name: save_part
INSERT INTO parts (owner, digest, body) VALUES (:owner, :digest, :body)
ON CONFLICT (owner, digest) DO NOTHING;

-- name: save
INSERT INTO turns
    (owner, id, parent_id, history, response, worker, saved_at, instructions, tools)
VALUES (
    :owner, :id, :parent_id, :history, :response, :worker, :now,
    (SELECT id FROM parts WHERE owner = :owner AND digest = :instructions),
    (SELECT id FROM parts WHERE owner = :owner AND digest = :tools)
)
ON CONFLICT (owner, id) DO UPDATE SET
    parent_id = excluded.parent_id,
    history = excluded.history,
    response = excluded.response,
    worker = excluded.worker,
    saved_at = excluded.saved_at,
    instructions = excluded.instructions,
    tools = excluded.tools;

-- name: delete
DELETE FROM turns WHERE owner = :owner AND id = :id;

-- name: is_erased
SELECT 1 FROM erased WHERE owner = :owner AND turn_id = :id;

-- name: settle
-- Of containers the latest row counts.
INSERT INTO usage
    (turn_id, owner, model, status, input_tokens, cached_tokens, output_tokens, ended_at, tool_calls,
    container_s, cpu_s, egress_bytes, key_id)
VALUES
    (:turn_id, :owner, :model, :status, :input_tokens, :cached_tokens, :output_tokens, :ended_at, :tool_calls,
    :container_s, :cpu_s, :egress_bytes, :key_id)
ON CONFLICT (turn_id) DO UPDATE SET
    container_s = excluded.container_s, cpu_s = excluded.cpu_s, egress_bytes = excluded.egress_bytes
WHERE usage.status = 'containers';

-- name: report
-- Days are those of UTC.
SELECT
    date(ended_at, 'unixepoch') AS day, owner, model, count(*) FILTER (WHERE status <> 'containers'),
    sum(input_tokens), sum(cached_tokens), sum(output_tokens), sum(tool_calls),
    sum(container_s), sum(cpu_s), sum(egress_bytes), key_id
FROM usage
WHERE ended_at >= :since AND ended_at < :until AND (:owner IS NULL OR owner = :owner)
GROUP BY day, owner, model, key_id
ORDER BY day, owner, model, key_id;

-- name: append
-- A batch that is told again, perhaps with more in it, replaces itself.
INSERT INTO events (owner, turn_id, first, last, body, logged_at)
VALUES (:owner, :turn_id, :first, :last, :body, :now)
ON CONFLICT (owner, turn_id, first) DO UPDATE SET
    last = excluded.last,
    body = excluded.body,
    logged_at = excluded.logged_at
WHERE excluded.last > events.last;

-- name: events_after
SELECT body FROM events
WHERE owner = :owner AND turn_id = :turn_id AND last > :number
ORDER BY first;

-- name: has_events
SELECT 1 FROM events WHERE owner = :owner AND turn_id = :turn_id LIMIT 1;

-- name: delete_events
DELETE FROM events WHERE owner = :owner AND turn_id = :turn_id;

-- name: claim
-- Whoever is first holds the key until it has expired.
INSERT INTO claims (owner, key, turn_id, digest, worker, claimed_at)
VALUES (:owner, :key, :turn_id, :digest, :worker, :now)
ON CONFLICT (owner, key) DO UPDATE SET
    turn_id = excluded.turn_id,
    digest = excluded.digest,
    worker = excluded.worker,
    claimed_at = excluded.claimed_at
WHERE claims.claimed_at < :expired;

-- name: release
DELETE FROM claims WHERE owner = :owner AND key = :key AND turn_id = :turn_id;

-- name: holder
SELECT turn_id, digest FROM claims WHERE owner = :owner AND key = :key;

-- name: workers
-- Everybody who runs a turn, speaks in a conversation, or holds places of a key; not the '' of what is nobody's.
SELECT worker FROM turns WHERE worker > ''
UNION
SELECT worker FROM conversations WHERE worker > ''
UNION
SELECT worker FROM places;

-- name: abandoned
-- With the number of the last event that was written down.
SELECT
    owner, (SELECT max(last) FROM events WHERE events.owner = turns.owner AND turn_id = turns.id),
    id, parent_id, history, response, instructions, tools
FROM turns WHERE worker = :worker LIMIT :count_max;

-- name: left
-- Queued turns that are nobody's.
SELECT owner, id FROM turns WHERE worker = '' LIMIT :count_max;

-- name: hand_over
UPDATE turns SET worker = :worker WHERE owner = :owner AND id = :id;

-- name: hand_over_speaker
-- By the worker that has the turn now, which is indexed.
UPDATE conversations SET worker = :worker
WHERE owner = :owner AND speaker = :id
    AND worker = (SELECT worker FROM turns WHERE owner = :owner AND id = :id);

-- name: give_up
-- A row that cannot be read is left as it is.
UPDATE turns SET worker = NULL WHERE owner = :owner AND id = :id;

-- name: release_claims
-- Keys of turns that never were: their process died before it had saved one.
DELETE FROM claims
WHERE worker = :worker
    AND NOT EXISTS (SELECT 1 FROM turns WHERE owner = claims.owner AND id = claims.turn_id);

-- name: erasures
SELECT owner, turn_id FROM erased WHERE erased_at >= :since;

-- name: newest_turns
-- $1 owner, $2 an id or null, $3 how many at most, $4 whether only those that no other turn continues. Ids do not rise
-- with time where there are several workers. The plus keeps SQLite from sorting all turns of the owner.
SELECT id FROM turns AS tip
WHERE +owner = $1
    AND seq < CASE
        WHEN CAST($2 AS text) IS NULL THEN 9223372036854775807
        ELSE (SELECT seq FROM turns WHERE owner = $1 AND id = $2)
    END
    AND (
        CAST($4 AS integer) = 0
        OR NOT EXISTS (SELECT 1 FROM turns WHERE owner = $1 AND parent_id = tip.id)
    )
ORDER BY seq DESC LIMIT CAST($3 AS bigint);

-- name: old_turns
-- From the newest of the old ones on, so that children come before their parents.
SELECT saved_at, seq, owner, id FROM turns
WHERE worker IS NULL AND (saved_at, seq) < (:below_at, :below_seq)
ORDER BY saved_at DESC, seq DESC
LIMIT :count_max;

-- name: delete_tip
-- By its number, unless it has got a child.
DELETE FROM turns WHERE seq = :seq
    AND NOT EXISTS (SELECT 1 FROM turns AS child
        WHERE child.owner = turns.owner AND child.parent_id = turns.id);

-- name: forget_erased
-- What is swept runs no more, so no late save is to be feared.
DELETE FROM erased WHERE (owner, turn_id) = (:owner, :id);

-- name: delete_old_events
DELETE FROM events WHERE id IN (
    SELECT id FROM events WHERE logged_at < :before LIMIT :count_max
);

-- name: delete_old_claims
DELETE FROM claims WHERE (owner, key) IN (
    SELECT owner, key FROM claims WHERE claimed_at < :before LIMIT :count_max
);

-- name: delete_old_spending
DELETE FROM spending WHERE (subject, day) IN (
    SELECT subject, day FROM spending WHERE day < :before / 86400 LIMIT :count_max
);

-- name: delete_old_erased
DELETE FROM erased WHERE (owner, turn_id) IN (
    SELECT owner, turn_id FROM erased WHERE erased_at < :before LIMIT :count_max
);

-- name: add_key
INSERT INTO keys (id, digest, name, owner, scopes, limits, ring, created_at, revoked_at, secret_start, expires_at, used_at)
VALUES (:id, :digest, :name, :owner, :scopes, :limits, :ring, :created_at, :revoked_at, :secret_start, :expires_at, :used_at)
ON CONFLICT (id) DO NOTHING;

-- name: find_keys
-- :digests is a JSON list. Neither revoked nor expired keys.
SELECT digest, id, name, owner, scopes, limits, ring, created_at, revoked_at, secret_start,
    expires_at, used_at FROM keys
WHERE digest IN (SELECT value FROM json_each(:digests)) AND revoked_at IS NULL
    AND (expires_at IS NULL OR expires_at > :now);

-- name: expired_key
SELECT expires_at FROM keys
WHERE digest IN (SELECT value FROM json_each(:digests)) AND revoked_at IS NULL AND expires_at <= :now;

-- name: list_keys
SELECT digest, id, name, owner, scopes, limits, ring, created_at, revoked_at, secret_start,
    expires_at, used_at FROM keys
ORDER BY created_at, id;

-- name: limit_key
UPDATE keys SET limits = :limits WHERE id = :id AND revoked_at IS NULL;

-- name: revoke_key
UPDATE keys SET revoked_at = :now WHERE id = :id AND revoked_at IS NULL;

-- name: note_key_use
-- :ids is a JSON list.
UPDATE keys SET used_at = :now WHERE id IN (SELECT value FROM json_each(:ids));

-- name: version
PRAGMA user_version;

-- name: says_needs
SELECT 1 FROM sqlite_schema WHERE name = 'needs';

-- name: needs
SELECT schema, row_format FROM needs;

-- name: need_rows
UPDATE needs SET row_format = :rows WHERE row_format < :rows;

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

-- name: find_conversation
SELECT created_at, metadata, tip_id, tip_items, count, version, speaker
FROM conversations WHERE owner = :owner AND id = :id;

-- name: create_conversation
INSERT INTO conversations (owner, id, created_at, metadata, tip_id, tip_items, count, version)
VALUES (:owner, :id, :created_at, :metadata, :tip_id, :tip_items, :added, 1)
ON CONFLICT DO NOTHING;

-- name: update_conversation
UPDATE conversations SET
    metadata = :metadata,
    tip_id = :tip_id,
    tip_items = :tip_items,
    count = count + :added,
    version = version + 1,
    speaker = :speaker,
    -- Who writes beside a turn that speaks is not the one who runs it.
    worker = CASE WHEN :speaker IS NULL THEN NULL WHEN :speaker = speaker THEN worker ELSE :worker END
WHERE owner = :owner AND id = :id AND version = :version;

-- name: release_speakers
-- A dead process speaks no more.
UPDATE conversations SET speaker = NULL, worker = NULL, version = version + 1 WHERE worker = :worker;

-- name: shelve
INSERT INTO shelved (owner, conversation_id, position, item_id, body)
VALUES (:owner, :id, :position, :item_id, :body);

-- name: read_shelved
SELECT item_id, body FROM shelved
WHERE owner = :owner AND conversation_id = :id AND position >= :since AND position < :until
ORDER BY position;

-- name: name_shelved
SELECT position, item_id, length(body) FROM shelved
WHERE owner = :owner AND conversation_id = :id
ORDER BY position;

-- name: delete_conversation
DELETE FROM conversations WHERE owner = :owner AND id = :id;

-- name: unshelve
DELETE FROM shelved WHERE owner = :owner AND conversation_id = :id AND item_id = :item_id;

-- name: unshelve_all
DELETE FROM shelved WHERE owner = :owner AND conversation_id = :id;

-- name: unlink_tip
UPDATE conversations SET tip_id = NULL, tip_items = 0, version = version + 1
WHERE owner = :owner AND id = :id;

-- name: level
SELECT requests, tokens, filled_at FROM meters WHERE key_id = :key_id;

-- name: held_by_others
SELECT coalesce(sum(connections), 0), coalesce(sum(lanes), 0)
FROM places WHERE key_id = :key_id AND worker <> :worker;

-- name: save_level
INSERT INTO meters (key_id, requests, tokens, filled_at)
VALUES (:key_id, :requests, :tokens, :at)
ON CONFLICT (key_id) DO UPDATE SET
    requests = excluded.requests, tokens = excluded.tokens, filled_at = excluded.filled_at;

-- name: save_held
INSERT INTO places (key_id, worker, connections, lanes)
VALUES (:key_id, :worker, :connections, :lanes)
ON CONFLICT (key_id, worker) DO UPDATE SET
    connections = excluded.connections, lanes = excluded.lanes
WHERE (connections, lanes) <> (excluded.connections, excluded.lanes);

-- name: drop_held
DELETE FROM places WHERE key_id = :key_id AND worker = :worker;

-- name: release_places
DELETE FROM places WHERE worker = :worker;

-- name: check_file
-- One row, "ok", or what is wrong first.
PRAGMA integrity_check(1);

-- name: count_all
SELECT
    (SELECT count(*) FROM turns),
    (SELECT count(*) FROM conversations),
    (SELECT count(*) FROM keys WHERE revoked_at IS NULL);

-- name: rings
SELECT DISTINCT ring FROM keys WHERE revoked_at IS NULL;

-- name: every_turn
SELECT owner, id, parent_id, history, response, instructions, tools FROM turns;

-- name: present_files
-- $1 a list of ids in JSON.
SELECT id FROM files WHERE id IN (SELECT value FROM json_each($1));

-- name: every_file
SELECT id FROM files ORDER BY id;

-- name: every_skill_version
SELECT id FROM skill_versions WHERE id IS NOT NULL ORDER BY id;

-- name: mark_owner_erased
-- No turn has this name: it stands for all of the owner.
INSERT INTO erased (owner, turn_id, erased_at) VALUES ($1, '', CAST(strftime('%s', 'now') AS INTEGER))
ON CONFLICT (owner, turn_id) DO UPDATE SET erased_at = excluded.erased_at;

-- name: delete_owner_key_names
-- A key stays as a revoked row without a name, so that a store that has once had keys goes on asking for them.
UPDATE keys SET
    revoked_at = coalesce(revoked_at, CAST(strftime('%s', 'now') AS INTEGER)), name = 'erased', secret_start = ''
WHERE owner = $1;

-- name: move_out_parts
SELECT
    owner, digest, body
FROM parts ORDER BY owner, digest;

-- name: move_in_parts
INSERT INTO parts
    (owner, digest, body)
VALUES (
    ?1, ?2, ?3
);

-- name: move_out_turns
SELECT
    owner, id, parent_id, history, response, (SELECT digest FROM parts WHERE id = turns.instructions),
    (SELECT digest FROM parts WHERE id = turns.tools), worker, saved_at
FROM turns ORDER BY seq;

-- name: move_in_turns
INSERT INTO turns
    (owner, id, parent_id, history, response, instructions, tools, worker, saved_at)
VALUES (
    ?1, ?2, ?3, ?4, ?5, (SELECT id FROM parts WHERE owner = ?1 AND digest = ?6),
    (SELECT id FROM parts WHERE owner = ?1 AND digest = ?7), ?8, ?9
);

-- name: move_out_events
SELECT
    owner, turn_id, first, last, body, logged_at
FROM events ORDER BY owner, turn_id, first;

-- name: move_in_events
INSERT INTO events
    (owner, turn_id, first, last, body, logged_at)
VALUES (
    ?1, ?2, ?3, ?4, ?5, ?6
);

-- name: move_out_claims
SELECT
    owner, key, turn_id, digest, worker, claimed_at
FROM claims ORDER BY owner, key;

-- name: move_in_claims
INSERT INTO claims
    (owner, key, turn_id, digest, worker, claimed_at)
VALUES (
    ?1, ?2, ?3, ?4, ?5, ?6
);

-- name: move_out_usage
SELECT
    turn_id, owner, model, status, input_tokens, cached_tokens, output_tokens, ended_at, tool_calls, container_s,
    cpu_s, egress_bytes, key_id
FROM usage ORDER BY turn_id;

-- name: move_in_usage
INSERT INTO usage
    (turn_id, owner, model, status, input_tokens, cached_tokens, output_tokens, ended_at, tool_calls, container_s,
    cpu_s, egress_bytes, key_id)
VALUES (
    ?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9, ?10, ?11, ?12, ?13
);

-- name: move_out_conversations
SELECT
    owner, id, created_at, metadata, tip_id, tip_items, count, version, speaker, worker
FROM conversations ORDER BY owner, id;

-- name: move_in_conversations
INSERT INTO conversations
    (owner, id, created_at, metadata, tip_id, tip_items, count, version, speaker, worker)
VALUES (
    ?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9, ?10
);

-- name: move_out_shelved
SELECT
    owner, conversation_id, position, item_id, body
FROM shelved ORDER BY owner, conversation_id, position;

-- name: move_in_shelved
INSERT INTO shelved
    (owner, conversation_id, position, item_id, body)
VALUES (
    ?1, ?2, ?3, ?4, ?5
);

-- name: move_out_keys
SELECT
    id, digest, name, owner, scopes, limits, ring, created_at, revoked_at, secret_start, expires_at, used_at
FROM keys ORDER BY id;

-- name: move_in_keys
INSERT INTO keys
    (id, digest, name, owner, scopes, limits, ring, created_at, revoked_at, secret_start, expires_at, used_at)
VALUES (
    ?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9, ?10, ?11, ?12
);

-- name: move_out_files
SELECT
    id, owner, filename, purpose, bytes, created_at, expires_at
FROM files ORDER BY id;

-- name: move_in_files
INSERT INTO files
    (id, owner, filename, purpose, bytes, created_at, expires_at)
VALUES (
    ?1, ?2, ?3, ?4, ?5, ?6, ?7
);

-- name: move_out_skill_versions
SELECT
    id, owner, skill_id, name, description, bytes, created_at, version, skill_created_at, rank
FROM skill_versions ORDER BY skill_id, version;

-- name: move_in_skill_versions
INSERT INTO skill_versions
    (id, owner, skill_id, name, description, bytes, created_at, version, skill_created_at, rank)
VALUES (
    ?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9, ?10
);
