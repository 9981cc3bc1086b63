-- Statements that both databases understand; $1, $2 … are the values in their order.

-- name: spent
-- $1 owner, $2 key, $3 the day, $4 the first day of its month.
SELECT
    CAST(coalesce(sum(CASE WHEN subject LIKE 'key %' AND day = CAST($3 AS bigint) THEN tokens END), 0) AS bigint),
    CAST(coalesce(sum(CASE WHEN subject LIKE 'key %' THEN tokens END), 0) AS bigint),
    CAST(coalesce(sum(CASE WHEN subject LIKE 'owner %' AND day = CAST($3 AS bigint) THEN tokens END), 0) AS bigint),
    CAST(coalesce(sum(CASE WHEN subject LIKE 'owner %' THEN tokens END), 0) AS bigint)
FROM spending
WHERE subject IN ('owner ' || CAST($1 AS text), 'key ' || CAST($2 AS text)) AND day >= CAST($4 AS bigint);

-- name: add_file
-- $1 id, $2 owner, $3 filename, $4 purpose, $5 bytes, $6 created, $7 expires; of the owner: $8 files, $9 bytes at most.
INSERT INTO files (id, owner, filename, purpose, bytes, created_at, expires_at)
SELECT
    CAST($1 AS text), CAST($2 AS text), CAST($3 AS text), CAST($4 AS text), CAST($5 AS bigint),
    CAST($6 AS bigint), CAST($7 AS bigint)
FROM (
    SELECT count(*) AS held, coalesce(sum(bytes), 0) AS held_bytes FROM files
    WHERE owner = $2 AND (expires_at IS NULL OR expires_at > CAST($6 AS bigint))
) AS own
WHERE held < CAST($8 AS bigint) AND held_bytes + CAST($5 AS bigint) <= CAST($9 AS bigint)
ON CONFLICT (id) DO NOTHING;

-- name: find_file
-- $1 owner, $2 id, $3 now.
SELECT id, owner, filename, purpose, bytes, created_at, expires_at FROM files
WHERE owner = $1 AND id = $2 AND (expires_at IS NULL OR expires_at > CAST($3 AS bigint));

-- name: newest_files
-- $1 owner, $2 purpose or null, $3 now.
SELECT id, owner, filename, purpose, bytes, created_at, expires_at FROM files
WHERE owner = $1 AND purpose = coalesce(CAST($2 AS text), purpose)
    AND (expires_at IS NULL OR expires_at > CAST($3 AS bigint))
ORDER BY created_at DESC, id DESC;

-- name: delete_file
-- $1 owner, $2 id.
DELETE FROM files WHERE owner = $1 AND id = $2;

-- name: expired_files
-- $1 now, $2 how many at most.
SELECT id, owner, filename, purpose, bytes, created_at, expires_at FROM files
WHERE expires_at <= CAST($1 AS bigint) ORDER BY expires_at LIMIT CAST($2 AS bigint);

-- name: add_skill_version
-- $1 id, $2 owner, $3 skill, $4 name, $5 description, $6 bytes, $7 created; of the owner: $8 versions, $9 bytes at
-- most; $10 whether the skill is new, $11 whether the version is to be its default.
INSERT INTO skill_versions (
    id, owner, skill_id, name, description, bytes, created_at, version, skill_created_at, rank
)
SELECT
    CAST($1 AS text), CAST($2 AS text), CAST($3 AS text), CAST($4 AS text), CAST($5 AS text),
    CAST($6 AS bigint), CAST($7 AS bigint), coalesce(max(version), 0) + 1,
    coalesce(min(skill_created_at), CAST($7 AS bigint)),
    CASE WHEN $11 OR count(*) = 0 THEN coalesce(max(rank), 0) + 1 ELSE 0 END
FROM skill_versions WHERE skill_id = $3 AND owner = $2
HAVING (count(*) = 0) = $10
    AND (SELECT count(own.id) FROM skill_versions AS own WHERE own.owner = $2) < CAST($8 AS bigint)
    AND (SELECT coalesce(sum(own.bytes), 0) FROM skill_versions AS own WHERE own.owner = $2)
        + CAST($6 AS bigint) <= CAST($9 AS bigint)
ON CONFLICT DO NOTHING;

