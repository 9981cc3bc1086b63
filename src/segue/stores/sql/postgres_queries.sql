-- Every statement that the PostgreSQL store runs, by name. All lookups are by owner and id together. What belongs together
-- is one statement, so that it is one transaction and one round trip.

-- name: find
-- $1 owner, $2 id. The turn and its ancestors of the same owner, in any order, and the parts that they name: those have a
-- digest and a body, and no id. UNION rather than UNION ALL, so that a circle in damaged tables ends. The rows are found
-- again by their place, which is the same within a statement and needs no second index.
WITH RECURSIVE chain (place, parent_id) AS (
    SELECT ctid, parent_id FROM turns WHERE owner = $1 AND id = $2
    UNION
    SELECT turns.ctid, turns.parent_id
    FROM chain JOIN turns ON turns.owner = $1 AND turns.id = chain.parent_id
), found AS MATERIALIZED (
    SELECT turns.id, turns.parent_id, history, response, instructions, tools
    FROM chain JOIN turns ON turns.ctid = chain.place
)
SELECT id, parent_id, history, response, instructions, tools FROM found
UNION ALL
SELECT NULL, NULL, digest, body, NULL, NULL FROM parts
WHERE owner = $1 AND digest IN (SELECT instructions FROM found UNION SELECT tools FROM found);

-- name: turn_bytes
-- $1 owner, $2 id, $3 whether with its ancestors. Of what is stored beside the row only the length is read.
WITH RECURSIVE chain (place, parent_id) AS (
    SELECT ctid, parent_id FROM turns WHERE owner = $1 AND id = $2
    UNION
    SELECT turns.ctid, turns.parent_id
    FROM chain JOIN turns ON turns.owner = $1 AND turns.id = chain.parent_id
    WHERE CAST($3 AS integer) = 1
), found AS MATERIALIZED (
    SELECT length(history) + length(response) AS bytes, instructions, tools
    FROM chain JOIN turns ON turns.ctid = chain.place
)
SELECT coalesce((SELECT sum(bytes) FROM found), 0)::bigint + coalesce((
    SELECT sum(length(body)) FROM parts
    WHERE owner = $1 AND digest IN (SELECT instructions FROM found UNION SELECT tools FROM found)
), 0)::bigint;

-- name: read
-- The same for the turn alone.
WITH found AS MATERIALIZED (
    SELECT id, parent_id, history, response, instructions, tools
    FROM turns WHERE owner = $1 AND id = $2
)
SELECT id, parent_id, history, response, instructions, tools FROM found
UNION ALL
SELECT NULL, NULL, digest, body, NULL, NULL FROM parts
WHERE owner = $1 AND digest IN (SELECT instructions FROM found UNION SELECT tools FROM found);

-- name: save
-- $1 owner, $2 id, $3 parent, $4 history, $5 response, $6 instructions, $7 tools, $8 worker; from $9 on the usage of a
-- turn that has ended: model, status, input, cached, output, end, tools; $16 and $17 digests and bodies of parts that may be new;
-- $18 this worker, $19 whether the turn holds an idempotency key and has no row yet, $20 the API key. One row comes back if it was
-- written. It is
-- not if another worker wrote the turn last, or if the key is no longer this worker's. Whoever ends the turn knows its usage: a
-- process that it was taken from may have entered something before.
WITH held AS (
    SELECT 1 FROM claims
    WHERE $19::boolean AND owner = $1 AND turn_id = $2 AND worker = $18::text
    FOR SHARE
), new_parts AS (
    INSERT INTO parts (owner, digest, body)
    SELECT $1, part.digest, part.body
    FROM unnest($16::bytea[], $17::bytea[]) AS part (digest, body)
    WHERE NOT $19::boolean OR EXISTS (SELECT 1 FROM held)
    ON CONFLICT DO NOTHING
), kept AS (
    INSERT INTO turns
        (owner, id, parent_id, history, response, instructions, tools, worker, saved_by, saved_at)
    SELECT $1, $2, $3, $4, $5, $6, $7, $8, $18, seconds_now()
    WHERE NOT $19::boolean OR EXISTS (SELECT 1 FROM held)
    ON CONFLICT (owner, id) DO UPDATE SET
        parent_id = excluded.parent_id,
        history = excluded.history,
        response = excluded.response,
        instructions = excluded.instructions,
        tools = excluded.tools,
        worker = excluded.worker,
        saved_by = excluded.saved_by,
        saved_at = excluded.saved_at
    WHERE coalesce(turns.saved_by, excluded.saved_by) = excluded.saved_by
    RETURNING 1
), used AS (
    INSERT INTO usage
        (turn_id, owner, model, status, input_tokens, cached_tokens, output_tokens, ended_at, tool_calls, key_id)
    SELECT $2, $1, $9, $10, $11, $12, $13, $14, $15, $20 FROM kept
    WHERE $9::text IS NOT NULL
    ON CONFLICT (turn_id) DO UPDATE SET
        status = excluded.status,
        input_tokens = excluded.input_tokens,
        cached_tokens = excluded.cached_tokens,
        output_tokens = excluded.output_tokens,
        ended_at = excluded.ended_at,
        tool_calls = excluded.tool_calls,
        key_id = excluded.key_id,
        is_provisional = false
)
SELECT 1 FROM kept;

