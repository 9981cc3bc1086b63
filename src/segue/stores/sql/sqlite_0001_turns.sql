-- Turns, each stored once and linked to its parent by id; parts, the long pieces that many turns share; usage.

-- What responses echo at length (tools, instructions), once per owner and content.
CREATE TABLE parts (
    id INTEGER PRIMARY KEY,
    owner TEXT NOT NULL,
    digest BLOB NOT NULL,
    body BLOB NOT NULL,
    UNIQUE (owner, digest)
);

-- `parent_id` is no foreign key: a parent may be deleted, or may never have been stored.
CREATE TABLE turns (
    seq INTEGER PRIMARY KEY,
    owner TEXT NOT NULL,
    id TEXT NOT NULL,
    parent_id TEXT,
    history BLOB NOT NULL,
    response BLOB NOT NULL,
    instructions INTEGER REFERENCES parts (id),
    tools INTEGER REFERENCES parts (id),
    UNIQUE (owner, id)
);

CREATE INDEX turns_by_instructions ON turns (instructions) WHERE instructions IS NOT NULL;

CREATE INDEX turns_by_tools ON turns (tools) WHERE tools IS NOT NULL;

-- A part goes with the last turn that uses it. Looked up rather than counted: a count can drift.
CREATE TRIGGER parts_after_delete AFTER DELETE ON turns BEGIN
    DELETE FROM parts
    WHERE id IN (old.instructions, old.tools)
        AND NOT EXISTS (SELECT 1 FROM turns WHERE instructions = parts.id)
        AND NOT EXISTS (SELECT 1 FROM turns WHERE tools = parts.id);
END;

CREATE TRIGGER parts_after_update AFTER UPDATE OF instructions, tools ON turns BEGIN
    DELETE FROM parts
    WHERE id IN (old.instructions, old.tools)
        AND NOT EXISTS (SELECT 1 FROM turns WHERE instructions = parts.id)
        AND NOT EXISTS (SELECT 1 FROM turns WHERE tools = parts.id);
END;

-- Who used how much: no content, so it outlives its turn.
CREATE TABLE usage (
    turn_id TEXT PRIMARY KEY,
    owner TEXT NOT NULL,
    model TEXT NOT NULL,
    status TEXT NOT NULL,
    input_tokens INTEGER NOT NULL,
    cached_tokens INTEGER NOT NULL,
    output_tokens INTEGER NOT NULL,
    ended_at INTEGER NOT NULL
) WITHOUT ROWID;

PRAGMA user_version = 1;