-- name: skill_versions
-- $1 owner, $2 skill or null.
SELECT id, owner, skill_id, name, description, bytes, created_at, version, skill_created_at, rank
FROM skill_versions
WHERE owner = $1 AND skill_id = coalesce(CAST($2 AS text), skill_id) AND id IS NOT NULL
ORDER BY skill_created_at DESC, skill_id DESC, version DESC;

-- name: make_default_version
-- $1 owner, $2 skill, $3 version.
UPDATE skill_versions SET rank = (
    SELECT max(other.rank) + 1 FROM skill_versions AS other WHERE other.skill_id = $2
)
WHERE owner = $1 AND skill_id = $2 AND version = CAST($3 AS bigint) AND id IS NOT NULL;

-- name: delete_skill
-- $1 owner, $2 skill.
DELETE FROM skill_versions WHERE owner = $1 AND skill_id = $2;

-- name: delete_skill_version
-- $1 owner, $2 skill, $3 version. Its number stays, so that it is not given again.
UPDATE skill_versions SET id = NULL, name = '', description = '', bytes = 0, rank = 0
WHERE owner = $1 AND skill_id = $2 AND version = CAST($3 AS bigint) AND id IS NOT NULL AND rank < (
    SELECT max(other.rank) FROM skill_versions AS other WHERE other.skill_id = $2
);

-- name: present_skill_version
SELECT id FROM skill_versions WHERE id = $1;

-- name: count_owner
SELECT
    (SELECT count(*) FROM turns WHERE owner = $1),
    (SELECT count(*) FROM conversations WHERE owner = $1),
    (SELECT count(*) FROM files WHERE owner = $1),
    (SELECT count(id) FROM skill_versions WHERE owner = $1),
    (SELECT count(*) FROM claims WHERE owner = $1),
    (SELECT count(*) FROM keys WHERE owner = $1),
    (SELECT count(*) FROM usage WHERE owner = $1),
    (SELECT count(*) FROM erased WHERE owner = $1 AND turn_id = '');

-- name: delete_owner_turns
-- $1 owner, $2 how many at most.
DELETE FROM turns WHERE owner = $1 AND id IN (SELECT id FROM turns WHERE owner = $1 LIMIT CAST($2 AS bigint));

-- name: delete_owner_shelved
DELETE FROM shelved WHERE owner = $1;

-- name: delete_owner_conversations
DELETE FROM conversations WHERE owner = $1;

-- name: delete_owner_events
DELETE FROM events WHERE owner = $1;

-- name: delete_owner_claims
DELETE FROM claims WHERE owner = $1;

-- name: delete_owner_parts
-- They went with their turns, but for those of a turn that is being saved.
DELETE FROM parts WHERE owner = $1
    AND NOT EXISTS (SELECT 1 FROM turns WHERE turns.owner = $1);

-- name: owner_objects
SELECT id FROM files WHERE owner = $1
UNION ALL
SELECT id FROM skill_versions WHERE owner = $1 AND id IS NOT NULL;

-- name: delete_owner_object_file
DELETE FROM files WHERE owner = $1 AND id = $2;

-- name: delete_owner_skills
DELETE FROM skill_versions WHERE owner = $1;

-- name: delete_owner_usage
DELETE FROM usage WHERE owner = $1;

-- name: delete_owner_of_keys
-- Their rows name nobody from now on.
UPDATE keys SET owner = '' WHERE owner = $1 AND revoked_at IS NOT NULL;

-- name: delete_owner_spending
-- Before the rows of usage: those name keys whose own rows name no owner any more.
DELETE FROM spending WHERE subject = 'owner ' || CAST($1 AS text)
    OR subject IN (SELECT 'key ' || id FROM keys WHERE owner = $1)
    OR subject IN (SELECT 'key ' || key_id FROM usage WHERE owner = $1);

-- name: count_rows
-- Of the tables that are moved, in the order in which they are.
SELECT
    (SELECT count(*) FROM parts),
    (SELECT count(*) FROM turns),
    (SELECT count(*) FROM events),
    (SELECT count(*) FROM claims),
    (SELECT count(*) FROM usage),
    (SELECT count(*) FROM conversations),
    (SELECT count(*) FROM shelved),
    (SELECT count(*) FROM keys),
    (SELECT count(*) FROM files),
    (SELECT count(*) FROM skill_versions);