-- name: delete
DELETE FROM turns WHERE owner = $1 AND id = $2;

-- name: settle
-- What a process counted itself replaces what was entered for it when it seemed dead, and what it knew of containers before.
INSERT INTO usage
    (turn_id, owner, model, status, input_tokens, cached_tokens, output_tokens, ended_at, tool_calls,
    container_s, cpu_s, egress_bytes, key_id)
VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, $13)
ON CONFLICT (turn_id) DO UPDATE SET
    input_tokens = excluded.input_tokens,
    cached_tokens = excluded.cached_tokens,
    output_tokens = excluded.output_tokens,
    tool_calls = excluded.tool_calls,
    container_s = excluded.container_s,
    cpu_s = excluded.cpu_s,
    egress_bytes = excluded.egress_bytes,
    key_id = excluded.key_id,
    is_provisional = false
WHERE usage.is_provisional OR usage.status = 'containers';

-- name: report
-- $1 owner or nobody, $2 since, $3 until. Days are those of UTC.
SELECT
    to_char(to_timestamp(ended_at) AT TIME ZONE 'UTC', 'YYYY-MM-DD') AS day, owner, model,
    count(*) FILTER (WHERE status <> 'containers'),
    sum(input_tokens)::bigint, sum(cached_tokens)::bigint, sum(output_tokens)::bigint, sum(tool_calls)::bigint,
    sum(container_s), sum(cpu_s), sum(egress_bytes)::bigint, key_id
FROM usage
WHERE ended_at >= $2 AND ended_at < $3 AND ($1::text IS NULL OR owner = $1)
GROUP BY day, owner, model, key_id
ORDER BY day, owner, model, key_id;

-- name: append
-- $1 owner, $2 turn, $3 first, $4 last, $5 body, $6 this worker. A batch that is told again, perhaps with more in it,
-- replaces itself. Nothing is written to a turn that another worker wrote last.
WITH saved AS (
    SELECT saved_by FROM turns WHERE owner = $1 AND id = $2 FOR SHARE
)
INSERT INTO events (owner, turn_id, first, last, body, logged_at)
SELECT $1, $2, $3, $4, $5, seconds_now()
WHERE NOT EXISTS (SELECT 1 FROM erased WHERE owner = $1 AND turn_id = $2)
    AND NOT EXISTS (SELECT 1 FROM saved WHERE saved_by <> $6::text)
ON CONFLICT (owner, turn_id, first) DO UPDATE SET
    last = excluded.last,
    body = excluded.body,
    logged_at = excluded.logged_at
WHERE excluded.last > events.last;

-- name: events_after
-- $1 owner, $2 turn, $3 number. The last batch comes always, so that a log without news is not an absent one.
SELECT body FROM events
WHERE owner = $1 AND turn_id = $2
    AND NOT EXISTS (SELECT 1 FROM erased WHERE owner = $1 AND turn_id = $2)
    AND (last > $3 OR first = (SELECT max(first) FROM events WHERE owner = $1 AND turn_id = $2))
