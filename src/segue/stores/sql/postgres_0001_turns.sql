-- Turns, each stored once and linked to its parent by id; parts, the long pieces that many turns share; usage; and what
-- lies beside turns: events, keys, workers, what was erased. Bodies are bytes, so NUL and any Unicode are safe.

-- What responses echo at length (tools, instructions), once per owner and content.
CREATE TABLE parts (
    owner text NOT NULL,
    digest bytea NOT NULL,
    body bytea NOT NULL,
    PRIMARY KEY (owner, digest)
);

-- `parent_id` is no foreign key: a parent may be deleted, or may never have been stored. Parts are: a part that goes
-- while a turn that names it is being saved makes that save fail, and it is tried again.
CREATE TABLE turns (
    seq bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    owner text NOT NULL,
    id text NOT NULL,
    parent_id text,
    history bytea NOT NULL,
    response bytea NOT NULL,
    instructions bytea,
    tools bytea,
    -- While a turn runs, the process that runs it; a turn of a dead process has failed.
    worker text,
    saved_at bigint NOT NULL,
    UNIQUE (owner, id),
    FOREIGN KEY (owner, instructions) REFERENCES parts (owner, digest),
    FOREIGN KEY (owner, tools) REFERENCES parts (owner, digest)
);

CREATE INDEX turns_by_instructions ON turns (owner, instructions) WHERE instructions IS NOT NULL;

CREATE INDEX turns_by_tools ON turns (owner, tools) WHERE tools IS NOT NULL;

CREATE INDEX turns_by_worker ON turns (worker) WHERE worker IS NOT NULL;

CREATE INDEX turns_by_age ON turns (saved_at, seq) WHERE worker IS NULL;

-- Old turns go from the tips of their chains, so children are looked for.
CREATE INDEX turns_by_parent ON turns (owner, parent_id) WHERE parent_id IS NOT NULL;

-- Who used how much: no content, so it outlives its turn.
CREATE TABLE usage (
    turn_id text PRIMARY KEY,
    owner text NOT NULL,
    model text NOT NULL,
    status text NOT NULL,
    input_tokens bigint NOT NULL,
    cached_tokens bigint NOT NULL,
    output_tokens bigint NOT NULL,
    ended_at bigint NOT NULL
);

CREATE INDEX usage_by_end ON usage (ended_at);

-- Events in batches, compressed; from the first number to the last.
CREATE TABLE events (
    owner text NOT NULL,
    turn_id text NOT NULL,
    first bigint NOT NULL,
    last bigint NOT NULL,
    body bytea NOT NULL,
    logged_at bigint NOT NULL,
    PRIMARY KEY (owner, turn_id, first)
);

CREATE INDEX events_by_age ON events (logged_at);

-- An idempotency key, as its digest, and the turn that it stands for.
CREATE TABLE claims (
    owner text NOT NULL,
    key bytea NOT NULL,
    turn_id text NOT NULL,
    digest bytea NOT NULL,
    worker text NOT NULL,
    claimed_at bigint NOT NULL,
    PRIMARY KEY (owner, key)
);

CREATE INDEX claims_by_turn ON claims (owner, turn_id);

CREATE INDEX claims_by_worker ON claims (worker);

CREATE INDEX claims_by_age ON claims (claimed_at);

-- Every process that uses this database, and when it last said so.
CREATE TABLE workers (
    id text PRIMARY KEY,
    seen_at bigint NOT NULL
);

-- What was deleted stays deleted: a save that comes late finds its turn here, other processes look here for what their
-- caches must let go of. Names only.
CREATE TABLE erased (
    owner text NOT NULL,
    turn_id text NOT NULL,
    erased_at bigint NOT NULL,
    PRIMARY KEY (owner, turn_id)
);

CREATE INDEX erased_by_age ON erased (erased_at);

-- Seconds, by this server's clock: processes on several machines need not agree on the time.
CREATE FUNCTION seconds_now() RETURNS bigint LANGUAGE sql STABLE AS
    'SELECT extract(epoch FROM statement_timestamp())::bigint';

-- A part goes with the last turn that uses it. It is locked first, which waits for saves that have just named it; the
-- second statement then sees them.
CREATE FUNCTION drop_parts() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    PERFORM 1 FROM parts
    WHERE owner = old.owner AND digest IN (old.instructions, old.tools)
    ORDER BY digest FOR UPDATE;
    DELETE FROM parts
    WHERE owner = old.owner AND digest IN (old.instructions, old.tools)
        AND NOT EXISTS (SELECT 1 FROM turns WHERE owner = parts.owner AND instructions = parts.digest)
        AND NOT EXISTS (SELECT 1 FROM turns WHERE owner = parts.owner AND tools = parts.digest);
    RETURN NULL;
END
$$;

CREATE TRIGGER parts_after_delete AFTER DELETE ON turns
FOR EACH ROW WHEN (old.instructions IS NOT NULL OR old.tools IS NOT NULL)
EXECUTE FUNCTION drop_parts();

CREATE TRIGGER parts_after_update AFTER UPDATE ON turns
FOR EACH ROW WHEN (
    old.instructions IS DISTINCT FROM new.instructions OR old.tools IS DISTINCT FROM new.tools
) EXECUTE FUNCTION drop_parts();

CREATE FUNCTION drop_beside() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    INSERT INTO erased (owner, turn_id, erased_at) VALUES (old.owner, old.id, seconds_now())
    ON CONFLICT DO NOTHING;
    DELETE FROM events WHERE owner = old.owner AND turn_id = old.id;
    DELETE FROM claims WHERE owner = old.owner AND turn_id = old.id;
    RETURN NULL;
END
$$;

CREATE TRIGGER beside_after_delete AFTER DELETE ON turns
FOR EACH ROW EXECUTE FUNCTION drop_beside();

-- A turn that was deleted while it ran is not brought back by its last save. Looked up behind the insert, because that may
-- have waited for the very deletion.
CREATE FUNCTION stay_erased() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF EXISTS (SELECT 1 FROM erased WHERE owner = new.owner AND turn_id = new.id) THEN
        DELETE FROM turns WHERE seq = new.seq;
    END IF;
    RETURN NULL;
END
$$;

CREATE TRIGGER turns_stay_erased AFTER INSERT ON turns
FOR EACH ROW EXECUTE FUNCTION stay_erased();
