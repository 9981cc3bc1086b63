-- Turns are erased in batches: triggers for each statement, not for each row, and nobody who saves waits for them.

DROP TRIGGER parts_after_delete ON turns;

DROP TRIGGER beside_after_delete ON turns;

-- A part goes with the last turn that uses it. Of those who delete one at a time looks; who saves does not wait for that.
-- Only a part that seems to be unused is locked against saves: those that have just named it are seen by the last statement.
-- Without the setting, the plan that is kept after five calls expects to meet the part in any row and reads the whole table
-- for one that is not there.
CREATE FUNCTION drop_part(part_owner text, part_digest bytea) RETURNS void LANGUAGE plpgsql
SET enable_seqscan = off AS $$
BEGIN
    PERFORM 1 FROM parts WHERE owner = part_owner AND digest = part_digest FOR NO KEY UPDATE;
    IF EXISTS (SELECT 1 FROM turns WHERE owner = part_owner AND instructions = part_digest)
        OR EXISTS (SELECT 1 FROM turns WHERE owner = part_owner AND tools = part_digest) THEN
        RETURN;
    END IF;
    PERFORM 1 FROM parts WHERE owner = part_owner AND digest = part_digest FOR UPDATE;
    DELETE FROM parts
    WHERE owner = part_owner AND digest = part_digest
        AND NOT EXISTS (SELECT 1 FROM turns WHERE owner = part_owner AND instructions = part_digest)
        AND NOT EXISTS (SELECT 1 FROM turns WHERE owner = part_owner AND tools = part_digest);
END
$$;

CREATE OR REPLACE FUNCTION drop_parts() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    PERFORM drop_part(old.owner, digest)
    FROM unnest(ARRAY[old.instructions, old.tools]) AS digest
    WHERE digest IS NOT NULL ORDER BY digest;
    RETURN NULL;
END
$$;

CREATE FUNCTION drop_parts_of_all() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    PERFORM drop_part(owner, digest) FROM (
        SELECT owner, instructions AS digest FROM gone UNION SELECT owner, tools FROM gone
    ) AS named WHERE digest IS NOT NULL ORDER BY owner, digest;
    RETURN NULL;
END
$$;

CREATE TRIGGER parts_after_delete AFTER DELETE ON turns
REFERENCING OLD TABLE AS gone FOR EACH STATEMENT EXECUTE FUNCTION drop_parts_of_all();

-- What a sweep deletes runs no more, so no late save is to be feared and its name need not be kept.
CREATE OR REPLACE FUNCTION drop_beside() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    INSERT INTO erased (owner, turn_id, erased_at) SELECT owner, id, seconds_now() FROM gone
    WHERE coalesce(current_setting('segue.is_sweeping', true), '') <> 'yes'
    ON CONFLICT DO NOTHING;
    DELETE FROM events USING gone WHERE events.owner = gone.owner AND events.turn_id = gone.id;
    DELETE FROM claims USING gone WHERE claims.owner = gone.owner AND claims.turn_id = gone.id;
    RETURN NULL;
END
$$;

CREATE TRIGGER beside_after_delete AFTER DELETE ON turns
REFERENCING OLD TABLE AS gone FOR EACH STATEMENT EXECUTE FUNCTION drop_beside();

-- The defaults wait for a fifth of a table: two million dead rows of ten million.
ALTER TABLE turns SET (autovacuum_vacuum_scale_factor = 0.02, autovacuum_analyze_scale_factor = 0.02);

ALTER TABLE events SET (autovacuum_vacuum_scale_factor = 0.02);