ORDER BY first;

-- name: delete_events
DELETE FROM events WHERE owner = $1 AND turn_id = $2;

-- name: claim
-- $1 owner, $2 key, $3 turn, $4 digest, $5 worker, $6 seconds that a claim lasts. Whoever is first holds the key until
-- it has expired. The row is written in any case, because only then is it locked and returned. No row: the worker's lease
-- was taken away. It is locked, so that whoever takes it away sees this key.
WITH lease AS (
    SELECT id FROM workers WHERE id = $5 AND claimed_by IS NULL FOR KEY SHARE
)
INSERT INTO claims (owner, key, turn_id, digest, worker, claimed_at)
SELECT $1, $2, $3, $4, lease.id, seconds_now() FROM lease
ON CONFLICT (owner, key) DO UPDATE SET (turn_id, digest, worker, claimed_at) = (
    SELECT
        CASE WHEN is_over THEN excluded.turn_id ELSE claims.turn_id END,
        CASE WHEN is_over THEN excluded.digest ELSE claims.digest END,
        CASE WHEN is_over THEN excluded.worker ELSE claims.worker END,
        CASE WHEN is_over THEN excluded.claimed_at ELSE claims.claimed_at END
    FROM (SELECT claims.claimed_at < excluded.claimed_at - $6::bigint AS is_over) AS age
)
RETURNING turn_id, digest;

-- name: release
-- $1 owner, $2 key, $3 turn, $4 this worker.
DELETE FROM claims WHERE owner = $1 AND key = $2 AND turn_id = $3 AND worker = $4;

-- name: join
-- $1 worker, $2 schema and $3 row format that it knows, $4 its version. No row is touched if the database needs more; whoever
-- makes it need more waits for this, and sees this worker then.
INSERT INTO workers (id, seen_at, schema, row_format, version)
SELECT $1, seconds_now(), $2, $3, $4 FROM needs WHERE schema <= $2::bigint AND row_format <= $3::bigint
FOR SHARE
ON CONFLICT (id) DO NOTHING;

-- name: beat
-- Renews a lease; never one that was taken away.
UPDATE workers SET seen_at = seconds_now() WHERE id = $1 AND claimed_by IS NULL;

-- name: expire
-- A process that leaves: what it left behind is anybody's at once.
UPDATE workers SET seen_at = 0 WHERE id = $1;

-- name: leave
DELETE FROM workers WHERE id = $1;

-- name: dead
-- $1 this worker, $2 seconds that a lease lasts. Workers whose lease is over, and those that left turns, conversations or
-- places of keys behind and have none. No name at all is that of no worker: such turns wait to be taken over.
SELECT id FROM workers WHERE id <> $1 AND seen_at < seconds_now() - $2::bigint
UNION
SELECT worker FROM turns
WHERE worker IS NOT NULL AND worker NOT IN ($1, '')
    AND NOT EXISTS (SELECT 1 FROM workers WHERE id = turns.worker)
UNION
SELECT worker FROM conversations
WHERE worker IS NOT NULL AND worker NOT IN ($1, '')
    AND NOT EXISTS (SELECT 1 FROM workers WHERE id = conversations.worker)
UNION
SELECT worker FROM places
WHERE worker <> $1 AND NOT EXISTS (SELECT 1 FROM workers WHERE id = places.worker);

-- name: claim_worker
-- $1 dead worker, $2 this worker, $3 seconds that a lease lasts. One survivor ends what a dead worker left; if that one dies
-- too, another does. From here on the lease cannot be renewed. A worker without a row gets one, so that there is one to claim.
INSERT INTO workers (id, seen_at, claimed_by) VALUES ($1, 0, $2)
ON CONFLICT (id) DO UPDATE SET claimed_by = excluded.claimed_by
WHERE workers.seen_at < seconds_now() - $3::bigint
    AND coalesce(workers.claimed_by, $2) NOT IN (
        SELECT id FROM workers AS other
        WHERE id <> $2 AND claimed_by IS NULL AND seen_at >= seconds_now() - $3::bigint
    );

-- name: abandoned
-- $1 worker, $2 how many, and no more once they have 16 MiB: they are decoded before they are written. With the number of the
-- last event that was written down. Rows that are being written are skipped.
SELECT
    owner, (SELECT max(last) FROM events WHERE events.owner = turns.owner AND turn_id = turns.id),
    id, parent_id, history, response, instructions, tools
FROM turns
WHERE worker = $1 AND seq IN (
    SELECT seq FROM (
        SELECT seq, sum(octet_length(history)) OVER (ORDER BY seq) - octet_length(history) AS bytes
        FROM turns WHERE worker = $1 ORDER BY seq LIMIT $2
    ) AS sized WHERE bytes < 16777216
)
ORDER BY seq
FOR UPDATE OF turns SKIP LOCKED;

-- name: parts_of
-- $1 owners, $2 digests, side by side.
SELECT owner, digest, body
FROM parts JOIN unnest($1::text[], $2::bytea[]) AS named (owner, digest) USING (owner, digest);

-- name: give_up
-- $1 owners, $2 ids, $3 this worker. Rows that cannot be read are left as they are.
UPDATE turns SET worker = NULL, saved_by = $3
FROM unnest($1::text[], $2::text[]) AS named (owner, id)
WHERE turns.owner = named.owner AND turns.id = named.id;

-- name: end_turns
-- $1 this worker; then side by side: $2 owners, $3 ids, $4 responses, $5 models, $6 input, $7 cached, $8 output, $9 ends, $10
-- tools. All are locked. Their usage is provisional: their process may be alive, and then it knows better.
WITH ended AS (
    SELECT * FROM unnest(
        $2::text[], $3::text[], $4::bytea[], $5::text[],
        $6::bigint[], $7::bigint[], $8::bigint[], $9::bigint[], $10::bigint[]
    ) AS turn (owner, id, response, model, input, cached, output, ended_at, tool_calls)
), written AS (
    UPDATE turns SET
        response = ended.response, worker = NULL, saved_by = $1, saved_at = seconds_now()
    FROM ended WHERE turns.owner = ended.owner AND turns.id = ended.id
)
INSERT INTO usage
    (turn_id, owner, model, status, input_tokens, cached_tokens, output_tokens, ended_at, tool_calls, is_provisional)
SELECT id, owner, model, 'failed', input, cached, output, ended_at, tool_calls, true FROM ended
ON CONFLICT (turn_id) DO NOTHING;

-- name: left
-- $1 how many queued turns that are nobody's.
SELECT owner, id FROM turns WHERE worker = '' ORDER BY seq LIMIT $1
FOR UPDATE SKIP LOCKED;

-- name: taken
-- Side by side: $1 owners, $2 ids; those of these turns that are $3's.
SELECT turns.owner, turns.id
FROM unnest($1::text[], $2::text[]) AS named (owner, id) JOIN turns USING (owner, id)
WHERE turns.worker = $3;

-- name: hand_over
-- Side by side: $1 owners, $2 ids of queued turns, which are locked; $3 whose they are, $4 whose they are from now on, with their
-- keys and the conversations that they have locked.
WITH named AS (
    SELECT * FROM unnest($1::text[], $2::text[]) AS turn (owner, id)
), claimed AS (
    UPDATE claims SET worker = $4 FROM named
    WHERE claims.owner = named.owner AND claims.turn_id = named.id
), spoken AS (
    UPDATE conversations SET worker = $4 FROM named
    WHERE conversations.worker = $3 AND conversations.owner = named.owner AND speaker = named.id
)
UPDATE turns SET worker = $4, saved_by = $4 FROM named
WHERE turns.owner = named.owner AND turns.id = named.id;

-- name: append_last
-- Side by side: $1 owners, $2 turns, $3 numbers, $4 bodies of terminal events.
INSERT INTO events (owner, turn_id, first, last, body, logged_at)
SELECT owner, turn_id, number, number, body, seconds_now()
FROM unnest($1::text[], $2::text[], $3::bigint[], $4::bytea[]) AS event (owner, turn_id, number, body)
ON CONFLICT (owner, turn_id, first) DO NOTHING;

-- name: lock_lease
-- Waits for those who claim a key under this lease.
SELECT 1 FROM workers WHERE id = $1 FOR UPDATE;

-- name: lock_claims
-- Waits for turns that are being saved under these keys.
SELECT 1 FROM claims WHERE worker = $1 ORDER BY owner, key FOR UPDATE;

-- name: release_claims
-- Keys of turns that never were: their process died before it had saved one.
DELETE FROM claims
WHERE worker = $1
    AND NOT EXISTS (SELECT 1 FROM turns WHERE owner = claims.owner AND id = claims.turn_id);

-- name: erasures
-- $1 seconds.
SELECT owner, turn_id FROM erased WHERE erased_at >= seconds_now() - $1::bigint;

-- name: newest_turns
-- $1 owner, $2 an id or null, $3 how many at most, $4 whether only those that no other turn continues. Ids do not rise
-- with time where there are several workers.
SELECT id FROM turns AS tip
WHERE owner = $1
    AND seq < CASE
        WHEN CAST($2 AS text) IS NULL THEN 9223372036854775807
        ELSE (SELECT seq FROM turns WHERE owner = $1 AND id = $2)
    END
    AND (
        CAST($4 AS integer) = 0
        OR NOT EXISTS (SELECT 1 FROM turns WHERE owner = $1 AND parent_id = tip.id)
    )
ORDER BY seq DESC LIMIT CAST($3 AS bigint);

-- name: sweep_turns
-- $1 age, $2 and $3 below which. Deletes the newest 250 of the old ones, so that children come before their parents,
-- but for those with a child that stays and for the ancestors of such. One process at a time. One row comes back: the last
-- that was looked at, how many were, and how many are deleted. The number is a literal, so that the plan knows it; there is
-- one bound, because of two the index would begin at the newest turn.
WITH RECURSIVE old AS MATERIALIZED (
    SELECT saved_at, seq, owner, id, parent_id FROM turns
    WHERE (SELECT pg_try_advisory_xact_lock(7365677566)) AND worker IS NULL
        AND (saved_at, seq) < (
            least($2::bigint, seconds_now() - $1::bigint),
            CASE WHEN $2::bigint < seconds_now() - $1::bigint THEN $3::bigint ELSE 0 END
        )
    ORDER BY saved_at DESC, seq DESC
    LIMIT 250
), kept (owner, id, parent_id) AS (
    SELECT old.owner, old.id, old.parent_id
    FROM old
    JOIN turns AS child ON child.owner = old.owner AND child.parent_id = old.id
    LEFT JOIN old AS other ON other.seq = child.seq
    WHERE other.seq IS NULL
    UNION
    SELECT old.owner, old.id, old.parent_id
    FROM kept JOIN old ON old.owner = kept.owner AND old.id = kept.parent_id
), gone AS (
    DELETE FROM turns WHERE seq = ANY (ARRAY(
        SELECT seq FROM old WHERE (owner, id) NOT IN (SELECT owner, id FROM kept)
    ))
    RETURNING 1
)
SELECT saved_at, seq, (SELECT count(*) FROM old), (SELECT count(*) FROM gone),
    set_config('segue.is_sweeping', 'yes', true)
FROM old ORDER BY saved_at, seq LIMIT 1;

-- name: delete_old_events
DELETE FROM events WHERE (owner, turn_id, first) IN (
    SELECT owner, turn_id, first FROM events WHERE logged_at < seconds_now() - $1::bigint LIMIT $2
);

-- name: delete_erased_events
-- Those that were written at the very moment in which their turn was deleted. $1 is not used: they go at any age.
DELETE FROM events WHERE $1::bigint IS NOT NULL AND (owner, turn_id, first) IN (
    SELECT events.owner, events.turn_id, first FROM erased JOIN events USING (owner, turn_id) LIMIT $2
);

-- name: delete_old_claims
DELETE FROM claims WHERE (owner, key) IN (
    SELECT owner, key FROM claims WHERE claimed_at < seconds_now() - $1::bigint LIMIT $2
);

-- name: delete_old_spending
DELETE FROM spending WHERE (subject, day, connection) IN (
    SELECT subject, day, connection FROM spending WHERE day < (seconds_now() - $1::bigint) / 86400 LIMIT $2
);

-- name: delete_old_erased
DELETE FROM erased WHERE (owner, turn_id) IN (
    SELECT owner, turn_id FROM erased WHERE erased_at < seconds_now() - $1::bigint LIMIT $2
);

-- name: add_key
-- $1 digest, $2 id, $3 name, $4 owner, $5 scopes, $6 limits, $7 ring, $8 created, $9 revoked,
-- $10 start of the secret, $11 expires, $12 used.
INSERT INTO keys (digest, id, name, owner, scopes, limits, ring, created_at, revoked_at, secret_start, expires_at, used_at)
VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12)
ON CONFLICT (id) DO NOTHING;

-- name: find_keys
-- $1 digests. Neither revoked nor expired keys.
SELECT digest, id, name, owner, scopes, limits, ring, created_at, revoked_at, secret_start,
    expires_at, used_at FROM keys
WHERE digest = ANY ($1::text[]) AND revoked_at IS NULL
    AND (expires_at IS NULL OR expires_at > seconds_now());

-- name: expired_key
SELECT expires_at FROM keys
WHERE digest = ANY ($1::text[]) AND revoked_at IS NULL AND expires_at <= seconds_now();

-- name: list_keys
SELECT digest, id, name, owner, scopes, limits, ring, created_at, revoked_at, secret_start,
    expires_at, used_at FROM keys
ORDER BY created_at, id;

-- name: limit_key
UPDATE keys SET limits = $2 WHERE id = $1 AND revoked_at IS NULL;

-- name: revoke_key
UPDATE keys SET revoked_at = seconds_now() WHERE id = $1 AND revoked_at IS NULL;

-- name: note_key_use
-- $1 ids. In their order, so that two workers never wait for each other's rows; a row that is locked is noted next time.
UPDATE keys SET used_at = seconds_now() WHERE id IN (
    SELECT id FROM keys WHERE id = ANY ($1::text[]) ORDER BY id FOR UPDATE SKIP LOCKED
);

-- name: lock_migrations
-- Of several processes that start together one brings the tables up to date, the others wait for it.
SELECT pg_advisory_xact_lock(7365677565);

-- name: make_migrations
CREATE TABLE IF NOT EXISTS migrations (number integer PRIMARY KEY);

-- name: version
SELECT coalesce(max(number), 0) FROM migrations;

-- name: note_migration
INSERT INTO migrations (number) VALUES ($1);

-- name: says_needs
SELECT to_regclass('needs') IS NOT NULL;

-- name: needs
SELECT schema, row_format FROM needs;

-- name: need_rows
UPDATE needs SET row_format = $1 WHERE row_format < $1;

-- name: older
-- $1 seconds that a lease lasts. The versions of processes that live and know less than the database needs.
SELECT coalesce(version, '') FROM workers, needs
WHERE claimed_by IS NULL AND seen_at >= seconds_now() - $1::bigint
    AND (coalesce(workers.schema, 0) < needs.schema OR coalesce(workers.row_format, 0) < needs.row_format);

-- name: room
-- $1 seconds that a lease lasts. How many connections the server takes from us, and how many workers live.
SELECT
    current_setting('max_connections')::bigint - current_setting('superuser_reserved_connections')::bigint
        - coalesce(current_setting('reserved_connections', true), '0')::bigint,
    (SELECT count(*) FROM workers WHERE seen_at >= seconds_now() - $1::bigint);

-- name: ready
SELECT 1;

-- name: find_conversation
SELECT created_at, metadata, tip_id, tip_items, count, version, speaker
FROM conversations WHERE owner = $1 AND id = $2;

-- name: create_conversation
-- $1 owner, $2 id, $3 created, $4 metadata, $5 tip, $6 items of the tip, $7 item ids, $8 bodies.
WITH made AS (
    INSERT INTO conversations (owner, id, created_at, metadata, tip_id, tip_items, count, version)
    VALUES ($1, $2, $3, $4, $5, $6, cardinality($7::text[]), 1)
    ON CONFLICT DO NOTHING
    RETURNING owner, id
)
INSERT INTO shelved (owner, conversation_id, position, item_id, body)
SELECT made.owner, made.id, item.place - 1, item.item_id, item.body
FROM made, unnest($7::text[], $8::bytea[]) WITH ORDINALITY AS item (item_id, body, place);

-- name: update_conversation
-- $1 owner, $2 id, $3 metadata, $4 tip, $5 items of the tip, $6 version, $7 item ids, $8 bodies, $9 speaker, $10 worker. One
-- row at least tells that it was done. Who writes beside a turn that speaks is not the one who runs it.
WITH moved AS (
    UPDATE conversations SET
        metadata = $3,
        tip_id = $4,
        tip_items = $5,
        count = count + cardinality($7::text[]),
        version = version + 1,
        speaker = $9::text,
        worker = CASE WHEN $9 IS NULL THEN NULL WHEN $9 = speaker THEN worker ELSE $10::text END
    WHERE owner = $1 AND id = $2 AND version = $6
    RETURNING owner, id, count - cardinality($7::text[]) AS place
), added AS (
    INSERT INTO shelved (owner, conversation_id, position, item_id, body)
    SELECT moved.owner, moved.id, moved.place + item.place - 1, item.item_id, item.body
    FROM moved, unnest($7::text[], $8::bytea[]) WITH ORDINALITY AS item (item_id, body, place)
)
SELECT place FROM moved;

-- name: release_speakers
-- A dead process speaks no more.
UPDATE conversations SET speaker = NULL, worker = NULL, version = version + 1 WHERE worker = $1;

-- name: read_shelved
SELECT item_id, body FROM shelved
WHERE owner = $1 AND conversation_id = $2 AND position >= $3 AND position < $4
ORDER BY position;

-- name: name_shelved
SELECT position, item_id, octet_length(body) FROM shelved
WHERE owner = $1 AND conversation_id = $2
ORDER BY position;

-- name: delete_conversation
DELETE FROM conversations WHERE owner = $1 AND id = $2;

-- name: unshelve
WITH gone AS (
    DELETE FROM shelved WHERE owner = $1 AND conversation_id = $2 AND item_id = $3
    RETURNING owner, conversation_id
)
UPDATE conversations SET tip_id = NULL, tip_items = 0, version = version + 1
FROM gone WHERE conversations.owner = gone.owner AND conversations.id = gone.conversation_id;

-- name: begin_ring
-- $1 name, $2 secret of a fresh key, which is taken if there is none yet.
INSERT INTO ring (place, name, secret) VALUES (1, $1, $2) ON CONFLICT (place) DO NOTHING;

-- name: add_to_ring
INSERT INTO ring (place, name, secret) SELECT max(place) + 1, $1, $2 FROM ring;

-- name: ring
SELECT name, secret FROM ring ORDER BY place DESC;

-- name: level
-- $1 key, $2 this worker. The time, how often the key was drawn on, what others hold, and what is left. One row always.
SELECT
    extract(epoch FROM clock_timestamp())::double precision, coalesce(version, 0),
    (SELECT coalesce(sum(connections), 0)::bigint FROM places WHERE key_id = $1 AND worker <> $2),
    (SELECT coalesce(sum(lanes), 0)::bigint FROM places WHERE key_id = $1 AND worker <> $2),
    requests, tokens, filled_at
FROM (SELECT 1) AS always LEFT JOIN meters ON key_id = $1;

-- name: save_level
-- $1 key, $2 requests, $3 tokens, $4 when, $5 version that was read, $6 worker, $7 connections, $8 lanes. One row comes back,
-- unless somebody has drawn on the key meanwhile. What is lost with a crash is told again, so nobody waits for a disk: the
-- tables are not logged.
WITH level AS (
    INSERT INTO meters (key_id, requests, tokens, filled_at, version)
    VALUES ($1, $2, $3, $4, $5::bigint + 1)
    ON CONFLICT (key_id) DO UPDATE SET
        requests = excluded.requests,
        tokens = excluded.tokens,
        filled_at = excluded.filled_at,
        version = excluded.version
    WHERE meters.version = $5
    RETURNING key_id
), held AS (
    INSERT INTO places (key_id, worker, connections, lanes)
    SELECT key_id, $6, $7::bigint, $8::bigint FROM level WHERE ($7, $8) <> (0, 0)
    ON CONFLICT (key_id, worker) DO UPDATE SET
        connections = excluded.connections, lanes = excluded.lanes
), dropped AS (
    DELETE FROM places USING level
    WHERE places.key_id = level.key_id AND worker = $6 AND ($7, $8) = (0, 0)
)
SELECT 1 FROM level;

-- name: release_places
DELETE FROM places WHERE worker = $1;

-- name: present_files
-- $1 a list of ids in JSON.
SELECT id FROM files WHERE id IN (SELECT json_array_elements_text(CAST($1 AS json)));

-- name: mark_owner_erased
-- No turn has this name: it stands for all of the owner.
INSERT INTO erased (owner, turn_id, erased_at) VALUES ($1, '', seconds_now())
ON CONFLICT (owner, turn_id) DO UPDATE SET erased_at = excluded.erased_at;

-- name: delete_owner_key_names
-- A key stays as a revoked row without a name, so that a store that has once had keys goes on asking for them.
UPDATE keys SET revoked_at = coalesce(revoked_at, seconds_now()), name = 'erased', secret_start = '' WHERE owner = $1;

-- name: move_out_parts
SELECT
    owner, digest, body
FROM parts ORDER BY owner, digest;

-- name: move_out_turns
SELECT
    owner, id, parent_id, history, response, instructions, tools, worker, saved_at
FROM turns ORDER BY seq;

-- name: move_out_events
SELECT
    owner, turn_id, first, last, body, logged_at
FROM events ORDER BY owner, turn_id, first;

-- name: move_out_claims
SELECT
    owner, key, turn_id, digest, worker, claimed_at
FROM claims ORDER BY owner, key;

-- name: move_out_usage
SELECT
    turn_id, owner, model, status, input_tokens, cached_tokens, output_tokens, ended_at, tool_calls, container_s,
    cpu_s, egress_bytes, key_id
FROM usage ORDER BY turn_id;

-- name: move_out_conversations
SELECT
    owner, id, created_at, metadata, tip_id, tip_items, count, version, speaker, worker
FROM conversations ORDER BY owner, id;

-- name: move_out_shelved
SELECT
    owner, conversation_id, position, item_id, body
FROM shelved ORDER BY owner, conversation_id, position;

-- name: move_out_keys
SELECT
    id, digest, name, owner, scopes, limits, ring, created_at, revoked_at, secret_start, expires_at, used_at
FROM keys ORDER BY id;

-- name: move_out_files
SELECT
    id, owner, filename, purpose, bytes, created_at, expires_at
FROM files ORDER BY id;

-- name: move_out_skill_versions
SELECT
    id, owner, skill_id, name, description, bytes, created_at, version, skill_created_at, rank
FROM skill_versions ORDER BY skill_id, version;

-- name: keep_servers_out
-- Whoever joins waits for the end of the transaction.
SELECT 1 FROM needs FOR UPDATE;

-- name: live_workers
-- $1 seconds that a lease lasts.
SELECT count(*) FROM workers WHERE claimed_by IS NULL AND seen_at >= seconds_now() - $1::bigint;

-- name: empty_all
TRUNCATE parts, turns, events, claims, usage, conversations, shelved, keys, files, skill_versions, erased, spending, meters, places;

-- name: stop_counting
-- While many rows of usage come in one transaction: the trigger would write the same few sums again and again, and each write
-- looks at all earlier ones.
ALTER TABLE usage DISABLE TRIGGER spending_after_usage;

-- name: count_moved
-- What the trigger would have counted.
INSERT INTO spending (subject, day, connection, tokens)
SELECT subject, ended_at / 86400, 0, sum(input_tokens + output_tokens)
FROM usage CROSS JOIN LATERAL (VALUES ('owner ' || owner, true), ('key ' || key_id, key_id <> '')) AS counted (subject, is_known)
WHERE is_known
GROUP BY 1, 2;

-- name: go_on_counting
ALTER TABLE usage ENABLE TRIGGER spending_after_usage;

-- name: empty_ring
DELETE FROM ring;
